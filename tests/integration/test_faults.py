"""What breaks a replica, and what its clients see of that: nothing, but for the requests that ran on it."""

from __future__ import annotations

import json
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from gpu_node.config import release_id
from nodes import Node
from testhost import client as docker

from .replicas import START_S, STATE, Site, wait_until
from .streaming import Client, Load

HTTP_SERVER = "/usr/bin/python3 -m http.server {port} --bind 127.0.0.1"
# Answers 200 to everything, like an engine of an earlier run that still holds the port.
IMPOSTER = """
from http.server import BaseHTTPRequestHandler, HTTPServer

class Answer(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"{}")
    do_POST = do_GET

HTTPServer(("127.0.0.1", %d), Answer).serve_forever()
"""


@pytest.fixture(scope="module")
def faulty(served: Node) -> Iterator[Site]:
    """The served node with a prober that is quick to judge, given back as it was."""
    site = Site(served)
    site.converge()
    yield site
    served.converge()


@pytest.fixture
def site(faulty: Site) -> Site:
    """Both replicas serve."""
    faulty.all_serve()
    for index in (0, 1):
        faulty.session(index)
    return faulty


@pytest.fixture
def stopped(faulty: Site) -> Iterator[Site]:
    """Replica 1 is stopped, replica 0 serves. Tests of failing starts share one stop and one start."""
    if faulty.status(1)["state"] not in ("inactive", "failed"):
        faulty.all_serve()
        faulty.session(1)
        faulty.stop(1)
    yield faulty
    if faulty.status(1)["state"] != "active":
        faulty.stop(1)


def assert_only_broke_on(site: Site, index: int, load: Load, fault: float, mark: int) -> None:
    """Every failed request had begun before the fault and ran on that replica, and none was repeated on the other."""
    assert [outcome for outcome in load.failed if outcome.started > fault] == []
    rows = site.rows(mark)
    broken = [row for row in rows if row["upstream_status"] != "200"]
    assert [row for row in broken if row["status"] != 200 and row["upstream"] != site.upstream(index)] == []
    by_id = {row["request_id"]: row for row in rows}
    assert {by_id[o.request_id]["upstream"] for o in load.failed if o.request_id} <= {site.upstream(index)}
    for row in rows:
        # nginx went on to the other replica only when there was no connection to the first.
        first, _, second = row["connect_s"].partition(", ")
        assert not second or first == "-", row


@contextmanager
def transient_unit(site: Site, name: str, command: str) -> Iterator[int]:
    """A process that runs while the block does; its pid."""
    site.node.ssh(f"systemctl reset-failed {name} 2>/dev/null; systemd-run -q --unit={name} {command}")
    try:
        yield int(site.node.ssh(f"systemctl show --value -p MainPID {name}"))
    finally:
        site.node.run(f"systemctl stop {name}")


def start(site: Site, index: int) -> subprocess.Popen[str]:
    """`systemctl start`, which goes on while the test does."""
    argv = site.node.ssh_argv(f"systemctl start {site.unit(index)}")
    return subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


# --- a replica that serves -------------------------------------------------------------------------------------------


def test_a_killed_engine_breaks_only_what_ran_on_it(site: Site) -> None:
    server, mark = site.server(0), site.mark()
    with site.load() as load:
        there = site.background("stream", 300, 1)
        here = site.background("stream", 1500, 0)
        posted = site.background("plain", 1500, 0)
        here.wait_for_events(5)
        assert posted.running
        fault = site.signal("KILL", server)
        load.wait_for_answers(8)
        assert not here.end(10).ok
        # Sent and perhaps half done: it is not asked again elsewhere, the client gets to know.
        assert posted.end(10).status == 502
        assert "balancer_error" in posted.outcome.error
        site.wait_serving(0)
        assert site.served_by(site.session(0)) == site.upstream(0)
        assert there.end().ok, there.outcome
    assert site.server(0) != server
    assert_only_broke_on(site, 0, load, fault, mark)


@pytest.mark.full
def test_a_killed_conmon_leaves_no_orphan(site: Site) -> None:
    server, monitor, mark = site.server(1), site.monitor(1), site.mark()
    with site.load() as load:
        site.signal("KILL", monitor)
        wait_until("the engine without its monitor ends", lambda: not site.alive(server), 20, every_s=0.05)
        # It took requests until then.
        fault = time.time()
        load.wait_for_answers(8)
        site.wait_serving(1)
        assert site.served_by(site.session(1)) == site.upstream(1)
    assert site.node.ssh("podman ps -a --format '{{.Names}}'").split().count("vllm-replica-1") == 1
    engines = site.node.ssh("pgrep -f '/vllm serve --config'").split()
    assert sorted(map(int, engines)) == sorted(site.server(index).pid for index in (0, 1))
    assert_only_broke_on(site, 1, load, fault, mark)


