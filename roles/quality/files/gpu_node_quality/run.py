"""Asks, judges, keeps texts, compares."""

from __future__ import annotations

import hashlib
import json
import os
import re
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from gpu_node_accept.checks import Book, CheckError, Outcome, Title, counts, failed, not_run, passed, result
from gpu_node_accept.server import Answer, Server, read_key

from gpu_node_quality import gates, harness, sandbox, small

ENGINE_ENV = Path("/etc/gpu-node/secrets/engine.env")
ROOT = Path("/var/lib/gpu-node/quality")
RELEASES = Path("/var/lib/gpu-node/replicas")
LABEL = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
CHECKS = ("problems", "tasks", "agreement", "gsm8k", "humaneval")
TIMEOUT_S = 900.0
# Of the kept texts. 1 did not tell whether the model thought, and named its prompts without their text.
SCHEMA = 2
# Beside the small set's questions: long text, where a small difference grows.
WRITE = (
    "Write a short story of three paragraphs about a lighthouse keeper who finds a letter.",
    "Explain to a beginner how a hash table works, and what happens when two keys collide.",
    "Write a Python class for a B-tree with insert and search. Comment each method.",
    "Prove that the square root of 2 is irrational.",
    "Describe step by step how to change the tyre of a car.",
    "Write a bash script that keeps the last seven daily backups of a folder.",
    "Summarise the advantages and disadvantages of nuclear power in two paragraphs.",
    "Translate into French: The ferry leaves at noon, unless the wind is too strong.",
    "Write a SQL query for the three customers with the highest turnover of the last year, and explain it.",
    "Write a letter to a landlord that asks for the repair of a heater.",
)

# By question; an answer that did not come is the error.
Answers = dict[str, Answer | CheckError]


