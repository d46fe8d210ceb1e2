"""What clients may do at the balancer, also while one replica's server is stopped for 70 seconds; and secrets."""

from __future__ import annotations

import ast
import json
import re
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from nodes import Node

from .replicas import STATE, Site, wait_until
from .streaming import CHAT, COMPLETIONS, Background, Client, Outcome, completion, run

STOPPED_S = 70
MIB = 1024 * 1024


@pytest.fixture(scope="module")
def site(served: Node) -> Site:
    one = Site(served)
    one.all_serve()
    for index in (0, 1):
        one.session(index)
    return one


# --- sessions, streams and errors of a whole node --------------------------------------------------------------------


def test_turns_of_a_session_stay_together_until_its_replica_is_drained(site: Site) -> None:
    session = site.session(1)
    assert {site.served_by(session) for _ in range(4)} == {site.upstream(1)}
    site.node.ssh("gpu-node drain 1", timeout=150)
    try:
        assert {site.served_by(session) for _ in range(4)} == {site.upstream(0)}
    finally:
        site.node.ssh("gpu-node undrain 1")
    assert site.served_by(session) == site.upstream(1)


def test_requests_without_a_session_go_to_the_less_busy_replica(site: Site) -> None:
    """Also those that different processes of nginx accepted: six at once are three for each, every time."""
    count = 6
    together = threading.Barrier(count)

    def ask(client: Client) -> int:
        # Connections that come together are shared among nginx's processes.
        together.wait()
        client.ask("/health")
        together.wait()
        return client.complete(40).status

    for _ in range(8):
        mark, clients = site.mark(), [site.new_client(keep=True) for _ in range(count)]
        with ThreadPoolExecutor(count) as pool:
            assert set(pool.map(ask, clients)) == {200}
        served = [row["upstream"] for row in site.rows(mark)]
        assert sorted(served) == [site.upstream(0)] * 3 + [site.upstream(1)] * 3


def test_a_stream_comes_token_by_token(site: Site) -> None:
    """Nothing on the way waits for a full buffer: the first token comes long before the last."""
    outcome = run(Client(site.node.http_port, site.node.client_key), "stream", 400)
    assert outcome.ok, outcome
    total = outcome.ended - outcome.started
    assert len(outcome.events) > 40
    assert outcome.events[0] - outcome.started < total / 4
    # Cut into eight equal times, each has its share of the events.
    span = (outcome.events[-1] - outcome.events[0]) / 8
    shares = [int((at - outcome.events[0]) / span) for at in outcome.events]
    assert all(shares.count(part) >= 3 for part in range(8)), shares


def test_an_answer_closes_its_connection(site: Site) -> None:
    """Also for a client that would keep it: a reload closes idle connections, and a request sent just then is lost."""
    answer = site.new_client(keep=True).complete(1)
    assert (answer.status, answer.headers["connection"]) == (200, "close")


def test_an_answer_says_that_it_is_not_to_be_buffered(site: Site) -> None:
    """To an nginx or an ingress in front of the node; also an error of the engine."""
    answers = [site.client.complete(1), site.client.ask(CHAT, {"model": "another"})]
    assert answers[0].status == 200 and answers[1].status >= 400
    assert {answer.headers["x-accel-buffering"] for answer in answers} == {"no"}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {"model": "another", "messages": [{"role": "user", "content": "x"}]}),
        (CHAT, {**completion(1), "max_tokens": -1}),
        (COMPLETIONS, {"model": "tiny", "prompt": "x", "max_tokens": 1_000_000}),
        ("/v1/no-such-endpoint", {}),
    ],
)
def test_errors_of_the_engine_pass_unchanged(site: Site, path: str, body: dict[str, object]) -> None:
    mark = site.mark()
    answer = site.client.ask(path, body)
    script = (
        "import sys, urllib.request, urllib.error\n"
        "key = open('/etc/gpu-node/secrets/engine.env').read().strip().partition('=')[2]\n"
        f"body = {json.dumps(json.dumps(body))}.encode()\n"
        f"request = urllib.request.Request('http://{site.upstream(0)}{path}', body,\n"
        "    {'Authorization': 'Bearer ' + key, 'Content-Type': 'application/json'})\n"
        "try:\n    urllib.request.urlopen(request)\n"
        "except urllib.error.HTTPError as error:\n    print(error.status, error.read().decode())\n"
    )
    status, _, text = site.node.ssh("python3 -", stdin=script).strip().partition(" ")
    assert answer.status == int(status) >= 400
    assert answer.json() == json.loads(text)
    (row,) = site.rows(mark)
    assert row["upstream"] in (site.upstream(0), site.upstream(1))


STAND_IN_PORT = 8055
STAND_IN_ERROR = {"error": {"message": "CUDA error", "type": "internal_error", "code": 500}}
# Answers every completion with 500 and the engine's words for it.
STAND_IN = f"""
import http.server, json
class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        body = {json.dumps(STAND_IN_ERROR).encode()!r}
        self.send_response(500)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
http.server.ThreadingHTTPServer(("127.0.0.1", {STAND_IN_PORT}), Handler).serve_forever()
"""


