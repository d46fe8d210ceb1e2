"""The node itself: commands with a limit, units, the kernel's log, the cards, the load in the serving image."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from gpu_node_accept.cards import Card, parse_cards
from gpu_node_accept.checks import CheckError

CONTAINER = "gpu-node-acceptance-load"
HELD = Path("/var/lib/gpu-node/held")


def run(argv: Sequence[str], timeout_s: float) -> tuple[int, str]:
    """Exit code and output. 127: no such command; 124: it did not end in time and was killed, with all it started."""
    try:
        process = subprocess.Popen(
            argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            errors="replace", start_new_session=True,
        )  # fmt: skip
    except FileNotFoundError:
        return 127, f"{argv[0]}: not found"
    try:
        out, _ = process.communicate(timeout=timeout_s)
        return process.returncode, out
    except subprocess.TimeoutExpired:
        kill_group(process.pid)
        try:
            out, _ = process.communicate(timeout=10)
        except (subprocess.TimeoutExpired, ValueError):
            out = ""
        return 124, f"{out or ''}\nnot done within {timeout_s:.0f} s"


def kill_group(group: int) -> None:
    """Kill a process group; one that is gone is no matter."""
    with suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


def output(argv: Sequence[str], timeout_s: float = 60) -> str:
    """A command's output. Raises CheckError when it fails."""
    code, text = run(argv, timeout_s)
    if code:
        raise CheckError(f"{' '.join(argv[:3])} failed with {code}: {text.strip()[-200:]}", remedy="run it on the node")
    return text


def cards() -> list[Card]:
    return parse_cards(output(["nvidia-smi", "-q", "-x"], 60))


def compute_processes(uuids: Sequence[str]) -> list[str]:
    """Who has memory on these cards, by pid and name."""
    text = output(["nvidia-smi", "--query-compute-apps=gpu_uuid,pid,process_name", "--format=csv,noheader"])
    rows = [[part.strip() for part in line.split(",", 2)] for line in text.splitlines() if line.count(",") >= 2]
    return [f"{pid} ({name.rsplit('/', 1)[-1]})" for uuid, pid, name in rows if uuid in uuids]


def kernel_messages() -> list[str]:
    """The kernel's messages of this boot. Raises CheckError when there is no such journal."""
    code, text = run(["journalctl", "-k", "-b", "-q", "-o", "cat", "--no-pager"], 60)
    if code:
        raise CheckError(f"journalctl -k fails: {text.strip()[-200:]}", "the kernel's log of this boot")
    return text.splitlines()


def unit_log(unit: str) -> str:
    """What a unit printed since it was started last."""
    invocation = output(["systemctl", "show", "--property=InvocationID", "--value", unit]).strip()
    if not invocation:
        raise CheckError(f"{unit} was not started since boot", remedy=f"systemctl status {unit}")
    return output(["journalctl", "-q", "-u", unit, f"_SYSTEMD_INVOCATION_ID={invocation}", "-o", "cat", "--no-pager"])


class Watch:
    """Looks at the cards again and again while something else loads them."""

    def __init__(self, every_s: float = 1.0) -> None:
        self.samples: dict[str, list[Card]] = {}
        self._every_s = every_s
        self._ended = threading.Event()

    def look(self) -> None:
        for card in cards():
            self.samples.setdefault(card.uuid, []).append(card)

    def _keep_looking(self) -> None:
        while not self._ended.is_set():
            with suppress(CheckError):
                self.look()
            self._ended.wait(self._every_s)

    @contextmanager
    def running(self) -> Iterator[Watch]:
        thread = threading.Thread(target=self._keep_looking, daemon=True)
        thread.start()
        try:
            yield self
        finally:
            self._ended.set()
            thread.join(90)


def load_command(
    image: str,
    uuids: Sequence[str],
    program: Path,
    arguments: Sequence[str],
    environment: Mapping[str, str] | None = None,
) -> list[str]:
    """The load program in a container like a replica's: the cards by CDI, no network, no rights, nothing written."""
    devices = [part for uuid in uuids for part in ("--device", f"nvidia.com/gpu={uuid}")]
    variables = [f"--env={name}={value}" for name, value in sorted((environment or {}).items())]
    return [
        *("podman", "--events-backend=none", "run", "--rm", "--replace", "--name", CONTAINER, "--pull=never"),
        *("--network=none", "--log-driver=none", "--ipc=private", "--shm-size=2g", "--ulimit=memlock=-1:-1"),
        *("--read-only", "--cap-drop=all", "--security-opt=no-new-privileges", "--env=HOME=/tmp"),
        *("--env=PYTHONPATH=/program", f"--volume={program}:/program:ro", *variables, *devices),
        *("--entrypoint=python3", image, "-m", "gpu_load", *arguments),
    ]


def run_load(
    image: str,
    uuids: Sequence[str],
    program: Path,
    arguments: Sequence[str],
    timeout_s: float,
    environment: Mapping[str, str] | None = None,
) -> tuple[int, str]:
    """Exit code and output of the load program; 124 and no container left when it did not end in time."""
    code, text = run(load_command(image, uuids, program, arguments, environment), timeout_s)
    if code == 124:
        run(["podman", "rm", "--force", "--time=0", CONTAINER], 60)
    return code, text


def gpu_load(
    image: str, uuids: Sequence[str], program: Path, arguments: Sequence[str], timeout_s: float
) -> list[dict[str, Any]]:
    """The rows that the load program printed; its own limits name what hangs, this one ends a container that does."""
    code, text = run_load(image, uuids, program, arguments, timeout_s)
    rows = read_rows(text)
    if code == 124:
        raise CheckError(
            f"the load program did not end within {timeout_s:.0f} s", remedy="look for Xid in the kernel's log"
        )
    if not any("cards" in row for row in rows):
        raise CheckError(
            f"the load program did not start: {last_words(rows, text)}",
            remedy="playbooks/prepare.yml proves the containers",
        )
    return rows


def last_words(rows: Sequence[dict[str, Any]], text: str) -> str:
    """Why the load program did not start: its own error, or the end of what the container printed."""
    return next((str(row["error"]) for row in rows if row.get("error")), text.strip()[-300:])


def read_rows(text: str) -> list[dict[str, Any]]:
    """The lines of JSON among a program's output."""
    rows = []
    for line in text.splitlines():
        if line.startswith("{"):
            try:
                rows.append(json.loads(line))
            except ValueError:
                continue
    return rows
