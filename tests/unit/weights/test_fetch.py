"""The node's program without faults of the hub: what it asks for and what not, kills, sources, secrets, transports."""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.serving.gpu_node.plugins.module_utils.manifest import MANIFEST, SHORT, STATE_FILE
from gpu_node_weights.errors import WeightsError
from gpu_node_weights.request import read_request

from tests.doubles.hub.server import Hub, Repository, make_repository
from tests.unit.weights.program import NAME, Node, Running, assert_done, assert_refused

FILES: dict[str, int | bytes] = {
    "config.json": 900,
    "tokenizer/merges.txt": 6000,
    "empty.txt": b"",
    "odd names/\u00fc #1 50%?.txt": 100,
    "model-1.safetensors": 1_500_000,
    "model-2.safetensors": 400_001,
}
IN_FLIGHT = 12 << 18
TOKEN = "hf_SecretOfTheTests"


@pytest.fixture
def tiny(hub: Hub) -> Repository:
    return make_repository(hub.root / "owner/tiny", FILES, seed=3)


@pytest.fixture
def node(tmp_path: Path, hub: Hub) -> Node:
    return Node(tmp_path / "node", hub)


def lay_out(repository: Repository, folder: Path) -> Path:
    """Copy a repository's files to a folder of the operator."""
    for path in repository.entries:
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(repository.content(path))
    return folder


# -- once, and not again ----------------------------------------------------------------------------------------------


def test_the_second_run_asks_nobody_and_a_flipped_byte_costs_its_file(hub: Hub, node: Node, tiny: Repository) -> None:
    request = node.request(tiny)
    ran = node.fetch(request)
    assert_done(ran, "6 files", "over plain HTTP", f"complete: {NAME} {node.digest_of(tiny)[:SHORT]}")
    folder = node.assert_complete(tiny)
    assert hub.file_bytes == tiny.total
    assert {seen.headers.get("authorization", "") for seen in hub.seen} == {""}
    (record,) = (node.base / ".sources").iterdir()
    assert json.loads(record.read_text())["digest"] == node.digest_of(tiny)
    hub.reset_stats()
    assert_done(node.fetch(request), "as it was")
    assert hub.requests == 0

    broken = folder / "model-2.safetensors"
    broken.chmod(0o644)
    content = bytearray(broken.read_bytes())
    content[-1] ^= 1
    broken.write_bytes(content)
    broken.chmod(0o444)
    assert_done(node.fetch(request), "model-2.safetensors has SHA-256")
    node.assert_complete(tiny)
    assert hub.file_bytes == tiny.entries["model-2.safetensors"].size
    # kept for whoever wants to know why
    assert (folder.with_name(f"{folder.name}.bad-1") / "model-2.safetensors").read_bytes() == content


def test_unchanged_files_of_another_revision_are_linked(hub: Hub, node: Node, tiny: Repository) -> None:
    assert_done(node.fetch(node.request(tiny)))
    hub.reset_stats()
    later = make_repository(hub.root / "owner/tiny", FILES, seed=3, seeds={"model-2.safetensors": 4})
    assert later.revision != tiny.revision
    assert_done(node.fetch(node.request(later)))
    old, new = node.assert_complete(tiny), node.assert_complete(later)
    large = "model-1.safetensors"
    assert (old / large).stat().st_ino == (new / large).stat().st_ino
    # what git holds is listed without a SHA-256, and is small
    small = sum(entry.size for entry in later.entries.values() if not entry.lfs)
    assert hub.file_bytes == later.entries["model-2.safetensors"].size + small
    assert f"owner/tiny/{large}" not in hub.stats()["files"]


# -- kills ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def long(hub: Hub) -> Iterator[Repository]:
    """8 MB that take 4 s."""
    hub.bucket.rate = 2_000_000
    sizes: dict[str, int | bytes] = {f"model-{number}.safetensors": 2_000_000 for number in range(4)}
    yield make_repository(hub.root / "owner/long", {**sizes, "config.json": 900}, seed=1)


