"""The kernels' own check, in the serving image, on one free GPU of each model; what it found is kept."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from gpu_node_image.errors import ImageError
from gpu_node_image.podman import say

from gpu_node_kernels import container

CONTAINER = "gpu-node-qualify"


def run(file: Path) -> None:
    """Check the kernels on every GPU of the request, and keep the reports."""
    request: dict[str, Any] = json.loads(file.read_text("utf-8"))
    folder = Path(request["folder"])
    folder.mkdir(parents=True, exist_ok=True)
    for one in request["runs"]:
        record = {name: one[name] for name in ("gpu", "driver")}
        record |= {name: request[name] for name in ("image", "kernels")}
        record["report"] = check(one["uuid"], request["ref"], folder / ".work")
        keep(folder / f"{one['key']}.json", record)
        say(f"{one['gpu']}: {summary(record['report'])}")


def check(uuid: str, image: str, work: Path) -> dict[str, Any]:
    """Return the report of one GPU; one without kernels says why nothing was found out."""
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir()
    report = work / "report.json"
    command = ["python3", "-m", "ds41k.qualify", "--json", "/report/report.json"]
    problem = "it ended without a report"
    try:
        arguments = ["--device", f"nvidia.com/gpu={uuid}", f"--volume={work}:/report"]
        container.work(f"the kernels on {uuid}", CONTAINER, arguments, image, command, work / "log")
    except ImageError as error:
        # A kernel that is not correct, or no GPU: both are in the report. Without one, the check itself failed.
        problem = str(error)
    try:
        found: dict[str, Any] = json.loads(report.read_text("utf-8"))
    except (OSError, ValueError):
        return {"kernels": {}, "not_qualified": f"the check failed: {problem}"}
    return found


def keep(file: Path, record: dict[str, Any]) -> None:
    """Write a report whole, unless the same lies there."""
    text = json.dumps(record, indent=1, sort_keys=True) + "\n"
    if file.exists() and file.read_text("utf-8") == text:
        say(f"{file} is the same as before")
        return
    fresh = file.with_suffix(".new")
    fresh.write_text(text, "utf-8")
    fresh.replace(file)
    say(f"stored {file}")


def summary(report: dict[str, Any]) -> str:
    """Return a report in one line."""
    if not report["kernels"]:
        return f"not qualified: {report.get('not_qualified', 'the report is empty')}"
    words = []
    for name, kernel in report["kernels"].items():
        speed = (", faster" if kernel["faster"] else ", slower") if kernel["shapes"] else ""
        words.append(f"{name} {'correct' if kernel['correct'] else 'NOT CORRECT'}{speed}")
    return "; ".join(words)
