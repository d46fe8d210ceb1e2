"""What the plan promises at its edge: the whole window, all sequences, the offload tier, a restart."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from gpu_node_accept import traffic
from gpu_node_accept.answers import DRAIN, token_prompt
from gpu_node_accept.checks import CheckError, Outcome, failed, not_here, not_run, passed, warned
from gpu_node_accept.server import Server, Streamed

Say = Callable[[str], None]
LAST_TOKENS = 8
_LOAD = "vllm:kv_offload_load_bytes"


def full_window(done: Streamed, window: int) -> Outcome:
    """A prompt that fills the window but for a few tokens was answered."""
    asked = window - LAST_TOKENS
    rate = done.prompt_tokens / max(done.first_s, 1e-6)
    seen = (
        f"{done.prompt_tokens:,} tokens in {done.first_s:.1f} s ({rate:,.0f} tokens/s),"
        f" then {done.completion_tokens} tokens"
    )
    wanted = f"{asked:,} tokens of prompt and {LAST_TOKENS} of answer, the whole window of {window:,}"
    if done.prompt_tokens != asked or done.completion_tokens != LAST_TOKENS:
        return failed(seen, wanted, "look at the engine's log; lower max_model_len when memory ran out")
    return passed(seen, wanted)


def ask_full_window(server: Server, window: int, seed: int, timeout_s: float) -> Outcome:
    """Fill the window once."""
    prompt = token_prompt(window - LAST_TOKENS, seed)
    return full_window(
        server.stream({"prompt": prompt, "max_tokens": LAST_TOKENS, "ignore_eos": True}, timeout_s), window
    )


def concurrency(
    answers: Sequence[Streamed | CheckError], tokens: int, most_running: float, preempted: float, meanwhile: str
) -> Outcome:
    """All sequences of the plan ran at the same time, and each came to its end.

    :param meanwhile: what others had of the engine: their sequences need KV cache, too.
    """
    errors = [one for one in answers if isinstance(one, CheckError)]
    short = [one for one in answers if isinstance(one, Streamed) and one.completion_tokens != tokens]
    count = len(answers)
    seen = f"{count - len(errors) - len(short)} of {count} whole, {most_running:.0f} at the same time"
    wanted = f"{count} answers of {tokens} tokens, all at the same time"
    remedy = "look at the engine's log; lower max_num_seqs when memory ran out"
    if errors or short:
        first = f"; {errors[0]}" if errors else f"; one has {short[0].completion_tokens} tokens"
        return failed(seen + first, wanted, remedy)
    if preempted and meanwhile:
        return not_run(
            f"{seen}, {preempted:.0f} set back for want of KV cache, but {meanwhile} meanwhile", DRAIN, wanted
        )
    if preempted:
        return failed(f"{seen}, {preempted:.0f} set back for want of KV cache", wanted, remedy)
    if most_running < count:
        # A look a tenth of a second apart may miss the moment; that all ended whole is the harder half.
        return warned(seen, wanted, "ask for longer answers (acceptance_concurrency_tokens), so that they overlap")
    return passed(seen, wanted)


def ask_concurrency(server: Server, count: int, tokens: int, seed: int, timeout_s: float) -> Outcome:
    """So many streams at once, each of its own prompt."""
    before = traffic.settled(server)
    peak, ended = [0.0], threading.Event()

    def watch() -> None:
        while not ended.wait(0.1):
            try:
                peak[0] = max(peak[0], server.metrics().value("vllm:num_requests_running") or 0)
            except CheckError:
                continue

    def one(number: int) -> Streamed | CheckError:
        body = {"prompt": token_prompt(48, seed + number), "max_tokens": tokens, "ignore_eos": True}
        try:
            return server.stream(body, timeout_s)
        except CheckError as error:
            return error

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        with ThreadPoolExecutor(count) as pool:
            answers = list(pool.map(one, range(count)))
    finally:
        ended.set()
        watcher.join(5)
    after = traffic.settled(server)
    preempted = traffic.moved(before, after, "vllm:num_preemptions") or 0
    own = sum(answer.completion_tokens for answer in answers if isinstance(answer, Streamed))
    return concurrency(answers, tokens, peak[0], preempted, traffic.others(before, after, own))


def offload_hit(loaded: float | None, again: Streamed, prompts: int, meanwhile: str) -> Outcome:
    """A prompt that the cards' cache no longer holds came back from host memory.

    :param meanwhile: what others had of the engine: what they load counts.
    """
    wanted = "bytes loaded from the tier in host memory"
    if loaded is None:
        return not_run(f"the engine has no counter {_LOAD}: nothing was stored or loaded yet")
    seen = f"{loaded / 1e9:.2f} GB loaded after {prompts} other prompts, first token after {again.first_s:.1f} s"
    if meanwhile:
        return not_run(f"{seen}, but {meanwhile} meanwhile", DRAIN, wanted)
    if loaded <= 0:
        return failed(seen, wanted, "look for kv_offload in the engine's log and metrics; /dev/shm of the container?")
    return passed(seen, wanted)


def ask_offload(server: Server, plan: dict[str, Any], seed: int, timeout_s: float, say: Say) -> Outcome:
    """Fill the cards' cache with other prompts, then ask the first again."""
    if not plan.get("kv_offload_bytes"):
        return not_here("the plan has no KV offload")
    tokens, window = int(plan.get("kv_tokens") or 0), int(plan["window"])
    if not tokens:
        return not_run("the plan does not say how much the KV cache holds")
    length = min(window - LAST_TOKENS, 65536)
    others = tokens // length + 2

    def ask(number: int) -> Streamed:
        body = {"prompt": token_prompt(length, seed + number), "max_tokens": 1, "ignore_eos": True}
        return server.stream(body, timeout_s)

    ask(0)
    for number in range(1, others + 1):
        ask(number)
        if number % 10 == 0:
            say(f"KV offload: {number} of {others} prompts that push the first one out")
    before = traffic.settled(server)
    again = ask(0)
    after = traffic.settled(server)
    meanwhile = traffic.others(before, after, again.completion_tokens)
    return offload_hit(traffic.moved(before, after, _LOAD), again, others, meanwhile)