class Quality:
    """One run on this node, against one replica."""

    def __init__(self, request: dict[str, Any], say: Callable[[str], None]) -> None:
        self._say = say
        self.book = Book(say)
        self.target = f"replica {request['replica']}"
        self.release = self._read_release(request["replica"])
        # After a rollback what runs may listen elsewhere, and have another name, than the plan of today says.
        runs = {"port": self.release.get("port"), "model": self.release.get("served_model_name")}
        self.request = {**request, **{name: value for name, value in runs.items() if value}}
        self.label = str(request.get("label") or self.release.get("id") or "")
        self.kept: dict[str, Any] = {}

    @staticmethod
    def _read_release(replica: int) -> dict[str, Any]:
        try:
            path = RELEASES / str(replica) / "current" / "release.json"
            found = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}

    def _image(self) -> str:
        image = str((self.release.get("image") or {}).get("ref") or "")
        if not image:
            raise CheckError("the replica has no release, so there is no image to run code in", remedy="run site.yml")
        return image

    def _server(self) -> Server:
        return Server(int(self.request["port"]), read_key(ENGINE_ENV), str(self.request["model"]))

    def run(self) -> None:
        """All checks that were asked for."""
        do = {
            "problems": ("word problems", self._problems),
            "tasks": ("tasks in Python", self._tasks),
            "agreement": ("agreement", self._agreement),
            "gsm8k": ("GSM8K", lambda: self._harness("gsm8k")),
            "humaneval": ("HumanEval", lambda: self._harness("humaneval")),
        }
        for name in self.request["checks"]:
            what, find = do[name]
            self.book.run(Title(name, "Quality", what), self.target, find)

    # --- right answers

    def _ask(self, server: Server, prompt: str, max_tokens: int) -> Answer:
        body: dict[str, Any] = {"messages": [{"role": "user", "content": prompt}], "max_tokens": max_tokens}
        if self.request.get("thinking") is not None:
            body["chat_template_kwargs"] = {"thinking": self.request["thinking"]}
        return server.chat(body, TIMEOUT_S)

    def _answers(self, items: Sequence[dict[str, Any]], max_tokens: int, at_once: int) -> Answers:
        server = self._server()

        def one(item: dict[str, Any]) -> Answer | CheckError:
            try:
                return self._ask(server, item["prompt"], max_tokens)
            except CheckError as error:
                return error

        with ThreadPoolExecutor(at_once) as pool:
            found = list(pool.map(one, items))
        if all(isinstance(answer, CheckError) for answer in found):
            raise CheckError(f"no question was answered: {found[0]}")
        return {item["id"]: answer for item, answer in zip(items, found, strict=True)}

    def _contents(self, items: Sequence[dict[str, Any]]) -> dict[str, str | CheckError]:
        """What the model answered, without its thoughts."""
        answers = self._answers(items, int(self.request["max_tokens"]), int(self.request["at_once"]))
        return {name: one if isinstance(one, CheckError) else one.content for name, one in answers.items()}

    def _judge(self, name: str, right: Sequence[bool], broken: int) -> Outcome:
        minimum = self.request["minimum"].get(name)
        return gates.judge(name, self.request["profile"], sum(right), len(right), broken, minimum)

    def _problems(self) -> Outcome:
        items = small.problems()[: self.request.get("limit") or None]
        texts = self._contents(items)
        self.kept["problems"] = {name: str(text) for name, text in texts.items()}
        right = [isinstance(t := texts[one["id"]], str) and small.number_of(t) == one["answer"] for one in items]
        return self._judge("problems", right, sum(isinstance(text, CheckError) for text in texts.values()))

    def _sandbox(self, items: Sequence[tuple[str, str, str]]) -> list[bool]:
        image = self._image()
        try:
            sandbox.prove(image)
            ran = {}
            for number, (name, code, tests) in enumerate(items, start=1):
                ran[name] = sandbox.run(image, code, tests)
                if number % 20 == 0:
                    self._say(f"{number} of {len(items)} programs run")
        except sandbox.SandboxError as error:
            raise CheckError(str(error), "a container that holds the code", "run podman on the node by hand") from None
        self.kept["programs"] = {name: "" if one.ok else one.why for name, one in ran.items()}
        return [one.ok for one in ran.values()]

    def _tasks(self) -> Outcome:
        items = small.tasks()[: self.request.get("limit") or None]
        texts = self._contents(items)
        answered = [one for one in items if isinstance(texts[one["id"]], str)]
        programs = [(one["id"], small.code_of(str(texts[one["id"]]), one["start"]), one["tests"]) for one in answered]
        right = self._sandbox(programs)
        broken = len(items) - len(answered)
        return self._judge("tasks", [*right, *[False] * broken], broken)

    def _harness(self, name: str) -> Outcome:
        data = self.request["data"].get(name)
        if not data:
            return not_run(f"quality_data.{name} names no file of questions", "docs/quality.md says what it holds")
        asked = {
            "program": self.request["harness"],
            "url": f"http://127.0.0.1:{self.request['port']}/v1/chat/completions",
            "model": self.request["model"],
            "thinking": self.request.get("thinking"),
            "max_tokens": self.request["max_tokens"],
            "at_once": self.request["at_once"],
            "timeout": self.request["timeout"],
        }
        limit = int(self.request["count"][name])
        try:
            key = read_key(ENGINE_ENV)
            samples = harness.generate(name, Path(data), limit, asked, key, ROOT / "harness", self._say)
        except harness.HarnessError as error:
            raise CheckError(str(error), "an answer to each question", "look at that log") from None
        broken = sum(not harness.answer_of(sample) for sample in samples)
        right = harness.right_numbers(samples) if name == "gsm8k" else self._sandbox(harness.programs(samples))
        return self._judge(name, right, broken)

    # --- the same answers

    def _agreement(self) -> Outcome:
        """Keep the texts of this release, and compare them with another's when it was named.

        Named by its own label it is compared with what was kept of it, and that stays: a release that moves a little
        each week is to be seen.
        """
        if not LABEL.fullmatch(self.label):
            wanted = "letters, digits, dots and dashes, at most 64"
            return failed(f"label {self.label!r}", wanted, "set quality_label, or serve a release first")
        items = [*small.problems(), *small.tasks()]
        items += [{"id": f"write-{number:02}", "prompt": text} for number, text in enumerate(WRITE, start=1)]
        items = items[: self.request.get("limit") or None]
        tokens = int(self.request["agreement_tokens"])
        asked = {
            "schema": SCHEMA,
            "label": self.label,
            "release": self.release.get("id"),
            "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "model": self.request["model"],
            "thinking": self.request.get("thinking"),
            "max_tokens": tokens,
            "prompts": digest(items),
        }
        with_label = str(self.request.get("compare_with") or "")
        other = read_texts(with_label) if with_label else None
        if other:
            gates.same_questions(other, asked)
        passes: list[dict[str, str]] = []
        for number in (1, 2):
            # One after the other: a batch's make-up is a difference of its own.
            self._say(f"{len(items)} greedy answers of {tokens} tokens, pass {number} of 2")
            answers = self._answers(items, tokens, 1)
            if missing := [name for name, one in answers.items() if isinstance(one, CheckError)]:
                first = answers[missing[0]]
                raise CheckError(f"{len(missing)} answers did not come, the first is {missing[0]}: {first}")
            texts = {name: one.text for name, one in answers.items() if isinstance(one, Answer)}
            if empty := [name for name, text in texts.items() if not text]:
                return not_run(
                    f"{len(empty)} of {len(texts)} answers have no text, the first is {empty[0]}",
                    "ask the engine by hand: neither content nor reasoning has what it generated",
                )
            passes.append(texts)
        record = {**asked, "texts": passes[0]}
        own = gates.agreement(record, {**record, "texts": passes[1]})["share"]
        record["own_agreement"] = own
        if with_label != self.label:
            write(texts_file(self.label), record)
        if other is None:
            seen = f"kept as {self.label}; the same answers twice: {own:.1%}"
            return passed(seen, "the texts of this release are kept; quality_compare_with compares")
        self._say(f"compared with {with_label}, kept at {other['at']}")
        found = gates.agreement(other, record)
        self.kept["agreement"] = {"with": with_label, "at": other["at"], **found}
        return gates.judge_agreement(found, float(self.request["agreement_minimum"]), own)


