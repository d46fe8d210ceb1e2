"""The hub double is true: what the real client makes of it, plain HTTP as the real hub speaks it, and every fault."""

from __future__ import annotations

import hashlib
import http.client
import json
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx2
import pytest
from huggingface_hub import HfApi, get_hf_file_metadata, hf_hub_download, hf_hub_url, snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    RemoteEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils._http import close_session, parse_ratelimit_headers

from tests.doubles.hub import server
from tests.doubles.hub.server import Hub, Repository, make_repository

FILES: dict[str, int | bytes] = {
    "config.json": 900,
    "tokenizer/merges.txt": 3000,
    "model-1.safetensors": 70_000,
    "model-2.safetensors": 30_001,
    "LICENSE": b"",
}
SHARD = "owner/tiny/model-1.safetensors"


@pytest.fixture
def tiny(hub: Hub) -> Repository:
    return make_repository(hub.root / "owner/tiny", FILES, seed=3, xet=True)


@pytest.fixture(autouse=True)
def fresh_client() -> Iterator[None]:
    """The client keeps connections for the life of the process; those of the last test's hub are dead."""
    yield
    close_session()


def get(
    url: str, method: str = "GET", follow: bool = True, **headers: str
) -> tuple[int, http.client.HTTPMessage, bytes]:
    """One request over a connection of its own; redirects are followed without the headers of the first request."""
    split = urlsplit(url)
    connection = http.client.HTTPConnection(str(split.hostname), split.port or 80, timeout=5)
    try:
        target = split.path + (f"?{split.query}" if split.query else "")
        connection.request(method, target, headers={name.replace("_", "-"): text for name, text in headers.items()})
        response = connection.getresponse()
        body = response.read()
    finally:
        connection.close()
    if follow and response.status in (302, 307):
        headers.pop("Authorization", None)
        return get(httpx2.URL(url).join(response.headers["Location"]).__str__(), method, follow, **headers)
    return response.status, response.headers, body


def resolve(hub: Hub, repository: Repository, path: str) -> str:
    return f"{hub.url}/{repository.name}/resolve/{repository.revision}/{path}"


# -- the real client --------------------------------------------------------------------------------------------------


def test_repo_info_of_the_real_client(hub: Hub, tiny: Repository) -> None:
    info = HfApi(endpoint=hub.url).model_info("owner/tiny", revision=tiny.revision, files_metadata=True)
    assert (info.id, info.sha, info.private) == ("owner/tiny", tiny.revision, False)
    siblings = {sibling.rfilename: sibling for sibling in info.siblings or []}
    assert set(siblings) == set(FILES)
    for path, sibling in siblings.items():
        content = tiny.content(path)
        assert sibling.size == len(content)
        if path.endswith(".safetensors"):
            assert sibling.lfs is not None
            digest = hashlib.sha256(content).hexdigest()
            assert (sibling.lfs.sha256, sibling.lfs.size) == (digest, len(content))
            content = f"version https://git-lfs.github.com/spec/v1\noid sha256:{digest}\nsize {len(content)}\n".encode()
            assert sibling.lfs.pointer_size == len(content)
        else:
            assert sibling.lfs is None
        assert sibling.blob_id == git_name(content)
    assert HfApi(endpoint=hub.url).repo_info("owner/tiny").sha == tiny.revision


def git_name(content: bytes) -> str:
    """git's own answer."""
    done = subprocess.run(["git", "hash-object", "--stdin"], input=content, capture_output=True, check=True)
    return done.stdout.decode().strip()


@pytest.mark.parametrize("resolve_cache", [False, True], ids=["direct", "redirected-on-the-hub"])
def test_downloads_of_the_real_client(tmp_path: Path, hub: Hub, tiny: Repository, resolve_cache: bool) -> None:
    hub.resolve_cache = resolve_cache
    for path in FILES:
        file = hf_hub_download(
            "owner/tiny", path, revision=tiny.revision, endpoint=hub.url, cache_dir=tmp_path / "cache", token="secret"
        )
        assert Path(file).read_bytes() == tiny.content(path)
    assert hub.file_bytes == tiny.total
    assert_no_token_left_the_hub(hub)
    assert any(seen.headers.get("authorization") == "Bearer secret" for seen in hub.seen if seen.server == "hub")


