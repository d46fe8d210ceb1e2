"""Changes to files that a kill at any moment leaves whole: either the old state or the new one."""

import contextlib
import fcntl
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gpu_node.errors import ConfigError, LockedError


def _sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def atomic_write(path: Path, text: str, mode: int = 0o644) -> None:
    """Replace the file's content; a reader sees the old text or the new one, never a part."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    # The leftover of a killed run may carry other modes, so it does not get reused.
    temporary.unlink(missing_ok=True)
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    with os.fdopen(descriptor, "w", encoding="utf-8") as stream:
        os.fchmod(stream.fileno(), mode)
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())
    temporary.rename(path)
    _sync_directory(path.parent)


def append_line(path: Path, line: str) -> None:
    """Add a line to the file's end. A kill may leave it cut off: then the next one begins on a line of its own."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+b") as stream:
        end = stream.seek(0, os.SEEK_END)
        cut_off = False
        if end:
            stream.seek(end - 1)
            cut_off = stream.read(1) != b"\n"
        stream.write((("\n" if cut_off else "") + line + "\n").encode(errors="replace"))
        stream.flush()
        os.fsync(stream.fileno())


def open_folder(path: Path) -> None:
    """Make the folder if need be, and let everybody look into it whatever the umask of who runs this."""
    path.mkdir(parents=True, exist_ok=True)
    path.chmod(0o755)


def replace_link(path: Path, target: str) -> None:
    """Point the symbolic link at the target, without a moment in which there is no link."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(target)
    temporary.rename(path)
    _sync_directory(path.parent)


def remove(path: Path) -> bool:
    """Remove the file; says whether there was one."""
    try:
        path.unlink()
    except FileNotFoundError:
        return False
    _sync_directory(path.parent)
    return True


def read_text(path: Path) -> str | None:
    """The file's text, or None when there is no such file."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, NotADirectoryError, ProcessLookupError):
        return None


def read_json(path: Path, remedy: str) -> Any:
    """The file's JSON value. The error names the file and the remedy, never the content: it may be a secret."""
    text = read_text(path)
    if text is None:
        raise ConfigError(f"{path} is missing: {remedy}")
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        where = f"line {error.lineno}" if isinstance(error, json.JSONDecodeError) else "its content"
        raise ConfigError(f"{path} is not valid JSON ({where}): {remedy}") from None


@contextlib.contextmanager
def lock(path: Path, holder: str, timeout_s: float) -> Iterator[None]:
    """Hold the lock file. `holder` is written into it, so that whoever waits in vain can name who has it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    other = os.pread(descriptor, 500, 0).decode(errors="replace").strip() or "another process"
                    raise LockedError(f"{path} is held by {other}: wait until it ends") from None
                time.sleep(0.05)
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, holder.encode(), 0)
        yield
    finally:
        # Closing releases the lock, and so does the kernel when the process is killed.
        os.close(descriptor)