def digest(items: Sequence[dict[str, Any]]) -> str:
    """What questions these are, in a form that a person can compare."""
    text = json.dumps([[item["id"], item["prompt"]] for item in items])
    return f"{len(items)}, sha256 {hashlib.sha256(text.encode()).hexdigest()[:16]}"


def texts_file(label: str) -> Path:
    """Where the texts of a label are. Raises CheckError."""
    if not LABEL.fullmatch(label):
        raise CheckError(f"{label!r} is no label", "letters, digits, dots and dashes, at most 64", "name it otherwise")
    return ROOT / "texts" / f"{label}.json"


def read_texts(label: str) -> dict[str, Any]:
    """The kept texts of a label. Raises CheckError."""
    path = texts_file(label)
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(found, dict) or found.get("schema") != SCHEMA:
            raise ValueError("they are of another version of this program")
    except (OSError, ValueError) as error:
        there = ", ".join(sorted(item.stem for item in path.parent.glob("*.json"))) or "none"
        raise CheckError(f"no texts of {label}: {error}", f"one of: {there}", "run quality.yml on it first") from None
    return found


def write(path: Path, value: Any) -> None:
    """Write JSON whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_suffix(".new")
    fresh.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    os.replace(fresh, path)


def report_of(quality: Quality, began: float, ended: float) -> dict[str, Any]:
    """The report, in the form of the acceptance's."""
    request, checks = quality.request, quality.book.checks
    return {
        "schema": 1,
        "kind": "quality",
        "node": request["node"],
        "level": "quality",
        "profile": request["profile"],
        "device": request["device"],
        "model": request["model"],
        "began": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(began)),
        "seconds": round(ended - began, 1),
        "result": result(checks),
        "counts": counts(checks),
        "releases": {str(request["replica"]): quality.release.get("id")},
        "versions": {"Label": quality.label},
        "checks": [check.as_row() for check in checks],
        "kept": quality.kept,
    }


def compare(first: str, second: str, minimum: float) -> int:
    """Compare kept texts; 0 they agree enough, 1 they do not, 2 nothing to compare."""
    try:
        one, other = read_texts(first), read_texts(second)
        found = gates.agreement(one, other)
    except CheckError as error:
        print(f"{error}; wanted: {error.wanted}", file=sys.stderr)
        return 2
    outcome = gates.judge_agreement(found, minimum, other.get("own_agreement"))
    print(f"{outcome.verdict}: {outcome.seen or outcome.why} (wanted: {outcome.wanted})")
    for row in found["differ"][:10]:
        print(
            f"  {row['id']}, character {row['place']}:\n    {first}: {row['first']!r}\n    {second}: {row['second']!r}"
        )
    return 0 if outcome.verdict == "pass" else 1


def main(arguments: Sequence[str]) -> int:
    """`run REQUEST REPORT`, or `compare FIRST SECOND [MINIMUM]`."""
    if len(arguments) >= 3 and arguments[0] == "compare":
        return compare(arguments[1], arguments[2], float(arguments[3]) if len(arguments) > 3 else 0.9)
    if len(arguments) != 3 or arguments[0] != "run":
        print("usage: python3 -m gpu_node_quality run REQUEST REPORT | compare FIRST SECOND [MINIMUM]", file=sys.stderr)
        return 2
    source, target = map(Path, arguments[1:])
    request = json.loads(source.read_text(encoding="utf-8"))
    if unknown := [name for name in request["checks"] if name not in CHECKS]:
        print(f"{', '.join(unknown)}: no such check; there are {', '.join(CHECKS)}", file=sys.stderr)
        return 2
    began = time.time()
    # An old report must not be taken for this run's.
    target.unlink(missing_ok=True)
    quality = Quality(request, lambda text: print(text, flush=True))
    quality.run()
    write(target, report_of(quality, began, time.time()))
    return 0