def half(node: Node, repository: Repository, running: Running) -> None:
    running.wait_for(lambda: node.begun() + len(node.verified()) * 2_000_000 > repository.total // 2, "half of it")


def gone(pids: list[int]) -> bool:
    """Tell whether processes have ended; nobody may have asked for their exit codes yet."""
    states = []
    for pid in pids:
        with contextlib.suppress(FileNotFoundError):
            states.append(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0])
    return set(states) <= {"Z", "X"}


def wait_for(ready: Callable[[], bool], what: str) -> None:
    until = time.monotonic() + 10
    while not ready():
        assert time.monotonic() < until, f"no {what}"
        time.sleep(0.02)


def kept(node: Node, repository: Repository) -> int:
    return node.begun() + sum(repository.entries[path].size for path in node.verified())


def test_kill_of_the_program_in_the_middle(hub: Hub, node: Node, long: Repository) -> None:
    request = node.request(long)
    running = node.start(request)
    half(node, long, running)
    workers = running.workers()
    running.kill()
    wait_for(lambda: gone(workers), "end of its workers")
    wait_for(lambda: not hub.state.connections, "end of their connections")
    assert not node.complete()
    before = kept(node, long)
    # four streams hold a block each, and more lies in the sockets' buffers of a busy machine
    assert hub.file_bytes - before <= IN_FLIGHT
    hub.reset_stats()
    hub.bucket.rate = 0
    assert_done(node.fetch(request))
    node.assert_complete(long)
    # not one byte of what is on the disk
    assert hub.file_bytes == long.total - before


def test_kill_of_a_worker_in_the_middle(hub: Hub, node: Node, long: Repository) -> None:
    running = node.start(node.request(long))
    half(node, long, running)
    (worker,) = running.workers()
    running.process.send_signal(signal.SIGSTOP)
    os.kill(worker, signal.SIGKILL)
    wait_for(lambda: gone([worker]), "end of the worker")
    wait_for(lambda: not hub.state.connections, "end of its connections")
    before = kept(node, long)
    assert hub.file_bytes - before <= IN_FLIGHT
    hub.reset_stats()
    hub.bucket.rate = 0
    running.process.send_signal(signal.SIGCONT)
    assert_done(running.end(), "a worker ended by itself")
    node.assert_complete(long)
    assert hub.file_bytes == long.total - before


def test_after_a_reboot_everything_is_hashed_again(hub: Hub, node: Node, tiny: Repository) -> None:
    hub.fault("status", "*/model-1.safetensors", -1, amount=503, seconds=60)
    request = node.request(tiny)
    running = node.start(request)
    running.wait_for(lambda: len(list((node.base / ".incoming").glob("*/verified.jsonl"))) == 1, "a beginning")
    (journal,) = (node.base / ".incoming").glob("*/verified.jsonl")
    running.wait_for(lambda: journal.read_text().count("\n") == len(tiny.entries) - 1, "all others")
    running.kill()
    lines = [json.loads(line) for line in journal.read_text().splitlines()]
    # written before the machine went down, and the last line not to its end
    journal.write_text("".join(json.dumps({**line, "boot": "another"}) + "\n" for line in lines) + '{"path": "conf')
    torn = journal.parent / "files/model-2.safetensors"
    torn.chmod(0o644)
    with torn.open("r+b") as stream:
        stream.seek(200_000)
        stream.write(bytes(1000))
    torn.chmod(0o444)
    hub.clear_faults()
    hub.reset_stats()
    assert_done(node.fetch(request), "hashing 5 files that an earlier run left")
    node.assert_complete(tiny)
    assert hub.file_bytes == sum(tiny.entries[f"model-{number}.safetensors"].size for number in (1, 2))


