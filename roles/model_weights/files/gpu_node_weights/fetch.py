"""One artifact, from nothing or from what is there to complete: the whole way."""

from __future__ import annotations

import datetime
import errno
import fcntl
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from ansible_collections.serving.gpu_node.plugins.module_utils.artifact_store import (
    Stamp,
    Store,
    Sums,
    files_below,
    free_bytes,
    hash_file,
    hash_files,
    read_json,
    reusable,
    seen_at_source,
    stamp,
    write_json,
)
from ansible_collections.serving.gpu_node.plugins.module_utils.listing import take
from ansible_collections.serving.gpu_node.plugins.module_utils.manifest import (
    MANIFEST,
    SHORT,
    STATE_FILE,
    ManifestError,
    build_manifest,
    parse_manifest,
)

from gpu_node_weights import local
from gpu_node_weights.content import content_problems
from gpu_node_weights.errors import WeightsError
from gpu_node_weights.progress import Rate, progress_line, say, size_text, time_text
from gpu_node_weights.remote import Done, Remote
from gpu_node_weights.request import Request, Wanted

# The least a file system keeps free: one that is full to the last byte stops more than this fetch.
_SPARE_BYTES = 1 << 28
_RATE_WINDOW_S = 30.0


def now_text() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


class Fetch:
    """The state of one fetch."""

    def __init__(self, request: Request) -> None:
        self._request = request
        self._store = Store(request.root, request.name)
        self._incoming = self._store.incoming(request.key)
        self._files = self._incoming / "files"
        self._verified: dict[str, tuple[str, Stamp]] = {}
        self._total = request.total
        self._count = len(request.files)
        self._rate = Rate(_RATE_WINDOW_S)
        self._beat = 0
        self._began = time.monotonic()
        self._next_report = self._next_beat = 0.0

    def run(self) -> str:
        """Complete the artifact; return its digest.

        :raises WeightsError: with what is wrong; what was verified stays for the next run.
        """
        self._incoming.mkdir(parents=True, exist_ok=True)
        with self._lock():
            already = self._complete_already()
            if already:
                local.remove_tree(self._incoming)
                return already
            self._files.mkdir(parents=True, exist_ok=True)
            self._serve_from(self._files)
            try:
                self._tell("running")
                how = self._get()
                return self._publish(how)
            except WeightsError as error:
                self._tell("failed", str(error))
                raise
            except OSError as error:
                if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                    raise
                raise WeightsError(
                    f"{self._request.root} is full: {error}; make room (playbooks/prune_weights.yml lists what nothing "
                    "uses), and run again: what is here is kept"
                ) from error

    # --- what is there

    def _complete_already(self) -> str:
        """Return the digest of the artifact that this source gave before, when it still is complete."""
        recorded = self._store.recorded(self._request.key).get("digest", "")
        for wanted in (recorded, self._request.digest):
            folder = self._store.folder(wanted) if wanted else None
            if folder is None or not folder.is_dir():
                continue
            if self._sound(folder) and seen_at_source(self._request.source) in (
                {},
                self._store.recorded(self._request.key).get("seen", {}),
            ):
                if wanted != recorded:
                    self._record(wanted)
                self._serve_from(folder)
                say(f"complete: {self._request.name} {wanted[:SHORT]}, as it was")
                return str(wanted)
        return ""

    def _sound(self, folder: Path) -> bool:
        """Tell whether an artifact is complete; move one aside that is not, and keep its sound files for this fetch."""
        problems, stamps, manifest = self._store.check(folder, tick=self._beat_now)
        if not problems:
            self._store.write_stamps(manifest["digest"], now_text(), stamps)
            return True
        say(f"{folder}: {'; '.join(problems[:3])}")
        adopted = folder.is_symlink()
        aside = self._store.move_aside(folder)
        if not adopted:
            say(f"{self._request.name}: moved aside to {aside.name}; what is right in it is used again")
            for path, seen in stamps.items():
                target = self._files / path
                target.parent.mkdir(parents=True, exist_ok=True)
                if not target.exists():
                    os.link(aside / path, target)
                    self._note(Done(path, manifest["files"][path]["sha256"], seen))
        return False

    def _serve_from(self, folder: Path) -> None:
        """Have peers find the files, wherever they are now."""
        link = self._store.base / ".served" / self._request.key
        link.parent.mkdir(parents=True, exist_ok=True)
        fresh = link.with_name(f"{link.name}.new")
        fresh.unlink(missing_ok=True)
        fresh.symlink_to(os.path.relpath(folder, link.parent))
        fresh.replace(link)

    @contextmanager
    def _lock(self) -> Iterator[None]:
        with (self._incoming / "lock").open("w") as stream:
            try:
                fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                say(f"{self._request.name}: another fetch of it is running; waiting for its end")
                fcntl.flock(stream, fcntl.LOCK_EX)
            yield

    def _resume(self, wanted: dict[str, Wanted]) -> None:
        """Take over what an earlier run verified; hash what nobody vouches for."""
        known = self._journal()
        there = files_below(self._files)
        there.pop(STATE_FILE, None)
        unsure = []
        for path, file in there.items():
            entry = known.get(path)
            if entry and entry["boot"] == boot_id() and entry["stamp"] == stamp(file):
                self._verified[path] = (entry["sha256"], entry["stamp"])
            else:
                unsure.append(path)
        if unsure:
            say(f"{self._request.name}: hashing {len(unsure)} files that an earlier run left")
        for file, sums in hash_files([there[path] for path in unsure], self._beat_now).items():
            self._take_over(file.relative_to(self._files).as_posix(), file, sums, wanted, known)
        # What belongs to another listing is in the way.
        for path in [path for path in self._verified if wanted and path not in wanted]:
            (self._files / path).unlink()
            del self._verified[path]

    def _take_over(
        self, path: str, file: Path, sums: Sums, wanted: dict[str, Wanted], known: dict[str, dict[str, Any]]
    ) -> None:
        """Keep a file of an earlier run when its bytes are the wanted ones, or those that were verified then."""
        want = wanted.get(path)
        right = (want.sha256 if want else "") or known.get(path, {}).get("sha256", "")
        if not right and want and want.git_sha1 == hash_file(file, git=True).git_sha1:
            # A small file of a hub, which has no other hash there.
            right = sums.sha256
        if right and sums.sha256 == right:
            self._note(Done(path, sums.sha256, stamp(file)))
        else:
            file.unlink()

    def _journal(self) -> dict[str, dict[str, Any]]:
        """Return what earlier runs verified; a line that a crash cut short counts for nothing."""
        found = {}
        path = self._incoming / "verified.jsonl"
        if path.exists():
            for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
                try:
                    entry = json.loads(line)
                    found[entry["path"]] = {name: entry[name] for name in ("sha256", "stamp", "boot")}
                except (ValueError, KeyError, TypeError):
                    continue
        return found

    def _note(self, done: Done) -> None:
        self._verified[done.path] = (done.sha256, done.stamp)
        with (self._incoming / "verified.jsonl").open("a", encoding="utf-8") as stream:
            entry = {"path": done.path, "sha256": done.sha256, "stamp": done.stamp, "boot": boot_id()}
            stream.write(json.dumps(entry) + "\n")

    def _reuse(self, wanted: dict[str, Wanted]) -> None:
        """Link the files that some artifact on this node holds already."""
        lacking = {
            path: {"sha256": item.sha256, "size": item.size}
            for path, item in wanted.items()
            if path not in self._verified
        }
        count = 0
        for path, file in reusable(self._request.root, lacking).items():
            target = self._files / path
            target.parent.mkdir(parents=True, exist_ok=True)
            os.link(file, target)
            self._note(Done(path, wanted[path].sha256, stamp(target)))
            count += wanted[path].size
        if count:
            say(f"{self._request.name}: {size_text(count)} are on this node already, and are linked")

    # --- getting

    def _get(self) -> str:
        """Have every file verified in its place; return how the bytes came, for people."""
        kind = self._request.source["type"]
        if self._request.over_http:
            return self._get_listed()
        if kind == "path":
            return self._get_folder()
        if kind == "archive":
            return self._get_archive()
        return self._get_generated()

    def _get_listed(self) -> str:
        files = self._request.files
        self._resume(files)
        self._reuse(files)
        lacking = [item for path, item in files.items() if path not in self._verified]
        self._check_space(lacking)
        if not lacking:
            return "from what was here"
        base = sum(files[path].size for path in self._verified)
        return Remote(
            self._request, self._incoming, lacking, self._note, lambda count: self._report(base + count)
        ).run()

    def _check_space(self, lacking: list[Wanted]) -> None:
        need = 0
        for item in lacking:
            part = self._incoming / "parts" / f"{item.path}.part"
            need += max(0, item.size - (part.stat().st_size if part.exists() else 0))
        self._need_space(need)

    def _need_space(self, need: int) -> None:
        free = free_bytes(self._incoming)
        if need and need + _SPARE_BYTES > free:
            raise WeightsError(
                f"{self._request.name} still needs {size_text(need)} and {size_text(_SPARE_BYTES)} to spare, and "
                f"{self._request.root} has {size_text(free)} free; make room (playbooks/prune_weights.yml lists what "
                "nothing uses), or use a larger disk"
            )

    def _get_folder(self) -> str:
        path = self._request.source["path"]
        files = local.source_folder(self._request.source)
        wanted = self._folder_listing(Path(path), files)
        self._count, self._total = len(wanted), sum(item.size for item in wanted.values())
        if self._request.source.get("adopt"):
            out = local.leaves_folder(path, files)
            if out:
                raise WeightsError(
                    f"{path}: {out[0]} is a link out of the folder, which a container cannot follow; leave out "
                    "`adopt`, and the files are copied"
                )
            self._hash_adopted(files, wanted)
            return "adopted where it lies"
        self._forget_changed()
        self._resume(wanted)
        self._reuse(wanted)
        self._need_space(sum(item.size for name, item in wanted.items() if name not in self._verified))
        base = sum(wanted[name].size for name in self._verified)
        for name in [name for name in wanted if name not in self._verified]:
            part = self._incoming / "parts" / f"{name}.part"
            done = [base]

            def tick(count: int, done: list[int] = done) -> None:
                done[0] += count
                self._report(done[0])

            local.copy_file(files[name], part, tick)
            self._settle(name, part, wanted[name])
            base += wanted[name].size
        return f"copied from {path}"

    def _forget_changed(self) -> None:
        """Drop what was taken from a file that the operator has changed since, or it would stay for ever."""
        now, noted = seen_at_source(self._request.source), self._incoming / "seen.json"
        before = read_json(noted)
        parts = self._incoming / "parts"
        begun = {name.removesuffix(".part"): file for name, file in files_below(parts).items()}
        for name, file in [*files_below(self._files).items(), *begun.items()]:
            # An archive's files come from the one at "".
            at = name if name in now else ""
            if name != STATE_FILE and (at not in now or now[at] != before.get(at)):
                file.unlink()
        write_json(noted, now)

    def _folder_listing(self, folder: Path, files: dict[str, Path]) -> dict[str, Wanted]:
        """Return what a folder should hold: its own manifest's files when it has one, else what is there."""
        try:
            listed = parse_manifest((folder / MANIFEST).read_text(encoding="utf-8", errors="replace"))["files"]
        except FileNotFoundError:
            return {name: Wanted(name, file.stat().st_size) for name, file in files.items()}
        except ManifestError as error:
            raise WeightsError(f"{folder / MANIFEST}: {error}; copy the folder again") from error
        taken = take(self._request.source, list(listed))
        lacking = [name for name in taken if name not in files]
        if lacking:
            raise WeightsError(f"{folder} lacks {lacking[0]}, which its manifest lists; copy the folder again")
        return {name: Wanted(name, listed[name]["size"], listed[name]["sha256"]) for name in taken}

    def _hash_adopted(self, files: dict[str, Path], wanted: dict[str, Wanted]) -> None:
        names = {files[name]: name for name in wanted}
        say(f"{self._request.name}: hashing {len(names)} files where they lie, {size_text(self._total)}")
        for file, sums in hash_files(names, self._beat_now).items():
            name = names[file]
            if wanted[name].sha256 and wanted[name].sha256 != sums.sha256:
                raise WeightsError(f"{file} has SHA-256 {sums.sha256}, not {wanted[name].sha256}; copy it again")
            self._verified[name] = (sums.sha256, stamp(file))

    def _get_archive(self) -> str:
        path = self._request.source["path"]
        self._forget_changed()
        self._resume({})
        there = {name: (self._files / name).stat().st_size for name in self._verified}
        self._count = 0
        done = sum(there.values())
        seen = set()

        def skip(name: str, size: int) -> bool:
            seen.add(name)
            return there.get(name) == size

        for name, size, stream in local.archive_members(self._request.source, skip):
            self._need_space(size)
            part = self._incoming / "parts" / f"{name}.part"
            local.write_member(path, stream, part, lambda count: self._beat_now())
            self._settle(name, part, Wanted(name, size))
            done += size
            self._total, self._count = done, len(self._verified)
            self._report(done)
        for name in set(self._verified) - seen:
            (self._files / name).unlink()
            del self._verified[name]
        if not self._verified:
            raise WeightsError(
                f"{path} holds no file to take; give an archive of the artifact's folder, or correct the source's "
                "folder, include and exclude"
            )
        return f"unpacked from {path}"

    def _get_generated(self) -> str:
        self._resume({})
        parts = self._incoming / "parts"
        for name in local.write_generated(int(self._request.source["seed"]), parts, lambda count: None):
            part = parts / f"{name}.part"
            self._settle(name, part, Wanted(name, part.stat().st_size))
        return "generated"

    def _settle(self, name: str, part: Path, wanted: Wanted) -> None:
        """Hash a part on the disk and give it its place among the verified files."""
        sums = hash_files([part], self._beat_now)[part]
        if sums.size != wanted.size or (wanted.sha256 and sums.sha256 != wanted.sha256):
            part.unlink()
            raise WeightsError(
                f"{name} came as {sums.size} bytes with SHA-256 {sums.sha256}, not {wanted.size} bytes"
                f"{f' with {wanted.sha256}' if wanted.sha256 else ''}; look at the source, and run again"
            )
        with part.open("rb") as stream:
            os.fsync(stream.fileno())
        part.chmod(0o444)
        target = self._files / name
        target.parent.mkdir(parents=True, exist_ok=True)
        part.replace(target)
        self._note(Done(name, sums.sha256, stamp(target)))

    # --- telling

    def _beat_now(self) -> None:
        """Say to peers that this goes on, at most once a second."""
        now = time.monotonic()
        if now >= self._next_beat:
            self._next_beat = now + 1
            self._tell("running")

    def _report(self, count: int) -> None:
        """Print how far it is, every few seconds."""
        self._beat_now()
        now = time.monotonic()
        self._rate.add(count, now)
        if now >= self._next_report:
            first = self._next_report == 0.0
            self._next_report = now + self._request.report_s
            if not first:
                files = (len(self._verified), max(self._count, len(self._verified)))
                say(progress_line(self._request.name, files, (count, self._total), self._rate.per_second()))

    def _tell(self, state: str, message: str = "") -> None:
        self._beat += 1
        # What only peers read is no reason to fail, nor to hide why it fails: a full disk ends this in its own place.
        with suppress(OSError):
            if self._files.is_dir():
                write_json(self._files / STATE_FILE, {"beat": self._beat, "state": state, "message": message})

    # --- the end

    def _publish(self, how: str) -> str:
        """Check the whole, and make it appear under its digest by one rename; return the digest."""
        request = self._request
        adopted = bool(request.source.get("adopt"))
        base = Path(request.source["path"]) if adopted else self._files
        problems = content_problems({name: base / name for name in self._verified})
        if problems:
            raise WeightsError(f"{request.name} cannot be served: {'; '.join(problems[:5])}")
        files = {name: {"size": seen[0], "sha256": sha256} for name, (sha256, seen) in sorted(self._verified.items())}
        manifest = build_manifest(request.name, {**request.source, "at": now_text(), "how": how}, files)
        whole = manifest["digest"]
        if request.digest and whole != request.digest:
            raise WeightsError(
                f"{request.name} has the digest {whole}, and its source was to give {request.digest}; "
                "look at the source, or correct its digest"
            )
        folder = self._store.folder(whole)
        stamps = {name: seen for name, (_, seen) in self._verified.items()}
        if folder.is_dir() and self._sound(folder):
            say(f"{request.name}: {folder.name} has these bytes already, from another source")
        elif adopted:
            # A link of an earlier adoption whose folder is gone.
            folder.unlink(missing_ok=True)
            write_json(self._store.base / ".adopted" / f"{folder.name}.json", manifest)
            self._store.write_stamps(whole, now_text(), stamps)
            folder.symlink_to(request.source["path"])
        else:
            (self._files / STATE_FILE).unlink(missing_ok=True)
            write_json(self._files / MANIFEST, manifest)
            _seal(self._files)
            self._store.write_stamps(whole, now_text(), stamps)
            self._files.chmod(0o755)
            self._files.rename(folder)
            folder.chmod(0o555)
        self._serve_from(folder)
        self._record(whole)
        local.remove_tree(self._incoming)
        total = sum(seen[0] for seen in stamps.values())
        say(
            f"complete: {request.name} {whole[:SHORT]}, {size_text(total)}, {len(files)} files, {how}, "
            f"{time_text(time.monotonic() - self._began)}"
        )
        return str(whole)

    def _record(self, whole: str) -> None:
        self._store.record(
            self._request.key,
            {
                "digest": whole,
                "source": self._request.source,
                "at": now_text(),
                "seen": seen_at_source(self._request.source),
            },
        )


def _seal(folder: Path) -> None:
    """Make folders read-only and have their names on the disk for good."""
    for base, _, _ in os.walk(folder, topdown=False):
        descriptor = os.open(base, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        if Path(base) != folder:
            Path(base).chmod(0o555)