def assert_no_token_left_the_hub(hub: Hub) -> None:
    content = [seen for seen in hub.seen if seen.server == "content"]
    assert content
    assert all(name.lower() != "authorization" for seen in content for name in seen.headers)


def test_a_whole_snapshot_of_the_real_client(tmp_path: Path, hub: Hub, tiny: Repository) -> None:
    folder = snapshot_download("owner/tiny", revision=tiny.revision, endpoint=hub.url, local_dir=tmp_path / "all")
    found = {path: (Path(folder) / path).read_bytes() for path in FILES}
    assert found == {path: tiny.content(path) for path in FILES}


def test_metadata_of_the_real_client(hub: Hub, tiny: Repository) -> None:
    url = hf_hub_url("owner/tiny", "model-1.safetensors", revision=tiny.revision, endpoint=hub.url)
    metadata = get_hf_file_metadata(url, endpoint=hub.url)
    entry = tiny.entries["model-1.safetensors"]
    assert (metadata.commit_hash, metadata.etag, metadata.size) == (tiny.revision, entry.sha256, entry.size)
    assert metadata.location.startswith(hub.content_url)
    assert metadata.xet_file_data is None
    hub.xet = True
    metadata = get_hf_file_metadata(url, endpoint=hub.url)
    assert metadata.xet_file_data is not None
    assert metadata.xet_file_data.file_hash == entry.xet_hash
    url = hf_hub_url("owner/tiny", "config.json", revision=tiny.revision, endpoint=hub.url)
    metadata = get_hf_file_metadata(url, endpoint=hub.url)
    assert (metadata.etag, metadata.location) == (tiny.entries["config.json"].git_sha1, url)
    assert metadata.xet_file_data is None