def test_a_frozen_engine_goes_out_and_comes_back(site: Site) -> None:
    """Its /health still says 200, and its own count of requests stands still."""
    core = site.core(0)
    with site.load() as load:
        here = site.background("stream", 1500, 0)
        here.wait_for_events(5)
        site.signal("STOP", core)
        try:
            assert site.direct(0, "/health")[0] == 200
            site.wait_out(0, "prober")
            assert site.direct(0, "/health")[0] == 200
            assert site.status(0)["state"] == "active"
            for _ in range(4):
                assert site.served_by(site.session(0)) == site.upstream(1)
            assert here.running
        finally:
            site.signal("CONT", core)
        wait_until("the prober lets it in", lambda: site.serves(0), 60)
        assert site.served_by(site.session(0)) == site.upstream(0)
        # Nobody killed it, so what was frozen in the middle goes on.
        assert here.end().ok, here.outcome
    assert load.failed == []
    assert site.core(0) == core


@pytest.mark.full
def test_an_engine_frozen_while_idle_goes_out_too(site: Site) -> None:
    core = site.core(1)
    site.signal("STOP", core)
    try:
        site.wait_out(1, "prober")
        assert site.direct(1, "/health")[0] == 200
        assert site.served_by(site.session(1)) == site.upstream(0)
    finally:
        site.signal("CONT", core)
    wait_until("the prober lets it in", lambda: site.serves(1), 60)
    assert site.core(1) == core


# --- a replica that is stopped and does not start --------------------------------------------------------------------


def test_a_stop_lets_a_running_stream_end_whole(site: Site) -> None:
    server = site.server(1)
    with site.load() as load:
        here = site.background("stream", 1000, 1)
        here.wait_for_events(5)
        assert here.running
        site.node.ssh(f"systemctl stop {site.unit(1)}", timeout=200)
        stopped = time.time()
        assert here.end(5).ok, here.outcome
        assert here.outcome.ended < stopped
        assert site.status(1)["state"] == "inactive"
        assert not site.alive(server)
        load.wait_for_answers(8)
    assert load.failed == []


def test_a_start_on_a_taken_port_names_who_has_it(stopped: Site) -> None:
    site, since = stopped, stopped.now()
    command = HTTP_SERVER.format(port=site.port(1))
    with transient_unit(site, "test-squatter", command) as pid:
        wait_until("the port is taken", lambda: site.node.ssh("ss -Hltn sport = :8001"), 20)
        began = time.monotonic()
        assert site.node.run(f"systemctl start {site.unit(1)}").returncode != 0
        assert time.monotonic() - began < 20
        assert f"port {site.port(1)} is held by pid {pid} ({command})" in site.journal(1, since)
        assert "starting release" not in site.journal(1, since)
    site.wait_for_journal(1, since, "starting release", 60)


@pytest.mark.full
def test_a_start_can_be_stopped(stopped: Site) -> None:
    """An engine that loads takes no notice of a signal; nobody waits until it does."""
    site, since = stopped, stopped.now()
    with start(site, 1) as starting:
        site.wait_for_journal(1, since, "loading, 1", 60)
        began = time.monotonic()
        site.stop(1)
        assert time.monotonic() - began < 20
        assert starting.wait(20) != 0
    assert site.node.ssh("podman ps -aq -f name=vllm-replica-1") == ""


@pytest.mark.full
def test_a_port_that_another_process_answers_is_no_replica(stopped: Site) -> None:
    """A 200 is not enough: the gate asks whose it is."""
    site, since = stopped, stopped.now()
    site.node.ssh("cat > /run/imposter.py", stdin=IMPOSTER % site.port(1))
    with site.load() as load, start(site, 1) as starting:
        # After the check of the port, before the engine gets it.
        site.wait_for_journal(1, since, "starting release", 30)
        with transient_unit(site, "test-imposter", "/usr/bin/python3 /run/imposter.py") as pid:
            assert starting.wait(60) != 0
            assert f"port {site.port(1)} is answered by pid {pid} (/usr/bin/python3 /run/imposter.py)" in site.journal(
                1, since
            )
            assert "unit" in site.out(1)
            load.wait_for_answers(4)
    assert load.failed == []