def test_what_was_verified_and_not_noted_yet_is_not_asked_for_again(hub: Hub, node: Node, tiny: Repository) -> None:
    """A kill between the two: small files of a hub have no SHA-256 there, and are told by git's hash."""
    hub.fault("status", "*/model-1.safetensors", -1, amount=503, seconds=60)
    request = node.request(tiny)
    running = node.start(request)
    running.wait_for(lambda: len(node.verified()) == len(tiny.entries) - 1, "all others")
    running.kill()
    (journal,) = (node.base / ".incoming").glob("*/verified.jsonl")
    journal.unlink()
    hub.clear_faults()
    hub.reset_stats()
    assert_done(node.fetch(request))
    node.assert_complete(tiny)
    assert list(hub.stats()["files"]) == ["owner/tiny/model-1.safetensors"]


def test_workers_that_end_again_and_again(hub: Hub, node: Node, tiny: Repository) -> None:
    hub.fault("silent", "*", -1, methods=("HEAD", "GET"))
    running = node.start(node.request(tiny, tries=2))
    killed: set[int] = set()
    while running.process.poll() is None:
        for worker in set(running.workers()) - killed:
            # each of its four streams has asked the hub
            if hub.stats()["injected"].get("silent", 0) >= 4 * (len(killed) + 1):
                os.kill(worker, signal.SIGKILL)
                killed.add(worker)
        time.sleep(0.05)
    assert_refused(running.end(), "end by themselves")
    assert len(killed) == 2


def test_a_python_that_cannot_run_the_worker(tmp_path: Path, node: Node, tiny: Repository) -> None:
    assert_refused(node.fetch(node.request(tiny, python="/no/python")), "/no/python", "makes it anew")
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')
    bare.chmod(0o755)
    ran = node.fetch(node.request(tiny, python=str(bare)))
    assert ran.code == 1
    assert "No module named" in ran.text
    assert ran.last.startswith(f"error: {bare} cannot run the worker")


def test_two_at_once_are_one_after_the_other(hub: Hub, node: Node, tiny: Repository) -> None:
    hub.fault("stall", "*/model-1.safetensors", after=1000, seconds=1)
    request = node.request(tiny)
    first = node.start(request)
    first.wait_for(lambda: bool(list((node.base / ".incoming").glob("*/lock"))), "its lock")
    time.sleep(0.1)
    second = node.start(request)
    assert_done(first.end())
    assert_done(second.end(), "another fetch of it is running", "as it was")
    node.assert_complete(tiny)
    assert hub.file_bytes - tiny.total <= 2 * (1 << 18)


# -- disks ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 300 MB of its own."""
    folder = tmp_path / "disk"
    folder.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=300m", "tmpfs", str(folder)], capture_output=True)
    if done.returncode != 0:
        pytest.skip(f"no file system can be mounted here: {done.stderr.decode().strip()}")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def test_no_room_is_said_before_a_byte_is_asked_for(hub: Hub, node: Node, tiny: Repository, small_disk: Path) -> None:
    node.root = small_disk / "artifacts"
    (small_disk / "ballast").write_bytes(bytes(60 << 20))
    request = node.request(tiny)
    assert_refused(node.fetch(request), "1.9 MB", "free", "prune_weights.yml")
    assert hub.requests == 0


def test_a_disk_that_fills_up_meanwhile(hub: Hub, node: Node, long: Repository, small_disk: Path) -> None:
    node.root = small_disk / "artifacts"
    request = node.request(long)
    running = node.start(request)
    running.wait_for(lambda: node.begun() > 1_000_000, "a beginning")
    ballast = small_disk / "ballast"
    with ballast.open("wb", buffering=0) as stream:
        try:
            while stream.write(bytes(1 << 20)) == 1 << 20:
                pass
        except OSError:
            pass
    assert_refused(running.end(), "o space left", "make room")
    assert not node.complete()
    # until then the server counts what it was sending
    wait_for(lambda: not hub.state.connections, "end of its connections")
    ballast.unlink()
    begun, verified = node.begun(), len(node.verified())
    hub.reset_stats()
    hub.bucket.rate = 0
    assert_done(node.fetch(request))
    node.assert_complete(long)
    assert hub.file_bytes <= long.total - begun - verified * 900


# -- what is not let in -----------------------------------------------------------------------------------------------