def test_xet_hangs_in_the_real_client(tmp_path: Path, hub: Hub, tiny: Repository) -> None:
    """HF-02: connections are taken and nothing comes; with Xet off in the environment the same download ends."""
    hub.xet = True
    program = (
        "import sys; from huggingface_hub import hf_hub_download; "
        "hf_hub_download('owner/tiny', 'model-1.safetensors', revision=sys.argv[1], endpoint=sys.argv[2])"
    )
    argv = [sys.executable, "-c", program, tiny.revision, hub.url]
    environment = {**os.environ, "HF_HOME": str(tmp_path / "home"), "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    with subprocess.Popen(argv, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as hanging:
        until = time.monotonic() + 20
        while not hub.cas_connections and time.monotonic() < until:
            assert hanging.poll() is None
            time.sleep(0.05)
        with pytest.raises(subprocess.TimeoutExpired):
            hanging.wait(0.5)
        hanging.kill()
    assert hub.cas_connections
    assert hub.file_bytes == 0
    subprocess.run(argv, env={**environment, "HF_HUB_DISABLE_XET": "1"}, check=True, timeout=20)
    assert hub.file_bytes == tiny.entries["model-1.safetensors"].size


def test_tree_of_the_real_client(hub: Hub, tiny: Repository) -> None:
    api = HfApi(endpoint=hub.url)
    items = list(api.list_repo_tree("owner/tiny", revision=tiny.revision, recursive=True))
    assert {item.path for item in items} == {*FILES, "tokenizer"}
    below = list(api.list_repo_tree("owner/tiny", "tokenizer", revision=tiny.revision))
    assert [item.path for item in below] == ["tokenizer/merges.txt"]
    assert {item.path for item in api.list_repo_tree("owner/tiny")} == {
        "config.json",
        "LICENSE",
        "model-1.safetensors",
        "model-2.safetensors",
        "tokenizer",
    }


def test_a_tree_in_pages(hub: Hub) -> None:
    names: dict[str, int | bytes] = {f"{number}.txt": b"%d" % number for number in range(1005)}
    many = make_repository(hub.root / "owner/many", names)
    items = HfApi(endpoint=hub.url).list_repo_tree("owner/many", revision=many.revision)
    assert {item.path for item in items} == set(names)


def test_what_is_not_there_in_the_real_client(tmp_path: Path, hub: Hub, tiny: Repository) -> None:
    def download(path: str = "config.json", repository: str = "owner/tiny", revision: str = tiny.revision) -> None:
        hf_hub_download(repository, path, revision=revision, endpoint=hub.url, cache_dir=tmp_path, token=False)

    with pytest.raises(RemoteEntryNotFoundError):
        download(path="no.json")
    with pytest.raises(RevisionNotFoundError):
        download(revision="0" * 40)
    with pytest.raises(RepositoryNotFoundError):
        download(repository="owner/no")
    with pytest.raises(RepositoryNotFoundError):
        HfApi(endpoint=hub.url, token=False).repo_info("owner/no")
    with pytest.raises(RevisionNotFoundError):
        HfApi(endpoint=hub.url).repo_info("owner/tiny", revision="0" * 40)


def test_gated_and_private_repositories_in_the_real_client(tmp_path: Path, hub: Hub) -> None:
    gated = make_repository(hub.root / "owner/gated", FILES, access="gated", token="hf_right")
    make_repository(hub.root / "owner/private", FILES, access="private", token="hf_right")

    def download(token: str | bool) -> str:
        return hf_hub_download(
            "owner/gated", "model-1.safetensors", revision=gated.revision, endpoint=hub.url, cache_dir=tmp_path,
            token=token,
        )  # fmt: skip

    for wrong in (False, "hf_wrong"):
        with pytest.raises(GatedRepoError):
            download(wrong)
    # everyone may see what a gated repository holds
    assert HfApi(endpoint=hub.url, token=False).repo_info("owner/gated").gated == "manual"
    assert Path(download("hf_right")).read_bytes() == gated.content("model-1.safetensors")
    assert_no_token_left_the_hub(hub)
    with pytest.raises(RepositoryNotFoundError):
        HfApi(endpoint=hub.url, token="hf_wrong").repo_info("owner/private")
    assert HfApi(endpoint=hub.url, token="hf_right").repo_info("owner/private").private


# -- the protocol -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "part", "shown"),
    [
        ("bytes=0-", slice(0, None), "bytes 0-69999/70000"),
        ("bytes=69000-", slice(69000, None), "bytes 69000-69999/70000"),
        ("bytes=10-19", slice(10, 20), "bytes 10-19/70000"),
        ("bytes=-5", slice(-5, None), "bytes 69995-69999/70000"),
        ("bytes=69990-80000", slice(69990, None), "bytes 69990-69999/70000"),
    ],
)
def test_ranges(hub: Hub, tiny: Repository, asked: str, part: slice, shown: str) -> None:
    status, headers, body = get(resolve(hub, tiny, "model-1.safetensors"), Range=asked)
    assert (status, headers["Content-Range"], headers["Accept-Ranges"]) == (206, shown, "bytes")
    assert body == tiny.content("model-1.safetensors")[part]


def test_ranges_that_cannot_be_had(hub: Hub, tiny: Repository) -> None:
    url = resolve(hub, tiny, "config.json")
    status, headers, body = get(url, Range="bytes=900-")
    assert (status, headers["Content-Range"], body) == (416, "bytes */900", b"")
    # what is no single range of bytes is not looked at
    for odd in ("bytes=0-1,5-6", "lines=1-2", "bytes=-"):
        assert get(url, Range=odd)[0] == 200


def test_a_range_of_what_has_changed_is_all_of_it(hub: Hub, tiny: Repository) -> None:
    url = resolve(hub, tiny, "config.json")
    etag = f'"{tiny.entries["config.json"].git_sha1}"'
    assert get(url, "HEAD")[1]["ETag"] == etag
    assert get(url, Range="bytes=1-", If_Range=etag)[0] == 206
    assert get(url, Range="bytes=1-", If_Range='"other"')[0] == 200


def test_lfs_files_are_redirected_with_what_is_behind_it(hub: Hub, tiny: Repository) -> None:
    entry = tiny.entries["model-1.safetensors"]
    for method in ("HEAD", "GET"):
        status, headers, _ = get(resolve(hub, tiny, entry.path), method, follow=False)
        assert status == 302
        assert headers["X-Linked-ETag"] == f'"{entry.sha256}"'
        assert headers["X-Linked-Size"] == str(entry.size)
        assert headers["X-Repo-Commit"] == tiny.revision
        assert "X-Xet-Hash" not in headers