def start_times(warm_s: float, history: list[dict[str, Any]], release: str) -> Outcome:
    """How long a start takes with the caches as they are, and how long the release's first one took.

    :param history: of `gpu-node history --json`, oldest first.
    """
    first = [
        line["seconds"]["start"]
        for line in history
        if line.get("to") == release and line.get("outcome") == "new" and (line.get("seconds") or {}).get("start")
    ]
    wanted = "started within its limit, and no slower than with cold caches"
    if not first:
        return passed(f"{warm_s:.0f} s with warm caches; the first start is not in gpu-node history", wanted)
    seen = f"{warm_s:.0f} s with warm caches, {first[0]:.0f} s when the release came"
    # The same caches must spare something; noise of seconds does not matter.
    if warm_s > first[0] * 1.2 + 10:
        return warned(seen, wanted, "look at the engine's log for what is compiled again; cache folder of the replica?")
    return passed(seen, wanted)


def restart(unit: str, index: int, run: Callable[[list[str], float], tuple[int, str]], limit_s: float) -> float:
    """Drain a replica, restart its unit, let it in again in any case; the seconds that the start took."""
    code, text = run(["gpu-node", "drain", str(index)], limit_s)
    if code:
        run(["gpu-node", "undrain", str(index)], 120)
        raise CheckError(f"gpu-node drain {index}: {text[-300:]}", "a drained replica", "wait for its requests to end")
    try:
        code, text = run(["systemctl", "stop", unit], limit_s)
        if code:
            raise CheckError(f"systemctl stop {unit}: {text[-300:]}", "a stopped unit", f"journalctl -u {unit}")
        began = time.monotonic()
        code, text = run(["systemctl", "start", unit], limit_s)
        took = time.monotonic() - began
        if code:
            raise CheckError(f"systemctl start {unit}: {text[-300:]}", "a started unit", f"journalctl -u {unit}")
        return took
    finally:
        run(["gpu-node", "undrain", str(index)], 120)


def read_history(text: str) -> list[dict[str, Any]]:
    """`gpu-node history --json`; nothing when it is no list."""
    try:
        lines = json.loads(text)
    except ValueError:
        return []
    return [line for line in lines if isinstance(line, dict)] if isinstance(lines, list) else []
