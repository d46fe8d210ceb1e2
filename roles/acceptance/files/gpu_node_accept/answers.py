"""What the engine answers: determinism, tool calls, thoughts, the prefix cache. Verdicts are pure."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from gpu_node_accept.checks import CheckError, Outcome, failed, not_here, not_run, passed, warned
from gpu_node_accept.server import Answer, Server, Streamed
from gpu_node_accept.traffic import moved, others, settled

TIMEOUT_S = 300.0
THINKING_OFF = {"chat_template_kwargs": {"thinking": False}}
PROMPT = "List the first twelve prime numbers, then explain in three sentences why one is not a prime number."
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the current weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]}},
            "required": ["city"],
        },
    },
}
# Under this, what a computer does besides decides more than the cache.
MEASURABLE_S = 0.2
CACHE_SHARE = 0.5
CLEARLY_SMALLER = 0.7
# The documents' workloads have about half; a head that does not fit, 4 % (cases VLLM-08).
DRAFT_SHARE = 0.1
FROM_THE_TEXT = ("ngram", "suffix")
DRAIN = "ask again on a drained replica: gpu-node drain N"


def first_difference(one: str, other: str) -> int | None:
    """The place of the first character in which two texts differ; None when they are the same."""
    if one == other:
        return None
    return next(
        (place for place, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other))
    )


def determinism(texts: Sequence[str], meanwhile: str, drafts: float | None) -> Outcome:
    """Greedy decoding, alone on the engine, gives the same text each time.

    :param meanwhile: what others had of the engine: with them the batches differ.
    :param drafts: how many drafts speculation made meanwhile; None without speculation.
    """
    how = "" if drafts is None else f", {drafts:.0f} drafts by speculation"
    wanted = "the same text each time"
    if drafts == 0:
        how = ", and speculation drafted nothing"
    places = [place for text in texts[1:] if (place := first_difference(texts[0], text)) is not None]
    if not places:
        if not texts or not texts[0]:
            return failed("an empty text", wanted, "ask the engine by hand; its answer has no text")
        return passed(f"{len(texts)} times the same {len(texts[0])} characters{how}", wanted)
    seen = f"{len(places)} of {len(texts) - 1} repeats differ, the first at character {min(places)}{how}"
    if meanwhile:
        return not_run(f"{seen}, but {meanwhile} meanwhile", DRAIN, wanted)
    remedy = "compare with speculation and each kernel switch off; playbooks/quality.yml tells how much it matters"
    return failed(seen, wanted, remedy)


def tool_call(answer: Answer) -> Outcome:
    """A tool call comes back as such, with arguments that are JSON and fit."""
    calls = answer.message.get("tool_calls") or []
    wanted = "a call of get_weather with a city, as JSON"
    remedy = "compare tool-call-parser and tokenizer-mode with the model's own document"
    if not calls:
        return failed(f"no tool_calls; content {answer.content[:120]!r}", wanted, remedy)
    function = calls[0].get("function") or {}
    try:
        arguments = json.loads(function.get("arguments") or "")
    except ValueError:
        return failed(f"arguments that are not JSON: {function.get('arguments')!r}"[:200], wanted, remedy)
    if function.get("name") != "get_weather" or not isinstance(arguments, dict) or not arguments.get("city"):
        return failed(f"{function.get('name')}({json.dumps(arguments)[:120]})", wanted, remedy)
    return passed(f"get_weather({json.dumps(arguments)})", wanted)


def reasoning(answer: Answer) -> Outcome:
    """Thoughts come in their own field, and the answer has none of their marks."""
    thoughts, content = answer.thoughts, answer.content
    wanted = "thoughts apart from an answer with 323"
    remedy = "compare reasoning-parser and tokenizer-mode with the model's own document"
    if not thoughts:
        return failed(f"no thoughts; content {content[:120]!r}", wanted, remedy)
    if "<think>" in content or "</think>" in content:
        return failed(f"marks of thoughts in the answer: {content[:120]!r}", wanted, remedy)
    if not content:
        ended = f"finish_reason {answer.finish_reason}"
        return failed(f"{len(thoughts)} characters of thoughts and no answer ({ended})", wanted, remedy)
    seen = f"{len(thoughts)} characters of thoughts, then {content.strip()[:60]!r}"
    # What a model knows is a matter of the quality gates.
    return passed(seen, wanted) if "323" in content else warned(seen, wanted, "run playbooks/quality.yml")


def prefix_cache(cold: Streamed, warm: Streamed, hits: float | None, meanwhile: str) -> Outcome:
    """The second time, a long prompt is taken from the cache.

    :param hits: by how many tokens vllm:prefix_cache_hits went up meanwhile; None: there is no such counter.
    :param meanwhile: what others had of the engine: their hits count, and their prompts take time and cache.
    """
    seen = (
        f"first token after {cold.first_s * 1000:.0f} ms, then {warm.first_s * 1000:.0f} ms"
        f" ({cold.prompt_tokens:,} tokens, {'no counter' if hits is None else f'{hits:,.0f} from the cache'})"
    )
    wanted = f"at least {CACHE_SHARE:.0%} of the prompt from the cache, the first token clearly sooner"
    remedy = "compare enable-prefix-caching with the plan; a cache that is full of others' prompts drops this one too"
    if hits is None:
        return not_run("the engine has no counter vllm:prefix_cache_hits", "look whether this server is a vLLM")
    if meanwhile:
        return not_run(f"{seen}, but {meanwhile} meanwhile", DRAIN, wanted)
    if hits < CACHE_SHARE * cold.prompt_tokens:
        return failed(seen, wanted, remedy)
    if cold.first_s < MEASURABLE_S:
        return passed(f"{seen}; too short to compare the times", wanted)
    if warm.first_s > CLEARLY_SMALLER * cold.first_s:
        return failed(seen, wanted, remedy)
    return passed(seen, wanted)


def drafts(made: float | None, accepted: float | None, per_draft: int) -> Outcome:
    """Speculation is worth its time: a good part of what it drafts is taken.

    :param made: draft tokens; None: there is no such counter.
    :param per_draft: draft tokens at a time, as the plan has them.
    """
    wanted = f"at least {DRAFT_SHARE:.0%} of the drafted tokens accepted"
    remedy = (
        "the head is not of this model, or not made for so many tokens at a time: compare drafter and"
        " speculative_tokens with the head's own config"
    )
    if made is None or accepted is None:
        return not_run(
            "the engine has no counters vllm:spec_decode_num_*", "look whether this server is a vLLM", wanted
        )
    if made < 1:
        return failed("speculation drafted nothing", wanted, "read the engine's log from the start for the reason")
    seen = f"{accepted / made:.1%} of {made:,.0f} drafted tokens, {per_draft} at a time"
    return passed(seen, wanted) if accepted >= DRAFT_SHARE * made else warned(seen, wanted, remedy)


def ask_determinism(server: Server, times: int, tokens: int) -> Outcome:
    """Ask the same thing again and again. The first answer fills the prefix cache, and is not compared."""
    body = {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": tokens, "ignore_eos": True, **THINKING_OFF}
    server.chat(body, TIMEOUT_S)
    before = settled(server)
    found = [server.chat(body, TIMEOUT_S) for _ in range(times)]
    after = settled(server)
    meanwhile = others(before, after, sum(answer.completion_tokens for answer in found))
    drafts = moved(before, after, "vllm:spec_decode_num_drafts")
    return determinism([answer.text for answer in found], meanwhile, drafts)


def ask_drafts(server: Server, arguments: dict[str, Any]) -> Outcome:
    """Have a text written that is easy to foresee. What others have drafted meanwhile counts, too: texts like any."""
    config = arguments.get("speculative-config") or {}
    if not config:
        return not_here("the plan has no speculation")
    if config.get("method") in FROM_THE_TEXT:
        return not_here(f"{config['method']} takes drafts from the text itself: no head that could be a wrong one")
    before = settled(server)
    body = {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 512, **THINKING_OFF}
    server.chat(body, TIMEOUT_S)
    after = settled(server)
    made, accepted = (moved(before, after, f"vllm:spec_decode_num_{name}_tokens") for name in ("draft", "accepted"))
    return drafts(made, accepted, int(config.get("num_speculative_tokens") or 0))


def ask_tool(server: Server, arguments: dict[str, Any]) -> Outcome:
    """Ask for something that only the tool knows."""
    if not arguments.get("enable-auto-tool-choice") or not arguments.get("tool-call-parser"):
        return not_here("the profile has no tool-call-parser")
    question = "What is the weather in Paris now, in celsius? Use the tool."
    body = {"messages": [{"role": "user", "content": question}], "tools": [TOOL], "tool_choice": "auto"}
    return tool_call(server.chat({**body, "max_tokens": 1024, **THINKING_OFF}, TIMEOUT_S))


def ask_reasoning(server: Server, arguments: dict[str, Any]) -> Outcome:
    """Ask with thinking on. Thoughts need room: a small max_tokens gives an empty answer."""
    if not arguments.get("reasoning-parser"):
        return not_here("the profile has no reasoning-parser")
    body = {"messages": [{"role": "user", "content": "What is 17 * 19? Answer with the number."}], "max_tokens": 4096}
    return reasoning(server.chat({**body, "chat_template_kwargs": {"thinking": True}}, TIMEOUT_S))


def token_prompt(length: int, seed: int) -> list[int]:
    """Token ids of an exact length that no prompt began with before; small ids are in every vocabulary."""
    mark = [200 + (seed >> shift) % 97 for shift in range(0, 32, 4)]
    return [*mark, *(110 + (place * 7 + seed) % 90 for place in range(length - len(mark)))][:length]


def ask_prefix_cache(server: Server, arguments: dict[str, Any], length: int, seed: int) -> Outcome:
    """The same prompt twice, unless the engine has no such cache (vLLM switches it off for MLA on CPUs)."""
    before = settled(server)
    if before.label("vllm:cache_config_info", "enable_prefix_caching") == "False":
        if not arguments.get("enable-prefix-caching"):
            return not_here("the engine has it switched off, and the plan does not ask for it")
        remedy = "read the engine's log from the start for the reason"
        return failed("the engine has it switched off", "a prefix cache (enable-prefix-caching)", remedy)
    body = {"prompt": token_prompt(length, seed), "max_tokens": 1, "ignore_eos": True}
    cold = server.stream(body, TIMEOUT_S)
    if cold.prompt_tokens != length:
        raise CheckError(f"a prompt of {length} tokens was counted as {cold.prompt_tokens}")
    # The first time hits nothing: no prompt began like this one.
    warm = server.stream(body, TIMEOUT_S)
    after = settled(server)
    meanwhile = others(before, after, cold.completion_tokens + warm.completion_tokens)
    return prefix_cache(cold, warm, moved(before, after, "vllm:prefix_cache_hits"), meanwhile)
