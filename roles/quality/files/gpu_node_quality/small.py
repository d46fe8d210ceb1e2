"""The small set that ships with this: word problems and tasks in Python, written for it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ASK_NUMBER = "Solve it step by step. End with a line that has only: Answer: <number>"
ASK_CODE = "Complete this Python function. Answer with the whole function in one block of code, and nothing else."


def problems() -> list[dict[str, Any]]:
    """The word problems: ``id``, ``prompt``, ``answer``."""
    found = json.loads((HERE / "problems.json").read_text(encoding="utf-8"))["problems"]
    return [
        {"id": f"problem-{number:02}", "prompt": f"{one['question']}\n\n{ASK_NUMBER}", "answer": one["answer"]}
        for number, one in enumerate(found, start=1)
    ]


def tasks() -> list[dict[str, Any]]:
    """The tasks: ``id``, ``prompt``, ``start`` (the function's head) and ``tests``."""
    found = json.loads((HERE / "tasks.json").read_text(encoding="utf-8"))["tasks"]
    return [
        {
            "id": f"task-{one['name']}",
            "prompt": f"{ASK_CODE}\n\n```python\n{one['prompt']}```",
            "start": one["prompt"],
            "tests": "\n".join(f"assert {test}, {test!r}" for test in one["tests"]),
        }
        for one in found
    ]


def number_of(text: str) -> int | None:
    """The number that an answer ends with: after the last `Answer:`, else the last whole number in it."""
    plain = text.replace("**", "").replace(",", "")
    marked = re.findall(r"Answer:\s*\$?\s*(-?\d+)(?:\.0+)?(?![\d.])", plain)
    if marked:
        return int(marked[-1])
    every = re.findall(r"(?<![\d.])-?\d+(?:\.\d+)?", plain)
    last = every[-1] if every else ""
    return int(last) if re.fullmatch(r"-?\d+", last) else None


def code_of(text: str, start: str) -> str:
    """The program in an answer: its first block of code that defines the function, else all of it.

    :param start: the function's head; an answer that only has its body is put below it.
    """
    name = re.search(r"def (\w+)\(", start)
    blocks = re.findall(r"```(?:python|py)?[ \t]*\n(.*?)(?:```|\Z)", text, re.DOTALL)
    wanted = f"def {name[1]}(" if name else "def "
    code = next((block for block in blocks if wanted in block), blocks[0] if blocks else text)
    return code if wanted in code else f"{start}\n{code}"