@pytest.fixture
def stand_in(site: Site) -> Iterator[str]:
    """The upstream that nginx asks instead of replica 0; the prober, which would put replica 0 back, waits."""
    members, upstream = "/etc/gpu-node/nginx/members.conf", f"127.0.0.1:{STAND_IN_PORT}"
    site.node.ssh("cat >/run/stand_in.py", stdin=STAND_IN)
    try:
        site.node.ssh(
            "systemctl stop gpu-node-prober && systemd-run --collect --unit=stand-in python3 /run/stand_in.py"
            f" && sed -i 's/ {site.upstream(0)} / {upstream} /' {members} && nginx -s reload"
        )
        wait_until("nginx asks the stand-in", lambda: site.client.complete(1).status == 500, 20)
        yield upstream
    finally:
        site.node.ssh("gpu-node apply; systemctl stop stand-in; systemctl start gpu-node-prober; rm /run/stand_in.py")
        site.all_serve()


def test_a_500_of_one_of_two_replicas_passes_unchanged_and_the_other_is_not_asked(site: Site, stand_in: str) -> None:
    """A completion that began is never repeated, and the engine's words are not replaced by nginx's."""
    mark = site.mark()
    answers = [site.client.complete(1) for _ in range(8)]
    failed = [answer for answer in answers if answer.status == 500]
    assert failed and {answer.status for answer in answers} == {200, 500}
    assert [answer.json() for answer in failed] == [STAND_IN_ERROR] * len(failed)
    assert [row["upstream"] for row in site.rows(mark) if row["status"] == 500] == [stand_in] * len(failed)


def test_a_malformed_request_gets_json_too(site: Site) -> None:
    with socket.create_connection(("127.0.0.1", site.node.http_port), timeout=10) as connection:
        connection.sendall(b"no HTTP at all\r\n\r\n")
        answer = b"".join(iter(lambda: connection.recv(65536), b""))
    assert json.loads(answer[answer.index(b"{") :])["error"]["code"] == 400


# --- while a server is stopped for 70 seconds ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def waiting(site: Site) -> Iterator[Background]:
    """A request that was sent to a server which was stopped before it could answer."""
    server = site.server(0)
    site.signal("STOP", server)
    try:
        yield site.background("plain", 4, 0)
    finally:
        site.signal("CONT", server)
        wait_until("the prober lets it in", lambda: site.serves(0), 60)


class TestWhileAServerIsStopped:
    """The other replica serves meanwhile; the time is used for what needs no more than that."""

    @pytest.fixture(autouse=True)
    def _stopped(self, waiting: Background) -> None:
        pass

    def test_it_goes_out_and_the_other_serves(self, site: Site) -> None:
        site.wait_out(0, "prober")
        assert site.served_by(site.session(0)) == site.upstream(1)
        assert site.client.ask("/health").json() == {"status": "ok", "replicas": 1}

    @pytest.mark.parametrize("key", [None, "wrong", "", "{client}x", "x{client}", "{CLIENT}", "{engine}"])
    def test_without_the_right_key_there_is_no_answer(self, site: Site, key: str | None) -> None:
        """Nor with the engine's own: it is another secret."""
        if key is not None:
            engine = site.node.ssh("cat /etc/gpu-node/secrets/engine.env").strip().partition("=")[2]
            client = site.node.client_key
            key = key.format(client=client, CLIENT=client.swapcase(), engine=engine)
        for path, body in ((CHAT, completion(1)), ("/v1/models", None), ("/v1/no-such-endpoint", None)):
            answer = Client(site.node.http_port, key).ask(path, body)
            assert answer.status == 401
            assert answer.headers["content-type"] == "application/json"
            assert answer.json()["error"]["code"] == 401

    @pytest.mark.parametrize(
        "path",
        [
            "/metrics", "/invocations", "/v1/../metrics", "/v1/%2e%2e/metrics", "/v1/..%2fmetrics", "//metrics",
            "/metrics/../v1/models", "/metrics%2f..%2fv1/models", "/metrics/%2e%2e/v1/models", "/./metrics",
            "/version", "/ping", "/load", "/tokenize", "/pooling", "/score", "/rerank", "/docs", "/openapi.json",
            "/inference/v1/generate", "/v2/rerank", "/members", "/nginx", "/", "/health/", "/V1/models",
        ],
    )  # fmt: skip
    def test_nothing_but_v1_is_reachable(self, site: Site, path: str) -> None:
        for method, body in (("GET", None), ("POST", b"{}")):
            answer = site.client.ask(path, body, method=method)
            assert answer.status == 404, (method, answer)
            assert answer.json()["error"]["type"] == "balancer_error"

    def test_health_is_the_balancers_own(self, site: Site) -> None:
        """The engine's answer has no body; this one needs no key and tells how many are in."""
        assert "replicas" in Client(site.node.http_port, None).ask("/health").json()

    @pytest.mark.parametrize("mib", [1, 60])
    def test_a_large_body_reaches_the_engine(self, site: Site, mib: int) -> None:
        answer = site.client.ask(CHAT, completion(1, prompt="x" * (mib * MIB)))
        assert 400 <= answer.status < 500, answer
        error = answer.json()["error"]
        assert error["type"] != "balancer_error"
        assert answer.status != 413

    def test_a_body_beyond_the_limit_is_refused_as_json(self, site: Site) -> None:
        answer = site.client.ask(CHAT, completion(1, prompt="x" * (70 * MIB)))
        assert answer.status == 413
        assert answer.json()["error"]["message"] == "The request body is larger than 64 MiB"

    @pytest.mark.full
    def test_the_request_is_answered_when_the_server_goes_on(self, site: Site, waiting: Background) -> None:
        """No 504, and nobody else was asked: it waits as long as a very long prompt would."""
        mark = site.mark()
        server = site.server(0)
        wait_until("70 s are over", lambda: time.time() - waiting.outcome.started >= STOPPED_S, STOPPED_S)
        assert waiting.running
        site.signal("CONT", server)
        outcome: Outcome = waiting.end(30)
        assert outcome.ok, outcome
        row = site.row(outcome.request_id)
        assert row in site.rows(mark)
        assert (row["upstream"], row["status"]) == (site.upstream(0), 200)
        assert float(row["first_byte_s"]) >= STOPPED_S
        wait_until("the prober lets it in", lambda: site.serves(0), 60)
        assert site.server(0) == server