def test_the_content_host_takes_signed_addresses_alone(hub: Hub, tiny: Repository) -> None:
    location = get(resolve(hub, tiny, "model-1.safetensors"), follow=False)[1]["Location"]
    assert location.startswith(hub.content_url)
    assert get(location)[0] == 200
    status, _, body = get(location, Authorization="Bearer hf_leak")
    assert status == 400
    assert b"Only one auth mechanism allowed" in body
    assert get(location.replace("X-Amz-Expires=3600", "X-Amz-Expires=9999"))[0] == 403
    # an address that is signed for GET is not one for HEAD
    assert get(location, "HEAD")[0] == 403
    hub.expires_s = 0.1
    location = get(resolve(hub, tiny, "model-1.safetensors"), follow=False)[1]["Location"]
    time.sleep(0.15)
    status, _, body = get(location)
    assert status == 403
    assert b"Request has expired" in body


def test_static_files_are_there_or_not_yet(hub: Hub) -> None:
    assert hub.static is not None
    assert get(f"{hub.url}/static/a/b.bin")[0] == 503
    (hub.static / "a").mkdir()
    (hub.static / "a/b.bin").write_bytes(b"0123456789")
    assert get(f"{hub.url}/static/a/b.bin", Range="bytes=4-")[2] == b"456789"
    assert get(f"{hub.url}/static/../hub.log")[0] == 404


def test_counters(hub: Hub, tiny: Repository) -> None:
    get(resolve(hub, tiny, "config.json"), "HEAD")
    get(resolve(hub, tiny, "model-1.safetensors"), Range="bytes=69990-")
    stats = json.loads(get(f"{hub.url}/_stats")[2])
    assert stats["requests"] == 3
    assert stats["files"]["owner/tiny/config.json"] == {"head": 1, "get": 0, "bytes": 0}
    # the redirect on the hub and the bytes on the content host
    assert stats["files"][SHARD] == {"head": 0, "get": 2, "bytes": 10}
    assert stats["file_bytes"] == 10
    assert [seen["server"] for seen in json.loads(get(f"{hub.url}/_seen")[2])] == ["hub", "hub", "content"]
    assert get(f"{hub.url}/_stats", "DELETE")[0] == 200
    assert hub.stats()["requests"] == 0


def test_repositories_depend_on_their_seed_alone(tmp_path: Path) -> None:
    first = make_repository(tmp_path / "a/b", FILES, seed=1)
    same = make_repository(tmp_path / "c/d", FILES, seed=1)
    other = make_repository(tmp_path / "a/b", FILES, seed=1, seeds={"config.json": 2})
    assert first.revision == same.revision != other.revision
    changed = [path for path in FILES if first.entries[path] != other.entries[path]]
    assert changed == ["config.json"]
    json.loads(first.content("config.json"))
    header = first.content("model-1.safetensors")
    length = int.from_bytes(header[:8], "little")
    assert json.loads(header[8 : 8 + length])["weight"]["data_offsets"] == [0, 70_000 - 8 - length]


def test_as_a_program(tmp_path: Path) -> None:
    tiny = make_repository(tmp_path / "root/owner/tiny", FILES)
    log = tmp_path / "log"
    argv = [sys.executable, server.__file__, "--root", str(tmp_path / "root"), "--log", str(log)]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        where = json.loads(process.stdout.readline())
        url = f"{where['hub']}/owner/tiny/resolve/main/model-1.safetensors"
        request = urllib.request.Request(
            f"{where['hub']}/_faults", json.dumps({"kind": "status", "amount": 503}).encode(), method="POST"
        )
        urllib.request.urlopen(request, timeout=5).close()
        with pytest.raises(httpx2.HTTPStatusError):
            httpx2.get(url).raise_for_status()
        assert httpx2.get(url, follow_redirects=True).content == tiny.content("model-1.safetensors")
        assert httpx2.post(f"{where['hub']}/_faults", json={"kind": "fire"}).status_code == 400
        process.terminate()
        assert process.wait(5) == 0
    assert "hub GET /owner/tiny/resolve/main/model-1.safetensors 503" in log.read_text()