HOSTILE = ("../x", "/etc/passwd", "a/../../x", "a//b", ".", "a/", MANIFEST, STATE_FILE, "a\nb", "", "config.json/x")


@pytest.mark.parametrize("path", HOSTILE)
def test_hostile_paths_in_a_listing(node: Node, tiny: Repository, path: str) -> None:
    files = {**tiny.wanted(), path: {"size": 3, "sha256": "0" * 64, "git_sha1": None, "xet": False}}
    with pytest.raises(WeightsError, match="cannot be fetched"):
        read_request(node.request(tiny, files=files))


def test_a_hostile_listing_writes_and_asks_for_nothing(hub: Hub, node: Node, tiny: Repository) -> None:
    files = {**tiny.wanted(), "../x": {"size": 3, "sha256": "0" * 64, "git_sha1": None, "xet": False}}
    request = node.request(tiny, files=files)
    assert_refused(node.fetch(request), NAME, "'../x'")
    assert hub.requests == 0
    assert {path.name for path in node.folder.iterdir()} == {request.name, "run-1.log"}


def test_a_hub_that_is_not_there_and_a_token_file_that_holds_none(tmp_path: Path, node: Node, tiny: Repository) -> None:
    for endpoint, words in (
        ("http://127.0.0.1:1", ("127.0.0.1:1", "refused")),
        ("http://hub.invalid", ("hub.invalid", "ConnectError")),
    ):
        assert_refused(node.fetch(node.request(tiny, endpoint=endpoint, tries=1)), *words)
    token_file = tmp_path / "token"
    token_file.write_text("\n")
    ran = node.fetch(node.request(tiny, token_file=str(token_file)))
    assert_refused(ran, f"{token_file} holds no token", "model_weights_hub_token")


def test_a_listing_without_files_and_a_request_that_is_none(node: Node, tiny: Repository) -> None:
    assert_refused(node.fetch(node.request(tiny, files={})), NAME, "include and exclude")
    broken = node.folder / "request.json"
    broken.write_text("{")
    assert_refused(node.fetch(broken), "request.json")


def test_another_digest_than_promised(node: Node, tiny: Repository) -> None:
    assert_refused(node.fetch(node.request(tiny, digest="0" * 64)), "0" * 64, node.digest_of(tiny))
    assert not node.complete()
    assert_done(node.fetch(node.request(tiny)))
    node.assert_complete(tiny)


# -- folders, archives ------------------------------------------------------------------------------------------------


def from_path(folder: Path, **more: Any) -> dict[str, Any]:
    return {"source": {"type": "path", "path": str(folder), **more}}


def test_a_folder_is_copied(tmp_path: Path, hub: Hub, node: Node, tiny: Repository) -> None:
    folder = lay_out(tiny, tmp_path / "srv")
    request = node.request(**from_path(folder))
    assert_done(node.fetch(request), f"copied from {folder}")
    node.assert_complete(tiny)
    assert_done(node.fetch(request), "as it was")
    assert hub.requests == 0
    # the operator puts another version there
    (folder / "config.json").write_text('{"version": 2}')
    assert_done(node.fetch(request), f"copied from {folder}")
    assert len(node.complete()) == 2


def test_a_folder_is_adopted_where_it_lies(tmp_path: Path, node: Node, tiny: Repository) -> None:
    folder = lay_out(tiny, tmp_path / "srv")
    request = node.request(**from_path(folder, adopt=True))
    assert_done(node.fetch(request), "adopted where it lies")
    (link,) = node.complete()
    assert link.is_symlink()
    assert link.resolve() == folder
    assert set(os.listdir(folder)) == {path.split("/")[0] for path in tiny.entries}
    assert_done(node.fetch(request), "as it was")


