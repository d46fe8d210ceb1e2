"""Gates, the small set, the harness's command line and records, the container for code, and kept answers."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from gpu_node_accept.checks import CheckError
from gpu_node_quality import gates, harness, run, sandbox, small

from tests.unit.quality.solutions import SOLUTIONS

# --- gates


def test_the_tolerance_is_the_binomial_spread() -> None:
    # Of somebody who is right 99 times of 100, 200 questions: 195 right or fewer come in 5.2% of runs, 193 in 0.4%.
    assert gates.tail(200, 200, 0.99) == pytest.approx(1)
    assert gates.tail(195, 200, 0.99) == pytest.approx(0.0517, abs=1e-3)
    assert gates.least(200, 0.99, 0.01) == 194
    assert gates.tail(193, 200, 0.99) < 0.01 <= gates.tail(194, 200, 0.99)


@pytest.mark.parametrize(
    ("name", "profile", "right", "count", "verdict"),
    [
        ("gsm8k", "8x", 198, 200, "pass"),
        ("gsm8k", "8x", 194, 200, "pass"),
        ("gsm8k", "8x", 193, 200, "fail"),
        ("humaneval", "8x", 159, 164, "pass"),
        ("humaneval", "8x", 152, 164, "fail"),
        ("problems", "8x", 40, 40, "pass"),
        ("problems", "8x", 30, 40, "fail"),
        ("gsm8k", "2x", 200, 200, "not run"),
        ("problems", "cpu", 0, 40, "not run"),
        ("problems", "8x", 0, 0, "not run"),
    ],
)
def test_the_gates(name: str, profile: str, right: int, count: int, verdict: str) -> None:
    assert gates.judge(name, profile, right, count, 0, None).verdict == verdict


def test_an_operators_own_share_has_no_tolerance() -> None:
    assert gates.judge("problems", "cpu", 39, 40, 0, 0.99).verdict == "fail"
    assert gates.judge("problems", "cpu", 40, 40, 0, 0.99).verdict == "pass"


def test_answers_that_did_not_come_are_told() -> None:
    found = gates.judge("gsm8k", "8x", 199, 200, 1, None)
    assert found.verdict == "warn" and "1 did not come" in found.seen


def test_every_gate_has_its_source() -> None:
    for profiles in gates.DATA["gates"].values():
        assert all(len(gate["source"]) > 20 for gate in profiles.values())


# --- agreement


def record(texts: dict[str, str], **more: Any) -> dict[str, Any]:
    asked = {"prompts": f"{len(texts)}, sha256 00", "max_tokens": 256, "model": "m", "thinking": False}
    return {"label": "one", **asked, "texts": texts, **more}


ONE = record({"a": "same text", "b": "the quick brown fox", "c": "", "d": "x"})


def test_agreement_is_letter_by_letter() -> None:
    other = record({**ONE["texts"], "b": "the quick red fox", "d": "xy"})
    found = gates.agreement(ONE, other)
    assert (found["count"], found["same"], found["share"]) == (4, 2, 0.5)
    assert [(row["id"], row["place"]) for row in found["differ"]] == [("d", 1), ("b", 10)]
    assert found["shared"] == pytest.approx((1 + 10 / 19 + 1 + 0.5) / 4)
    assert gates.agreement(ONE, ONE)["share"] == 1


@pytest.mark.parametrize(
    ("share", "own", "verdict"),
    [(1.0, 1.0, "pass"), (0.9, 1.0, "pass"), (0.89, 1.0, "fail"), (0.89, None, "fail"), (0.5, 0.5, "not run")],
)
def test_the_verdict_of_agreement(share: float, own: float | None, verdict: str) -> None:
    differ = [] if share == 1 else [{"id": "a", "place": 3, "first": "", "second": ""}]
    found = {"count": 100, "same": round(share * 100), "share": share, "shared": 0.9, "differ": differ}
    assert gates.judge_agreement(found, 0.9, own).verdict == verdict


@pytest.mark.parametrize("key", ["prompts", "max_tokens", "model", "thinking"])
def test_records_of_different_questions_are_not_compared(key: str) -> None:
    with pytest.raises(CheckError, match=f"one and two have another {key}: .* and other"):
        gates.agreement(ONE, {**ONE, "label": "two", key: "other"})


def test_the_questions_are_told_by_their_text() -> None:
    items = small.problems()
    assert run.digest(items) == run.digest(small.problems())
    assert run.digest(items).startswith("40, sha256 ")
    assert run.digest(items[:39]) != run.digest(items)
    assert run.digest([{**items[0], "prompt": "another text"}, *items[1:]]) != run.digest(items)


# --- the small set


def test_the_problems_have_the_answers_that_their_sums_give() -> None:
    found = json.loads((small.HERE / "problems.json").read_text())["problems"]
    assert len(found) == 40
    assert len({one["question"] for one in found}) == 40
    for one in found:
        assert eval(one["check"], {"__builtins__": {}}) == one["answer"], one["question"]
        assert isinstance(one["answer"], int)


@pytest.mark.parametrize("task", small.tasks(), ids=lambda task: str(task["id"]))
def test_the_tasks_can_be_solved_and_their_tests_see_a_wrong_solution(task: dict[str, Any]) -> None:
    name = task["id"].removeprefix("task-")

    def ends(code: str) -> int:
        text = sandbox.program(code, task["tests"], "mark")
        return subprocess.run([sys.executable, "-I", "-"], input=text, text=True, capture_output=True).returncode

    assert len(small.tasks()) == 20 == len(SOLUTIONS)
    assert ends(small.code_of(f"```python\n{SOLUTIONS[name]}```", task["start"])) == 0
    assert ends(f"{task['start']}    return None\n") != 0


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("6 * 7 = 42\nAnswer: 42", 42),
        ("Answer: 41, no.\n**Answer: 1,042**", 1042),
        ("Answer: $17.00", 17),
        ("so it is -5 in the end", -5),
        ("The result is 42 coins.", 42),
        ("It is 3.5", None),
        ("I do not know", None),
        ("", None),
    ],
)
def test_the_number_of_an_answer(text: str, number: int | None) -> None:
    assert small.number_of(text) == number


@pytest.mark.parametrize(
    "text",
    [
        "def f(x):\n    return x",
        "Here it is:\n```python\ndef f(x):\n    return x\n```\nand a test:\n```python\nprint(f(1))\n```",
        "```\nprint(1)\n```\n```py\ndef f(x):\n    return x\n```",
        "```python\ndef f(x):\n    return x\n",
        "    return x",
    ],
)
def test_the_code_of_an_answer(text: str) -> None:
    space: dict[str, Any] = {}
    exec(small.code_of(text, "def f(x):\n"), space)
    assert space["f"](3) == 3


# --- the container


def test_the_container_has_no_network_no_rights_and_no_files() -> None:
    command = sandbox.command("localhost/image:key")
    for option in (
        *("--network=none", "--read-only", "--read-only-tmpfs=false", "--cap-drop=all", "--user=65534:65534"),
        *("--security-opt=no-new-privileges", "--pull=never", "--memory=512m", "--pids-limit=64", "--timeout=20"),
    ):
        assert option in command
    assert not any(word.startswith(("--volume", "-v", "--mount", "--env", "--device")) for word in command)


class Podman:
    """Stands for podman: runs the program right here, or answers as told."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, rc: int | None = None, err: str = "", out: str = "") -> None:
        real = subprocess.run

        def ran(argv: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
            if rc is not None:
                return subprocess.CompletedProcess(argv, rc, out, err)
            return real([sys.executable, "-I", "-"], **options)

        monkeypatch.setattr(subprocess, "run", ran)


def test_a_program_passes_when_its_tests_were_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    Podman(monkeypatch)
    assert sandbox.run("i", "def f():\n    return 1", "assert f() == 1") == sandbox.Ran(True)
    wrong = sandbox.run("i", "def f():\n    return 2", "assert f() == 1, 'f() is 1'")
    assert (wrong.ok, wrong.why) == (False, "AssertionError: f() is 1")
    early = sandbox.run("i", "import sys\nsys.exit(0)", "assert False")
    assert (early.ok, "not reached" in early.why) == (False, True)


def test_a_container_that_does_not_start_says_nothing_of_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    Podman(monkeypatch, 125, "Error: no such image")
    with pytest.raises(sandbox.SandboxError, match="no such image"):
        sandbox.run("i", "x = 1", "")


def test_a_sandbox_that_lets_something_out_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    # Right here, a program can reach the network or write: that is what the proof must see.
    Podman(monkeypatch)
    with pytest.raises(sandbox.SandboxError, match=r"reaches a network|can write"):
        sandbox.prove("i")


# --- the harness

ROWS = {"question": "What is 40 + 3?", "answer": "#### 43"}
CODE = {
    "task_id": "X/0",
    "prompt": "from math import sqrt\n\ndef add(a, b):\n",
    "canonical_solution": "    return a + b\n",
    "test": "def check(candidate):\n    assert candidate(1, 2) == 3\n    assert sqrt(4) == 2\n",
    "entry_point": "add",
}
# Leaves what the harness leaves (lm-eval 0.4.13 was seen to).
HARNESS = """\
#!{python}
import json, os, sys
from pathlib import Path
args = sys.argv[1:]
task, out = args[args.index("--tasks") + 1], Path(args[args.index("--output_path") + 1]) / "tiny"
assert os.environ["OPENAI_API_KEY"] == "secret" and os.environ["HF_HUB_OFFLINE"] == "1"
assert "secret" not in " ".join(args)
text = Path(task + ".yaml").read_text()
assert "DATA" not in text and "GENERATION" not in text
rows = [json.loads(line) for line in Path(task.removeprefix("gpu_node_") + ".jsonl").read_text().splitlines()]
if os.environ.get("LANG") == "fails":
    sys.exit("RuntimeError: HTTP 500")
out.mkdir(parents=True)
with (out / f"samples_{{task}}_2026-12-01.jsonl").open("w") as file:
    for number in reversed(range(len(rows) - (os.environ.get("LANG") == "short"))):
        answer = "```python\\ndef add(a, b):\\n    return a + b\\n```"
        row = {{"doc_id": number, "doc": rows[number], "resps": [[answer]], "exact_match": float(number == 0)}}
        file.write(json.dumps(row) + "\\n")
"""


@pytest.fixture
def asked(tmp_path: Path) -> dict[str, Any]:
    program = tmp_path / "lm-eval"
    program.write_text(HARNESS.format(python=sys.executable))
    program.chmod(0o755)
    (tmp_path / "g.jsonl").write_text((json.dumps(ROWS) + "\n") * 3)
    (tmp_path / "h.jsonl").write_text(json.dumps(CODE) + "\n")
    url = "http://127.0.0.1:1/v1/chat/completions"
    return {"program": str(program), "url": url, "model": "m", "max_tokens": 64, "at_once": 2, "timeout": 60}


def test_the_harness_is_asked_with_local_files(asked: dict[str, Any], tmp_path: Path) -> None:
    work = tmp_path / "work"
    samples = harness.generate("gsm8k", tmp_path / "g.jsonl", 2, asked, "secret", work, lambda _: None)
    assert harness.right_numbers(samples) == [True, False]
    samples = harness.generate("humaneval", tmp_path / "h.jsonl", 1, asked, "secret", work, lambda _: None)
    ((name, code, tests),) = harness.programs(samples)
    assert name == "X/0"
    exec(f"{code}\n{tests}", {})


def test_the_tasks_are_yaml_with_the_switch_for_thinking(tmp_path: Path) -> None:
    import yaml

    for name in harness.TASKS:
        task = yaml.safe_load(harness.task_text(name, tmp_path / "a 'b'.jsonl", 99, False))
        assert task["task"] == f"gpu_node_{name}"
        assert task["dataset_kwargs"]["data_files"]["test"] == str(tmp_path / "a 'b'.jsonl")
        assert task["generation_kwargs"]["chat_template_kwargs"] == {"thinking": False}
        assert (task["generation_kwargs"]["temperature"], task["generation_kwargs"]["max_gen_toks"]) == (0, 99)
        assert "chat_template_kwargs" not in harness.task_text(name, tmp_path, 99, None)


@pytest.mark.parametrize(("lang", "match"), [("fails", "HTTP 500"), ("short", "1 answers to 2 questions")])
def test_a_harness_that_breaks_gives_no_figure(
    asked: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lang: str, match: str
) -> None:
    monkeypatch.setenv("LANG", lang)
    with pytest.raises(harness.HarnessError, match=match):
        harness.generate("gsm8k", tmp_path / "g.jsonl", 2, asked, "secret", tmp_path / "work", lambda _: None)


@pytest.mark.parametrize(
    ("name", "text", "match"),
    [
        ("gsm8k", "{half", "cannot be read"),
        ("gsm8k", json.dumps(CODE), "not a file of gsm8k"),
        ("humaneval", json.dumps(ROWS), "not a file of humaneval"),
        ("gsm8k", json.dumps(ROWS), "has 1 questions, 200 are asked for"),
    ],
)
def test_a_wrong_file_is_refused_before_anything_is_asked(tmp_path: Path, name: str, text: str, match: str) -> None:
    (tmp_path / "f.jsonl").write_text(text)
    with pytest.raises(harness.HarnessError, match=match):
        harness.read_data(tmp_path / "f.jsonl", name, 200)
    with pytest.raises(harness.HarnessError, match="cannot be read"):
        harness.read_data(tmp_path / "none", name, 1)


# --- a run against a server


class Handler(BaseHTTPRequestHandler):
    """A model that knows all answers; with `moods` it never says the same twice, with a field it only thinks."""

    moods = 0
    thinks_in = ""
    asked = 0

    def log_message(self, *_: Any) -> None:
        pass

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        prompt = body["messages"][0]["content"]
        type(self).asked += 1
        answers = {one["prompt"]: f"Answer: {one['answer']}" for one in small.problems()}
        answers |= {one["prompt"]: SOLUTIONS[one["id"].removeprefix("task-")] for one in small.tasks()}
        text = answers.get(prompt, "A story.")
        if type(self).moods:
            type(self).moods += 1
            text += f" ({type(self).moods})"
        # Thoughts that use up the tokens leave no content.
        message = {"content": None, self.thinks_in: text} if self.thinks_in else {"content": text}
        answer = {"choices": [{"message": message, "finish_reason": "length"}]}
        data = json.dumps({**answer, "usage": {"completion_tokens": 9}}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


@pytest.fixture
def request_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    monkeypatch.setattr(run, "ROOT", tmp_path / "quality")
    monkeypatch.setattr(run, "RELEASES", tmp_path / "replicas")
    monkeypatch.setattr(run, "ENGINE_ENV", tmp_path / "engine.env")
    monkeypatch.setattr(sandbox, "prove", lambda image: None)
    Podman(monkeypatch)
    (tmp_path / "engine.env").write_text("VLLM_API_KEY=k\n")
    release = tmp_path / "replicas/0/current/release.json"
    release.parent.mkdir(parents=True)
    release.write_text(json.dumps({"id": "aaaaaaaaaaaa", "image": {"ref": "localhost/i"}}))
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield {
        "node": "n", "profile": "8x", "device": "cuda", "model": "m", "replica": 0, "port": server.server_address[1],
        "checks": ["problems", "tasks", "agreement"], "data": {}, "count": {"gsm8k": 200}, "minimum": {}, "label": "",
        "compare_with": "", "agreement_minimum": 0.9, "agreement_tokens": 64, "max_tokens": 64, "at_once": 4,
        "thinking": False, "limit": 0, "timeout": 60, "harness": "lm-eval",
    }  # fmt: skip
    server.shutdown()
    Handler.moods = Handler.asked = 0
    Handler.thinks_in = ""


def verdicts(request: dict[str, Any], tmp_path: Path) -> dict[str, tuple[str, str]]:
    (tmp_path / "request.json").write_text(json.dumps(request))
    assert run.main(["run", str(tmp_path / "request.json"), str(tmp_path / "report.json")]) == 0
    report = json.loads((tmp_path / "report.json").read_text())
    return {check["id"]: (check["verdict"], check["seen"] or check["why"]) for check in report["checks"]}


def test_a_model_that_knows_passes_and_its_texts_are_kept(request_of: dict[str, Any], tmp_path: Path) -> None:
    found = verdicts(request_of, tmp_path)
    assert {name: verdict for name, (verdict, _) in found.items()} == dict.fromkeys(request_of["checks"], "pass")
    assert found["problems"][1] == "40 of 40 right, 100.0%"
    kept = run.read_texts("aaaaaaaaaaaa")
    assert (len(kept["texts"]), kept["own_agreement"]) == (70, 1.0)


def test_two_releases_are_compared(
    request_of: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asks = {**request_of, "checks": ["agreement"]}
    verdicts({**asks, "label": "off"}, tmp_path)
    assert verdicts({**asks, "label": "on", "compare_with": "off"}, tmp_path)["agreement"][0] == "pass"
    assert run.main(["compare", "off", "on"]) == 0
    moved = run.read_texts("on")
    moved["texts"] = {name: text + "!" for name, text in moved["texts"].items()}
    run.write(run.texts_file("on"), moved)
    assert run.main(["compare", "off", "on"]) == 1
    assert "0 of 70 answers the same, 0.0%; with itself 100.0%" in capsys.readouterr().out
    assert run.main(["compare", "off", "nothing"]) == 2
    assert "one of: off, on" in capsys.readouterr().err


def test_an_engine_that_disagrees_with_itself_leaves_the_question_open(
    request_of: dict[str, Any], tmp_path: Path
) -> None:
    asks = {**request_of, "checks": ["agreement"]}
    verdicts({**asks, "label": "off"}, tmp_path)
    Handler.moods = 1
    verdict, why = verdicts({**asks, "label": "on", "compare_with": "off"}, tmp_path)["agreement"]
    assert verdict == "not run" and "does not agree with itself" in why


@pytest.mark.parametrize("field", ["reasoning", "reasoning_content"])
def test_thoughts_are_compared_too(request_of: dict[str, Any], tmp_path: Path, field: str) -> None:
    asks = {**request_of, "checks": ["agreement"], "thinking": True}
    Handler.thinks_in = field
    verdicts({**asks, "label": "off"}, tmp_path)
    assert run.read_texts("off")["texts"]["problem-01"].startswith("Answer: ")
    Handler.moods = 1
    verdict, why = verdicts({**asks, "label": "on", "compare_with": "off"}, tmp_path)["agreement"]
    assert (verdict, "0 of 70 answers the same" in why) == ("not run", True), why


def test_answers_without_text_are_no_agreement(request_of: dict[str, Any], tmp_path: Path) -> None:
    asks = {**request_of, "checks": ["agreement"]}
    Handler.thinks_in = "a_field_of_a_later_version"
    verdict, why = verdicts({**asks, "label": "off"}, tmp_path)["agreement"]
    assert (verdict, why) == ("not run", "70 of 70 answers have no text, the first is problem-01")
    assert not run.texts_file("off").exists()


def test_a_release_is_compared_with_what_was_kept_of_it(request_of: dict[str, Any], tmp_path: Path) -> None:
    """Does it still answer as last week? What is compared with stays, so that many small steps are seen as well."""
    asks = {**request_of, "checks": ["agreement"]}
    verdicts(asks, tmp_path)
    kept = run.read_texts("aaaaaaaaaaaa")
    kept["texts"] = {name: text + "!" for name, text in kept["texts"].items()}
    run.write(run.texts_file("aaaaaaaaaaaa"), kept)
    again = {**asks, "compare_with": "aaaaaaaaaaaa"}
    for _ in range(2):
        verdict, seen = verdicts(again, tmp_path)["agreement"]
        assert (verdict, "0 of 70 answers the same" in seen) == ("fail", True), seen
        assert run.read_texts("aaaaaaaaaaaa") == kept
    # Without a name to compare with, the texts of now take their place.
    assert verdicts(asks, tmp_path)["agreement"][0] == "pass"
    assert verdicts(again, tmp_path)["agreement"][0] == "pass"


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"compare_with": "nothing"}, "no texts of nothing"),
        ({"compare_with": "off", "agreement_tokens": 32}, "off and on have another max_tokens: 64 and 32"),
        ({"compare_with": "off", "thinking": True}, "off and on have another thinking: False and True"),
        ({"compare_with": "off", "limit": 6}, "off and on have another prompts: 70, sha256"),
        ({"compare_with": "old"}, "no texts of old: they are of another version"),
    ],
)
def test_what_cannot_be_compared_is_told_before_anything_is_asked(
    request_of: dict[str, Any], tmp_path: Path, more: dict[str, Any], said: str
) -> None:
    asks = {**request_of, "checks": ["agreement"]}
    verdicts({**asks, "label": "off"}, tmp_path)
    run.write(run.texts_file("old"), {"schema": 1, "prompts": ["problem-01"], "max_tokens": 64, "model": "m"})
    Handler.asked = 0
    verdict, seen = verdicts({**asks, "label": "on", **more}, tmp_path)["agreement"]
    assert (verdict, said in seen, Handler.asked) == ("fail", True, 0), seen
    assert not run.texts_file("on").exists()


def test_what_cannot_be_asked_is_told(request_of: dict[str, Any], tmp_path: Path) -> None:
    found = verdicts({**request_of, "checks": ["gsm8k", "agreement"], "label": "../x"}, tmp_path)
    assert found["gsm8k"] == ("not run", "quality_data.gsm8k names no file of questions")
    assert found["agreement"][0] == "fail"
    dead = verdicts({**request_of, "checks": ["problems"], "port": 1}, tmp_path)
    assert dead["problems"][0] == "fail" and "no question was answered" in dead["problems"][1]
    # After a rollback what runs may listen elsewhere than the plan of today says.
    runs = {"id": "aaaaaaaaaaaa", "image": {"ref": "localhost/i"}, "port": request_of["port"], "served_model_name": "m"}
    (run.RELEASES / "0/current/release.json").write_text(json.dumps(runs))
    asked = {**request_of, "checks": ["problems"], "port": 1, "model": "other"}
    assert verdicts(asked, tmp_path)["problems"][0] == "pass"
    (tmp_path / "request.json").write_text(json.dumps({"checks": ["mmlu"]}))
    assert run.main(["run", str(tmp_path / "request.json"), str(tmp_path / "report.json")]) == 2