# --- what the engine got, and what nobody gets -----------------------------------------------------------------------


def test_the_engine_got_the_plans_arguments(site: Site) -> None:
    """JSON arguments too, which a shell or a template on the way would have changed."""
    for index in (0, 1):
        server, release = site.server(index), site.release(index)
        argv = site.node.ssh(f"cat /proc/{server.pid}/cmdline").rstrip("\0").split("\0")
        assert argv[-len(release["command"]) + 1 :] == release["command"][1:]
        said = site.node.ssh(
            f"journalctl -q --no-pager -o cat -u {site.unit(index)} _PID={server.pid} | grep 'non-default args'"
        )
        got = ast.literal_eval(re.search(r"non-default args: (\{.*\})", said.splitlines()[-1])[1])  # type: ignore[index]
        wanted = release["engine_args"]
        assert got["speculative_config"] == wanted["speculative-config"]
        assert type(got["speculative_config"]) is dict
        for name in ("max-model-len", "max-num-seqs", "host", "shutdown-timeout"):
            assert got[name.replace("-", "_")] == wanted[name]


def test_replicas_listen_on_loopback_only(site: Site) -> None:
    for index in (0, 1):
        pids = {str(site.server(index).pid), str(site.core(index).pid)}
        listening = [
            line.split()[3]
            for line in site.node.ssh("ss -Hltnp").splitlines()
            if pids & set(re.findall(r"pid=(\d+)", line))
        ]
        assert site.upstream(index) in listening
        assert [address for address in listening if not address.startswith("127.0.0.1:")] == []


def test_no_key_is_where_others_can_read(site: Site) -> None:
    """The journal, nginx's logs, the engines' caches, process lists and world-readable files."""
    engine = site.node.ssh("cat /etc/gpu-node/secrets/engine.env").strip().partition("=")[2]
    keys = f"{engine}\n{site.node.client_key}\n"
    # The patterns come through stdin, or the search would find itself.
    search = "cat > /run/patterns && chmod 600 /run/patterns"
    site.node.ssh(f"umask 077; {search}", stdin=keys)
    places = {
        "found where it belongs": "grep -lFf /run/patterns /etc/gpu-node/secrets/engine.env",
        "journal": "journalctl --no-pager -a -o export | grep -aFf /run/patterns | head -c 300",
        "nginx logs": "grep -lFf /run/patterns /var/log/nginx/*",
        "engine caches": f"grep -rlFf /run/patterns {STATE}/cache",
        "process list": "cat /proc/[0-9]*/cmdline | tr '\\0' ' ' | grep -aFf /run/patterns",
        "unit properties": "systemctl show '*' | grep -aFf /run/patterns",
        "world-readable files": (
            "find / -xdev \\( -path /proc -o -path /sys -o -path /var/lib/containers -o -path /usr \\) -prune -o"
            " -type f -perm -o=r -size -20M -print0 | xargs -0 grep -lFf /run/patterns"
        ),
        "run": "find /run -type f -perm -o=r -print0 | xargs -0 grep -lFf /run/patterns",
    }
    try:
        found = {name: site.node.run(command, timeout=120).stdout for name, command in places.items()}
    finally:
        site.node.ssh("rm /run/patterns")
    assert found.pop("found where it belongs") == "/etc/gpu-node/secrets/engine.env\n"
    assert {name: text for name, text in found.items() if text} == {}