@pytest.mark.parametrize("adopt", [False, True], ids=["copied", "adopted"])
def test_a_shard_that_was_cut_short_and_a_pointer_of_git_lfs(
    tmp_path: Path, node: Node, tiny: Repository, adopt: bool
) -> None:
    folder = lay_out(tiny, tmp_path / "srv")
    whole = tiny.content("model-2.safetensors")
    shard = folder / "model-2.safetensors"
    request = node.request(**from_path(folder, adopt=adopt))
    for wrong, words in (
        (whole[:300_000], ("model-2.safetensors", "300000", "400001", "cut short")),
        (whole[:7], ("model-2.safetensors", "7 bytes")),
        (pointer(tiny, "model-2.safetensors"), ("model-2.safetensors", "git LFS", "git lfs pull")),
    ):
        shard.write_bytes(wrong)
        assert_refused(node.fetch(request), *words)
        assert not node.complete()
    shard.write_bytes(whole)
    assert_done(node.fetch(request))
    assert [path.name for path in node.complete()] == [node.digest_of(tiny)[:SHORT]]


def pointer(repository: Repository, path: str) -> bytes:
    entry = repository.entries[path]
    text = f"version https://git-lfs.github.com/spec/v1\noid sha256:{entry.sha256}\nsize {entry.size}\n".encode()
    assert len(text) == entry.pointer_size
    return text


