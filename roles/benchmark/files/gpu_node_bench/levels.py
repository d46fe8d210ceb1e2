"""Runs in the serving image: `vllm bench serve` several times in one process, since it takes long to load.

Reads a JSON list of argument lists, and waits for a line on stdin before each, so that counters can be read in between.
"""

import json
import sys
import traceback
from pathlib import Path

MARK = "@@gpu-node-bench"


def main() -> int:
    """Say `ready N` before and `ended N STATUS` after each level; the status is empty when all went well."""
    from vllm.entrypoints.cli.main import main as vllm

    for number, arguments in enumerate(json.loads(Path(sys.argv[1]).read_text())):
        print(f"{MARK} ready {number}", flush=True)
        if not sys.stdin.readline():
            return 1
        sys.argv = ["vllm", *arguments]
        status = ""
        try:
            vllm()
        except SystemExit as left:
            status = "" if left.code in (None, 0) else f"exit {left.code}"
        except Exception as error:
            traceback.print_exc()
            status = f"{type(error).__name__}: {error}".splitlines()[0]
        print(f"{MARK} ended {number} {status}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
