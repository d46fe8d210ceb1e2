"""GSM8K and HumanEval through lm-evaluation-harness, with local files; code runs in the sandbox."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gpu_node_quality.small import code_of

Say = Callable[[str], None]
# The harness's own task for GSM8K without examples, with another last sentence: its filters take the last number.
GSM8K = """\
task: gpu_node_gsm8k
dataset_path: json
dataset_kwargs: {data_files: {test: DATA}}
output_type: generate_until
test_split: test
doc_to_text: "Q: {{question}}\\nSolve it step by step, and end with a line '#### ' and the number alone.\\nA:"
doc_to_target: "{{answer}}"
metric_list:
  - metric: exact_match
    aggregation: mean
    higher_is_better: true
    ignore_case: true
    ignore_punctuation: false
    regexes_to_ignore: [",", "\\\\$", "(?s).*#### ", "\\\\.$"]
generation_kwargs: GENERATION
filter_list:
  - name: flexible-extract
    filter:
      - {function: regex, group_select: -1, regex_pattern: "(-?[$0-9.,]{2,})|(-?[0-9]+)"}
      - {function: take_first}
metadata: {version: 1.0}
"""
HUMANEVAL = """\
task: gpu_node_humaneval
dataset_path: json
dataset_kwargs: {data_files: {test: DATA}}
output_type: generate_until
test_split: test
doc_to_text: "Complete this Python function. Answer with the whole function and its imports in one block of code.\\n\\n\
```python\\n{{prompt}}```"
doc_to_target: "{{canonical_solution}}"
metric_list: [{metric: bypass}]
generation_kwargs: GENERATION
metadata: {version: 1.0}
"""
TASKS = {"gsm8k": GSM8K, "humaneval": HUMANEVAL}
FIELDS = {"gsm8k": ("question", "answer"), "humaneval": ("task_id", "prompt", "test", "entry_point")}


class HarnessError(Exception):
    """The harness gave no result; the text says why."""


def read_data(path: Path, name: str, limit: int) -> list[dict[str, Any]]:
    """The first questions of a file with a line of JSON for each. Raises HarnessError when it is not of this set."""
    try:
        lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
        rows = [json.loads(line) for line in lines[:limit]]
    except (OSError, ValueError) as error:
        raise HarnessError(f"{path} cannot be read as lines of JSON: {error}") from None
    for number, row in enumerate(rows, start=1):
        if missing := [field for field in FIELDS[name] if not isinstance(row.get(field), str)]:
            raise HarnessError(f"{path}: line {number} has no {', '.join(missing)}; it is not a file of {name}")
    if len(rows) < limit:
        raise HarnessError(f"{path} has {len(rows)} questions, {limit} are asked for")
    return rows


def task_text(name: str, data: Path, max_tokens: int, thinking: bool | None) -> str:
    """The task's YAML; JSON is YAML."""
    generation: dict[str, Any] = {
        "until": ["<|im_end|>"],
        "max_gen_toks": max_tokens,
        "do_sample": False,
        "temperature": 0,
    }
    if thinking is not None:
        generation["chat_template_kwargs"] = {"thinking": thinking}
    return TASKS[name].replace("DATA", json.dumps(str(data))).replace("GENERATION", json.dumps(generation))


def command(program: str, task: str, folder: Path, url: str, model: str, at_once: int) -> list[str]:
    """The harness's command line. The key is not on it: it comes by the environment."""
    arguments = (
        f"model={model},base_url={url},num_concurrent={at_once},max_retries=3,timeout=1800,tokenizer_backend=None"
    )
    return [
        *(program, "run", "--model", "local-chat-completions", "--model_args", arguments, "--apply_chat_template"),
        *("--tasks", task, "--include_path", str(folder), "--output_path", str(folder / "out"), "--log_samples"),
    ]


def environment(folder: Path, key: str) -> dict[str, str]:
    """Nothing is fetched from anywhere, and what is cached goes with the folder."""
    kept = {name: value for name, value in os.environ.items() if name in ("PATH", "LANG", "LC_ALL")}
    offline = dict.fromkeys(("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE"), "1")
    return {**kept, **offline, "HF_HOME": str(folder / "cache"), "HOME": str(folder), "OPENAI_API_KEY": key}


def read_samples(out: Path, task: str) -> list[dict[str, Any]]:
    """The harness's record of each question, in the order of the file."""
    files = sorted(out.rglob(f"samples_{task}_*.jsonl"))
    if not files:
        raise HarnessError("the harness left no samples")
    rows = [json.loads(line) for line in files[-1].read_text(encoding="utf-8").splitlines() if line.strip()]
    return sorted(rows, key=lambda row: int(row["doc_id"]))


def answer_of(sample: dict[str, Any]) -> str:
    """The text that the model gave."""
    responses = sample.get("resps") or [[""]]
    return str(responses[0][0] or "")


def generate(
    name: str, data: Path, limit: int, asked: dict[str, Any], key: str, folder: Path, say: Say
) -> list[dict[str, Any]]:
    """Have the harness ask the engine; its samples. Raises HarnessError."""
    rows = read_data(data, name, limit)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    questions = folder / f"{name}.jsonl"
    questions.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    text = task_text(name, questions, int(asked["max_tokens"]), asked.get("thinking"))
    (folder / f"gpu_node_{name}.yaml").write_text(text, encoding="utf-8")
    argv = command(asked["program"], f"gpu_node_{name}", folder, asked["url"], asked["model"], int(asked["at_once"]))
    say(f"{name}: {len(rows)} questions through lm-evaluation-harness")
    log = folder / "harness.log"
    with log.open("wb") as out:
        try:
            done = subprocess.run(
                argv, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT, env=environment(folder, key),
                cwd=folder, timeout=float(asked["timeout"]), check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            raise HarnessError(f"the harness did not end within {asked['timeout']} s (log: {log})") from None
        except FileNotFoundError:
            raise HarnessError(f"{argv[0]} is not there") from None
    if done.returncode:
        last = [line for line in log.read_text(errors="replace").splitlines() if line.strip()][-1:]
        raise HarnessError(f"the harness ended with {done.returncode}: {''.join(last)[:300]} (log: {log})")
    samples = read_samples(folder / "out", f"gpu_node_{name}")
    if len(samples) != len(rows):
        raise HarnessError(f"the harness has {len(samples)} answers to {len(rows)} questions (log: {log})")
    return samples


def right_numbers(samples: list[dict[str, Any]]) -> list[bool]:
    """What the harness's own metric says of GSM8K."""
    return [float(sample["exact_match"]) == 1.0 for sample in samples]


def programs(samples: list[dict[str, Any]]) -> list[tuple[str, str, str]]:
    """Id, code and tests of each HumanEval question."""
    found = []
    for sample in samples:
        doc = sample["doc"]
        code = code_of(answer_of(sample), doc["prompt"])
        # What stands before the function (imports, helpers) belongs to the question.
        head = doc["prompt"].split(f"def {doc['entry_point']}(", 1)[0]
        found.append((doc["task_id"], f"{head}\n{code}", f"{doc['test']}\ncheck({doc['entry_point']})"))
    return found