# -- faults -----------------------------------------------------------------------------------------------------------


def shard(hub: Hub, tiny: Repository, start: int | None = None) -> tuple[int, http.client.HTTPMessage, bytes]:
    url = resolve(hub, tiny, "model-1.safetensors")
    return get(url) if start is None else get(url, Range=f"bytes={start}-")


def test_faults_come_where_and_as_often_as_told(hub: Hub, tiny: Repository) -> None:
    hub.fault("status", "*/config.json", times=2, amount=503, methods=("GET", "HEAD"))
    hub.fault("status", SHARD, times=-1, amount=500, server="content")
    config = resolve(hub, tiny, "config.json")
    assert [get(config, "HEAD")[0], get(config)[0], get(config)[0]] == [503, 503, 200]
    assert get(resolve(hub, tiny, "model-2.safetensors"))[0] == 200
    assert [shard(hub, tiny)[0], shard(hub, tiny)[0]] == [500, 500]
    hub.clear_faults()
    assert shard(hub, tiny)[0] == 200
    assert hub.stats()["injected"] == {"status": 4}


@pytest.mark.parametrize("hard", [False, True], ids=["end", "reset"])
def test_cut(hub: Hub, tiny: Repository, hard: bool) -> None:
    hub.fault("cut", SHARD, after=5000, hard=hard)
    with pytest.raises((http.client.IncompleteRead, ConnectionResetError)):
        shard(hub, tiny)
    assert hub.stats()["files"][SHARD]["bytes"] == 5000
    hub.fault("cut", SHARD, times=3)
    for _ in range(3):
        with pytest.raises((http.client.IncompleteRead, ConnectionResetError)):
            shard(hub, tiny)
    assert shard(hub, tiny)[2] == tiny.content("model-1.safetensors")


def test_stall(hub: Hub, tiny: Repository) -> None:
    hub.fault("stall", SHARD, after=100, seconds=0.3)
    start = time.monotonic()
    assert shard(hub, tiny)[2] == tiny.content("model-1.safetensors")
    assert time.monotonic() - start >= 0.3
    hub.fault("stall", SHARD, after=100)
    location = get(resolve(hub, tiny, "model-1.safetensors"), follow=False)[1]["Location"]
    with pytest.raises(httpx2.ReadTimeout), httpx2.stream("GET", location, timeout=0.3) as response:
        response.read()
    # 100 bytes went out, and the thread ends when the client goes
    assert hub.stats()["files"][SHARD]["bytes"] == tiny.entries["model-1.safetensors"].size + 100


def test_silent(hub: Hub, tiny: Repository) -> None:
    hub.fault("silent", SHARD)
    with pytest.raises(httpx2.ReadTimeout):
        httpx2.get(resolve(hub, tiny, "model-1.safetensors"), timeout=0.3)


@pytest.mark.parametrize(("kind", "length"), [("short", 69_000), ("long", 71_000)])
def test_wrong_length(hub: Hub, tiny: Repository, kind: str, length: int) -> None:
    hub.fault(kind, SHARD, amount=1000)
    status, headers, body = shard(hub, tiny)
    assert (status, headers["Content-Length"], len(body)) == (200, str(length), length)
    assert body[:69_000] == tiny.content("model-1.safetensors")[:69_000]
    hub.fault(kind, SHARD, amount=1000)
    status, headers, body = shard(hub, tiny, 10_000)
    assert (status, len(body)) == (206, length - 10_000)
    assert headers["Content-Range"] == f"bytes 10000-{length - 1}/{length}"


def test_wrong_bytes(hub: Hub, tiny: Repository) -> None:
    right = tiny.content("model-1.safetensors")
    hub.fault("wrong_bytes", SHARD)
    hub.fault("wrong_bytes", SHARD)
    for start in (0, 69_999):
        body = shard(hub, tiny, start)[2]
        assert len(body) == len(right) - start
        assert sum(a != b for a, b in zip(body, right[start:], strict=True)) == 1
    assert shard(hub, tiny)[2] == right