def test_an_engine_that_dies_in_the_start_gate_fails_the_start_at_once(stopped: Site) -> None:
    """A stale container of the name is no hindrance; the engine's last lines are in the journal."""
    site, since = stopped, stopped.now()
    image = site.release(1)["image"]["id"]
    stale = site.node.ssh(f"podman create --name vllm-replica-1 {image} true").split()[-1]
    with start(site, 1) as starting:
        site.wait_for_journal(1, since, "removing the stale container vllm-replica-1", 30)
        site.wait_for_journal(1, since, "non-default args", 120)
        assert stale not in site.node.ssh("podman ps -a --no-trunc -q")
        site.signal("KILL", site.server(1))
        began = time.monotonic()
        assert starting.wait(60) != 0
        assert time.monotonic() - began < 20
    lines = site.journal(1, since).splitlines()
    assert any(line.startswith("replica 1: engine: (APIServer pid=") for line in lines)
    (error,) = [line for line in lines if line.startswith("gpu-node: error: ")]
    assert "the engine's container ended" in error
    assert "the engine's last line: (APIServer" in error
    assert "unit" in site.out(1)


@pytest.mark.full
def test_a_deleted_config_file_stops_a_start_and_not_what_runs(stopped: Site) -> None:
    site, since, server = stopped, stopped.now(), stopped.server(0)
    for index in (0, 1):
        site.node.ssh(f"rm {STATE}/replicas/{index}/current/engine.yaml")
    with site.load() as load:
        assert site.node.run(f"systemctl start {site.unit(1)}").returncode != 0
        path = f"{STATE}/releases/{site.node.ssh(f'readlink {STATE}/replicas/1/current').strip()[-12:]}/engine.yaml"
        assert f"{path}: No such file or directory" in site.journal(1, since)
        load.wait_for_answers(8)
        site.converge()
        for index in (0, 1):
            site.node.ssh(f"test -s {STATE}/replicas/{index}/current/engine.yaml")
            assert site.serves(index)
        assert site.served_by(site.session(1)) == site.upstream(1)
    assert load.failed == []
    assert site.server(0) == server


# --- the node and the balancer ---------------------------------------------------------------------------------------


class FirstAnswer(threading.Thread):
    """Asks the balancer whether a replica is in, and once it says so, at once for a completion."""

    def __init__(self, site: Site) -> None:
        super().__init__(daemon=True)
        self._client = Client(site.node.http_port, site.node.client_key)
        self._booted = threading.Event()
        self.refusals: list[Any] = []
        self.health: Any = None
        self.completion: Any = None

    def booted(self) -> None:
        """The node is down: what answers from now on is the next boot."""
        self._booted.set()

    def run(self) -> None:
        self._booted.wait()
        while self.health is None:
            try:
                health = self._client.ask("/health", timeout_s=5)
                if health.status == 200:
                    self.completion = self._client.complete(4)
                    self.health = health.json()
                elif health.status == 503:
                    self.refusals.append(self._client.complete(4))
            except OSError:
                pass
            time.sleep(0.2)


@pytest.mark.full
def test_a_reboot_lets_streams_end_and_keeps_an_operators_drain(site: Site) -> None:
    site.node.ssh("gpu-node drain 1", timeout=150)
    here = site.background("stream", 1000, 0)
    here.wait_for_events(5)
    first = FirstAnswer(site)
    first.start()
    site.node.run("systemctl reboot")
    is_up = [docker(), "container", "inspect", "-f", "{{.State.Running}}", site.node.container]
    wait_until(
        "the node goes down",
        lambda: subprocess.run(is_up, capture_output=True, text=True, check=True).stdout.strip() == "false",
        200,
    )
    assert here.end(5).ok, here.outcome
    first.booted()
    site.node.up()
    first.join(START_S)
    # Nothing was in before it had generated: the balancer said so itself, and the first that was in answered.
    assert first.health == {"status": "ok", "replicas": 1}
    assert first.completion.status == 200
    assert first.refusals
    for answer in first.refusals:
        assert answer.status == 503
        assert answer.json()["error"]["message"] == "No replica is in service"
        assert int(answer.headers["retry-after"]) > 0
    wait_until("replica 1 runs", lambda: site.status(1)["state"] == "active", START_S)
    assert site.out(1) == ["operator"]
    assert site.serves(0)
    assert site.served_by(site.session(1)) == site.upstream(0)
    assert site.node.ssh("gpu-node undrain 1") == "replica 1: in the balancer\n"
    # A request may still meet a process of nginx from before the change.
    wait_until("its sessions come back", lambda: site.served_by(site.session(1)) == site.upstream(1), 20)


