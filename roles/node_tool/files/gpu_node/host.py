"""The side effects on the machine that are not files: commands, signals, time, and a plain HTTP GET on loopback."""

import contextlib
import http.client
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NoReturn

from gpu_node.errors import StoppedError


@dataclass(frozen=True)
class Result:
    """How a command ended."""

    returncode: int
    stdout: str = ""
    stderr: str = ""

    @property
    def message(self) -> str:
        """What the command said, for an error."""
        return (self.stderr.strip() or self.stdout.strip() or f"exit status {self.returncode}")[:2000]


class Host:
    """The real machine; tests put another one in its place."""

    def run(self, argv: Sequence[str], timeout_s: float = 60) -> Result:
        """Run a command to its end. 127: it is not installed; 124: it was still running after timeout_s seconds."""
        try:
            done = subprocess.run(
                argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", timeout=timeout_s
            )
        except FileNotFoundError:
            return Result(127, stderr=f"{argv[0]} is not installed")
        except subprocess.TimeoutExpired:
            return Result(124, stderr=f"{argv[0]} {argv[1]} was still running after {timeout_s:.0f} s")
        return Result(done.returncode, done.stdout, done.stderr)

    def become(self, argv: Sequence[str]) -> NoReturn:
        """Replace this process by the command."""
        sys.stdout.flush()
        os.execvp(argv[0], list(argv))

    @contextlib.contextmanager
    def follow(self, argv: Sequence[str], on_line: Callable[[str], None]) -> Iterator[None]:
        """Hand each line of a command that does not end by itself to on_line while the block runs."""
        try:
            process = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                errors="replace",
            )
        except FileNotFoundError:
            yield
            return

        def pump() -> None:
            assert process.stdout is not None
            for line in process.stdout:
                on_line(line.rstrip("\n"))

        thread = threading.Thread(target=pump, daemon=True)
        thread.start()
        try:
            yield
            # What was said last before the block ended is still on its way through the journal.
            time.sleep(0.1)
        finally:
            process.terminate()
            process.wait()
            thread.join(timeout=5)

    @contextlib.contextmanager
    def stoppable(self) -> Iterator[None]:
        """SIGTERM, by which systemd stops a step of a unit, raises StoppedError in the block."""

        def stop(_signal: int, _frame: object) -> NoReturn:
            raise StoppedError("stopped by systemd")

        before = signal.signal(signal.SIGTERM, stop)
        try:
            yield
        finally:
            signal.signal(signal.SIGTERM, before)

    def hang_up(self, pid: int) -> None:
        """Send SIGHUP; a process that ended meanwhile is no error."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGHUP)

    def get(self, port: int, path: str, timeout_s: float) -> tuple[int, str]:
        """GET http://127.0.0.1:port/path over a new connection; status and text.

        Raises OSError (TimeoutError, ConnectionRefusedError, ...) when no whole answer comes.
        """
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout_s)
        try:
            connection.request("GET", path, headers={"Connection": "close"})
            response = connection.getresponse()
            return response.status, response.read().decode(errors="replace")
        except http.client.HTTPException as error:
            raise ConnectionError(f"no HTTP answer: {type(error).__name__}") from None
        finally:
            connection.close()

    def say(self, text: str) -> None:
        """A progress line, at once."""
        print(text, flush=True)

    def warn(self, text: str) -> None:
        print(f"gpu-node: warning: {text}", file=sys.stderr, flush=True)

    def wall_clock(self) -> float:
        """Seconds since the epoch."""
        return time.time()

    def clock(self) -> float:
        """Seconds that only go forward; comparable between processes until the next boot."""
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)