def test_redirect_loop(hub: Hub, tiny: Repository) -> None:
    hub.fault("redirect_loop", SHARD, times=-1)
    with pytest.raises(httpx2.TooManyRedirects):
        httpx2.get(resolve(hub, tiny, "model-1.safetensors"), follow_redirects=True)


def test_trickle(hub: Hub, tiny: Repository) -> None:
    hub.fault("trickle", "owner/tiny/config.json", amount=2000)
    start = time.monotonic()
    assert get(resolve(hub, tiny, "config.json"))[2] == tiny.content("config.json")
    assert 0.3 <= time.monotonic() - start < 3


def test_gzip(hub: Hub, tiny: Repository) -> None:
    hub.fault("gzip", "owner/tiny/config.json", times=2)
    url, content = resolve(hub, tiny, "config.json"), tiny.content("config.json")
    assert get(url)[2] == content
    response = httpx2.get(url, headers={"Accept-Encoding": "gzip", "Range": "bytes=5-"})
    assert (response.status_code, response.headers["Content-Encoding"]) == (200, "gzip")
    assert "Content-Length" not in response.headers
    assert response.content == content


def test_ignored_range(hub: Hub, tiny: Repository) -> None:
    hub.fault("ignore_range", SHARD)
    status, headers, body = shard(hub, tiny, 100)
    assert (status, len(body), headers["Content-Range"]) == (200, 70_000, None)


def test_refusals_in_the_real_client(tmp_path: Path, hub: Hub, tiny: Repository) -> None:
    def download() -> Any:
        return get_hf_file_metadata(
            hf_hub_url("owner/tiny", "config.json", revision=tiny.revision, endpoint=hub.url), token=False
        )

    for kind, error in (("unauthorized", GatedRepoError), ("no_revision", RevisionNotFoundError)):
        hub.fault(kind, methods=("HEAD",))
        with pytest.raises(error):
            download()
    hub.fault("rate_limit", seconds=7, methods=("HEAD",))
    with pytest.raises(HfHubHTTPError) as caught:
        download()
    assert caught.value.response is not None
    assert caught.value.response.status_code == 429
    assert caught.value.response.headers["Retry-After"] == "7"
    limit = parse_ratelimit_headers(caught.value.response.headers)
    assert limit is not None
    assert (limit.remaining, limit.reset_in_seconds) == (0, 7)


# -- speed ------------------------------------------------------------------------------------------------------------


def test_all_connections_share_the_rate(tmp_path: Path) -> None:
    big = make_repository(tmp_path / "owner/big", {"a.bin": 600_000, "b.bin": 600_000})
    program = "import sys, urllib.request as r; print(len(r.urlopen(sys.argv[1]).read()))"
    with Hub(tmp_path, rate=1_000_000) as hub:
        start = time.monotonic()
        running = [
            subprocess.Popen([sys.executable, "-c", program, resolve(hub, big, path)], stdout=subprocess.PIPE)
            for path in big.entries
        ]
        assert [process.communicate()[0] for process in running] == [b"600000\n"] * 2
        assert 1.0 <= time.monotonic() - start < 3


def test_the_server_is_no_bottleneck(tmp_path: Path) -> None:
    """A benchmark of clients must not measure the server: 400 MB/s are far below what it does."""
    size = 256 << 20
    file = tmp_path / "static" / "big"
    file.parent.mkdir()
    with file.open("wb") as stream:
        stream.truncate(size)
    program = (
        "import sys, time, urllib.request as r; buffer, got, start = bytearray(1 << 20), 0, time.monotonic()\n"
        "with r.urlopen(sys.argv[1]) as answer:\n"
        "    while count := answer.readinto(buffer): got += count\n"
        "print(got / (time.monotonic() - start) / 1e6)"
    )
    rates = []
    with Hub(tmp_path, static=file.parent) as hub:
        # the best of three: other work on this machine is no finding
        for _ in range(3):
            argv = [sys.executable, "-c", program, f"{hub.url}/static/big"]
            rates.append(float(subprocess.run(argv, capture_output=True, check=True).stdout))
            if rates[-1] > 400:
                break
    assert max(rates) > 400