@pytest.mark.full
def test_a_broken_nginx_configuration_goes_on_serving_and_refuses_changes(site: Site) -> None:
    with site.load() as load:
        site.node.ssh("echo nonsense_by_hand on\\; >> /etc/nginx/nginx.conf")
        refused = site.node.run("gpu-node drain 0")
        assert refused.returncode == 2
        assert 'unknown directive "nonsense_by_hand" in /etc/nginx/nginx.conf' in refused.stderr
        assert "the membership stays as it was" in refused.stderr
        assert site.out(0) == []
        assert site.served_by(site.session(0)) == site.upstream(0)
        site.converge()
        drained = site.node.run("gpu-node drain 0", timeout=150)
        assert (drained.returncode, drained.stderr) == (0, "")
        assert site.served_by(site.session(0)) == site.upstream(1)
        site.node.ssh("gpu-node undrain 0")
        load.wait_for_answers(4)
    assert load.failed == []


# --- releases --------------------------------------------------------------------------------------------------------


def write_broken_release(site: Site, index: int) -> str:
    """A complete release of the replica with an argument that no engine knows; its id."""
    release = site.release(index)
    release["engine_args"]["no-such-argument"] = 1
    release["env"] = dict(release["env"])
    arguments = "".join(f"{name}: {json.dumps(value)}\n" for name, value in sorted(release["engine_args"].items()))
    environment = site.node.ssh(f"cat {STATE}/replicas/{index}/current/engine.env")
    for name, text in (("engine.yaml", arguments), ("engine.env", environment)):
        release["files"][name] = site.node.ssh("sha256sum", stdin=text).split()[0]
    release["id"] = release_id(release)
    folder = f"{STATE}/releases/{release['id']}"
    site.node.ssh(f"mkdir -p {folder}")
    for name, text in (
        ("engine.yaml", arguments), ("engine.env", environment), ("release.json", json.dumps(release)),
    ):  # fmt: skip
        site.node.ssh(f"cat > {folder}/{name}", stdin=text)
    return str(release["id"])


@pytest.mark.full
def test_a_release_that_cannot_start_is_rolled_back(site: Site) -> None:
    before, mark = site.release(0)["id"], site.mark()
    broken = write_broken_release(site, 0)
    with site.load() as load:
        done = site.node.run(f"gpu-node switch 0 {broken}", timeout=START_S)
        assert done.returncode == 3, done
        assert f"release {broken} failed; {before} serves again" in done.stdout
        assert "no-such-argument" in done.stderr + done.stdout
        assert site.release(0)["id"] == before
        assert site.serves(0)
        assert site.served_by(site.session(0)) == site.upstream(0)
    assert load.failed == []
    assert {row["status"] for row in site.rows(mark)} == {200}
    site.node.ssh(f"rm -r {STATE}/releases/{broken}")


class InService(threading.Thread):
    """How many replicas the balancer says are in, over time."""

    def __init__(self, site: Site) -> None:
        super().__init__(daemon=True)
        self._client = Client(site.node.http_port, site.node.client_key, keep=True)
        self._ended = threading.Event()
        self.counts: list[int] = []

    def run(self) -> None:
        while not self._ended.wait(0.2):
            self.counts.append(self._client.ask("/health").json().get("replicas", 0))

    def end(self) -> list[int]:
        self._ended.set()
        self.join(30)
        return [count for count, before in zip(self.counts, [None, *self.counts], strict=False) if count != before]


@pytest.mark.full  # four switches: more time than the other faults of releases together
def test_changed_settings_and_the_way_back_on_a_serving_node(site: Site) -> None:
    """site.yml with another value switches the replicas one after the other; the rollback is the same by hand."""
    before = [site.release(index)["id"] for index in (0, 1)]
    since = site.now()
    with site.load() as load:
        in_service = InService(site)
        in_service.start()
        site.converge(max_num_seqs=8)
        for index in (0, 1):
            row = site.status(index)
            assert row["previous"] == before[index] != row["release"]
            assert site.release(index)["engine_args"]["max-num-seqs"] == 8
            (said,) = [line for line in site.journal(index, since).splitlines() if "non-default args" in line]
            assert "'max_num_seqs': 8" in said
        for index in (0, 1):
            site.node.ssh(f"gpu-node rollback {index}", timeout=START_S)
            assert site.status(index)["release"] == before[index]
        load.wait_for_answers(4)
        # Each of the four switches took one out and let it in again.
        assert in_service.end() == [2, 1, 2, 1, 2, 1, 2, 1, 2]
    assert load.failed == []