@pytest.mark.parametrize("suffix", ["", "gz"])
def test_an_archive(tmp_path: Path, node: Node, tiny: Repository, suffix: str) -> None:
    folder, archive = lay_out(tiny, tmp_path / "srv"), tmp_path / "tiny.tar"
    with tarfile.open(archive, f"w:{suffix}") as made:  # type: ignore[call-overload]
        made.add(folder, ".")
    request = node.request(source={"type": "archive", "path": str(archive)})
    whole = archive.read_bytes()
    archive.write_bytes(whole[: len(whole) // 2])
    assert_refused(node.fetch(request), str(archive), "damaged")
    assert not node.complete()
    archive.write_bytes(whole)
    assert_done(node.fetch(request), "unpacked from")
    node.assert_complete(tiny)


def test_an_archive_that_leaves_its_folder(tmp_path: Path, node: Node) -> None:
    archive = tmp_path / "evil.tar"
    with tarfile.open(archive, "w") as made:
        member = tarfile.TarInfo("../evil")
        member.size = 4
        made.addfile(member, io.BytesIO(b"evil"))
    assert_refused(node.fetch(node.request(source={"type": "archive", "path": str(archive)})), "../evil")
    assert not list(node.root.rglob("evil"))


# -- mirrors and peers ------------------------------------------------------------------------------------------------


def listing(repository: Repository) -> dict[str, Any]:
    return {
        path: {"size": entry.size, "sha256": entry.sha256, "git_sha1": None, "xet": False}
        for path, entry in repository.entries.items()
    }


def test_a_mirror(hub: Hub, node: Node, tiny: Repository) -> None:
    assert hub.static is not None
    lay_out(tiny, hub.static / "tiny")
    hub.fault("cut", "static/tiny/model-1.safetensors", after=1_000_000)
    digest = node.digest_of(tiny)
    source = {"type": "mirror", "url": f"{hub.url}/static/tiny", "digest": digest}
    assert_done(node.fetch(node.request(source=source, files=listing(tiny), digest=digest)))
    node.assert_complete(tiny)
    assert hub.file_bytes - tiny.total <= 1 << 18


def test_peers_are_asked_again_until_they_have_it(hub: Hub, node: Node, tiny: Repository) -> None:
    """The hub itself is never asked, though the artifact's source is one."""
    assert hub.static is not None
    served = hub.static / "tiny/key"
    served.mkdir(parents=True)
    request = node.request(tiny, upstreams=[f"{hub.url}/static/tiny/key"], files=listing(tiny), stall_s=6)
    running = node.start(request)
    beat = 0
    for path in sorted(tiny.entries):
        # the peer has the next file half a second later, and says meanwhile that it goes on
        for _ in range(5):
            beat += 1
            (served / STATE_FILE).write_text(json.dumps({"beat": beat, "state": "running", "message": ""}))
            time.sleep(0.1)
        made = served / f"{path}.new"
        made.parent.mkdir(exist_ok=True)
        made.write_bytes(tiny.content(path))
        made.rename(served / path)
    assert_done(running.end())
    node.assert_complete(tiny)
    assert not [name for name in hub.stats()["paths"] if "/static/" not in name]


def test_a_peer_that_gives_up_leaves_it_to_the_next(tmp_path: Path, hub: Hub, node: Node, tiny: Repository) -> None:
    assert hub.static is not None
    near = hub.static / "near/key"
    near.mkdir(parents=True)
    (near / STATE_FILE).write_text(json.dumps({"beat": 1, "state": "failed", "message": "disk full"}))
    far = lay_out(tiny, hub.static / "far/key")
    upstreams = [f"{hub.url}/static/{folder.relative_to(hub.static)}" for folder in (near, far)]
    assert_done(node.fetch(node.request(tiny, upstreams=upstreams, files=listing(tiny))), "disk full")
    node.assert_complete(tiny)
    # when nobody is left, it says so
    other = Node(tmp_path / "other", hub)
    assert_refused(other.fetch(other.request(tiny, upstreams=upstreams[:1], files=listing(tiny))), "disk full")


# -- Xet --------------------------------------------------------------------------------------------------------------


def test_xet_that_hangs_gives_way_to_plain_http(hub: Hub, node: Node) -> None:
    """HF-02 and HF-03."""
    hub.xet = True
    tiny = make_repository(hub.root / "owner/tiny", {"config.json": 900, "model.safetensors": 300_000}, xet=True)
    ran = node.fetch(node.request(tiny, tries=1))
    assert_done(ran, "over Xet", "going on over plain HTTP")
    assert "over plain HTTP" in ran.last
    assert hub.cas_connections
    node.assert_complete(tiny)
    assert hub.file_bytes == tiny.total


def test_xet_that_is_listed_and_not_given_is_not_said(hub: Hub, node: Node) -> None:
    tiny = make_repository(hub.root / "owner/tiny", FILES, xet=True)
    hub.fault("cut", "*/model-1.safetensors", after=1_200_000)
    ran = node.fetch(node.request(tiny))
    assert_done(ran)
    assert "over plain HTTP" in ran.last
    assert "Xet" not in ran.last
    # it goes on from where it was, whatever the listing says
    assert hub.file_bytes - tiny.total <= 1 << 18


# -- secrets ----------------------------------------------------------------------------------------------------------


def test_the_token_is_seen_nowhere(hub: Hub, node: Node, tmp_path: Path) -> None:
    hub.xet = True
    gated = make_repository(hub.root / "owner/gated", FILES, access="gated", token=TOKEN, xet=True)
    token_file = tmp_path / "token"
    token_file.touch(mode=0o600)
    request = node.request(gated, token_file=str(token_file), transports=["http"])
    token_file.write_text("hf_WrongOne\n")
    refused = node.fetch(request)
    assert_refused(refused, "403", "GatedRepo", "model_weights_hub_token")
    token_file.write_text(f"{TOKEN}\n")
    running = node.start(request)
    running.wait_for(lambda: bool(running.workers()), "a worker")
    seen = b""
    while running.process.poll() is None:
        for pid in (running.process.pid, *running.workers()):
            for file in ("cmdline", "environ"):
                try:
                    seen += Path(f"/proc/{pid}/{file}").read_bytes()
                except OSError:
                    continue
        time.sleep(0.05)
    ran = running.end()
    assert_done(ran)
    node.assert_complete(gated)
    assert b"gpu_node_weights.worker" in seen
    for secret in (TOKEN, "hf_WrongOne"):
        assert secret.encode() not in seen
        assert secret not in ran.text + refused.text + request.read_text()
        for kept in node.root.rglob("*"):
            assert not kept.is_file() or secret.encode() not in kept.read_bytes(), kept
    assert hub.cas_connections == 0, "a transport that was not asked for"
    sent = {seen.headers.get("authorization", "") for seen in hub.seen if seen.server == "content"}
    assert sent == {""}
    assert f"Bearer {TOKEN}" in {seen.headers.get("authorization") for seen in hub.seen if seen.server == "hub"}
