#!/usr/bin/env python3
"""What the balancer costs: nginx as the role renders it, against no balancer and against HAProxy, in one run.

    python bench/balancer.py                      a paced backend without cost, on a bare node of its own
    python bench/balancer.py --engines            the demo node's real engines and its running nginx

`--candidate FILE` measures another nginx.conf.j2 beside the present one. Every number is a comparison within a round:
the paths take turns, a few seconds each, so that whatever else the machine does meets all of them alike.
"""

from __future__ import annotations

import argparse
import io
import json
import re
import statistics
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import jinja2
import yaml

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "roles/node_tool/files"), str(ROOT / "tests/host")]

from gpu_node.config import Client, ReplicaConfig  # noqa: E402
from gpu_node.nginx import render_members, render_secrets  # noqa: E402
from nodes import Node, NodeError, call_testhost  # noqa: E402
from testhost import client  # noqa: E402

ROLE = ROOT / "roles/balancer"
# not below /run, where nothing may be executed
FOLDER = "/var/tmp/gpu-node-bench"
# the bench's own node, and the demo's
NODE, SSH_PORT = "gpu-node-bench", 2290
# What else runs on this machine shall not decide: the bench needs little, but needs it at once. Others have 1024.
CPU_WEIGHT = 100_000
DEMO, DEMO_SSH_PORT = "gpu-node", 2222
BACKEND_PORTS = (18000, 18001)
HAPROXY_PORT = 18100
NGINX_PORTS = (18080, 18081)
CLIENT_KEY = "bench-client-key"
ENGINE_KEY = "bench-engine-key"
# The paced backend: 100 tokens/s per stream, faster than the engines this balancer is for.
FIRST_MS, INTERVAL_MS = 10.0, 10.0
PROMPT = "Say something about streams, brooks and rivers. " * 20
GOAL_ADDED_MS, GOAL_THROUGHPUT = 1.0, 0.98


class BenchError(Exception):
    """One line for the person who called."""


@dataclass(frozen=True)
class Cell:
    streams: int
    rounds: int
    window_s: float
    request_s: float


@dataclass
class Job:
    """What load.py reads."""

    model: str
    tokens: int
    # of a whole answer, at least
    chunks: int
    cells: list[Cell]
    paths: list[dict[str, Any]]
    services: list[dict[str, Any]]
    watch: dict[str, str]
    warm_s: float
    limit_s: int
    prompt: str = PROMPT


@dataclass
class Setup:
    """A job and the files it needs on the node, below FOLDER."""

    job: Job
    files: dict[str, bytes] = field(default_factory=dict)


# --- configurations ------------------------------------------------------------------------------------------


def render_nginx(template: Path, port: int, status_port: int, folder: str) -> str:
    """The role's own template with the role's own variables; only ports and paths are the bench's."""
    environment = jinja2.Environment(trim_blocks=True, keep_trailing_newline=True, undefined=jinja2.StrictUndefined)
    variables: dict[str, Any] = {
        "ansible_managed": "bench",
        "serving_plan_result": {"balancer": {"address": "127.0.0.1", "port": port, "status_port": status_port}},
    }
    for source in (ROLE / "defaults/main.yml", ROLE / "vars/main.yml"):
        for name, value in yaml.safe_load(source.read_text()).items():
            variables[name] = templated(value, variables, environment)
    text = environment.from_string(template.read_text()).render(variables)
    for pattern, path in (
        (r"/etc/gpu-node/nginx/", f"{folder}/"),
        (r"/run/nginx\.pid", f"{folder}/nginx.pid"),
        (r"/var/log/nginx/", f"{folder}/"),
    ):
        text, count = re.subn(pattern, path, text)
        if not count:
            raise BenchError(f"{template} does not mention {pattern}: the bench's copy would write over the node's own")
    return text


def templated(value: Any, variables: dict[str, Any], environment: jinja2.Environment) -> Any:
    if isinstance(value, str):
        return environment.from_string(value).render(variables)
    if isinstance(value, dict):
        return {key: templated(inner, variables, environment) for key, inner in value.items()}
    return value


def haproxy_conf(ports: Sequence[int], client_key: str, engine_key: str) -> str:
    """The peer does the same work: checks the client's key, puts the engine's in, adds the ids, logs every request."""
    servers = "\n".join(f"    server replica{index} 127.0.0.1:{port}" for index, port in enumerate(ports))
    return f"""\
global
    maxconn 8192
    log stdout len 2048 format raw local0
defaults
    mode http
    log global
    option httplog
    option http-no-delay
    option redispatch
    retries 1
    timeout connect 5s
    timeout client 1h
    timeout server 1h
    timeout http-request 60s
    timeout http-keep-alive 75s
frontend clients
    bind 127.0.0.1:{HAPROXY_PORT}
    unique-id-format %[uuid()]
    unique-id-header X-Request-Id
    option forwardfor
    http-request deny deny_status 401 unless {{ req.hdr(Authorization) -m str "Bearer {client_key}" }}
    http-request set-header Authorization "Bearer {engine_key}"
    default_backend replicas
backend replicas
    balance leastconn
    http-reuse always
{servers}
"""


def path(name: str, ports: Sequence[int], key: str) -> dict[str, Any]:
    return {"name": name, "ports": list(ports), "key": key}


def service(name: str, port: int, argv: Sequence[str], **env: str) -> dict[str, Any]:
    return {"name": name, "port": port, "argv": list(argv), "log": f"{FOLDER}/{name}.log", "env": env}


def paced(candidates: Sequence[Path], brief: bool) -> Setup:
    """A backend that costs nothing, the role's nginx, HAProxy; and a candidate's nginx."""
    tokens = 16
    request_s = (FIRST_MS + (tokens - 1) * INTERVAL_MS) / 1000
    rounds = 3 if brief else 10
    job = Job(
        model="bench",
        tokens=tokens,
        chunks=tokens,
        cells=[Cell(streams, rounds, 3.0, request_s) for streams in (1, 16, 64)],
        paths=[path("direct", BACKEND_PORTS, ENGINE_KEY)],
        services=[
            service(
                "backend", port, ["python3", f"{FOLDER}/sse_backend.py", str(port), str(FIRST_MS), str(INTERVAL_MS)]
            )
            for port in BACKEND_PORTS
        ],
        watch={},
        warm_s=0.3,
        limit_s=1500,
    )
    files: dict[str, bytes] = {}
    secrets = render_secrets([Client("bench", CLIENT_KEY)], ENGINE_KEY)
    replicas = [ReplicaConfig(index, port, "", "") for index, port in enumerate(BACKEND_PORTS)]
    templates = {"nginx": ROLE / "templates/nginx.conf.j2"} | {one.name.partition(".")[0]: one for one in candidates}
    for number, (name, template) in enumerate(templates.items()):
        port, status_port = (base + 100 * number for base in NGINX_PORTS)
        files[f"{name}/nginx.conf"] = render_nginx(template, port, status_port, f"{FOLDER}/{name}").encode()
        files[f"{name}/members.conf"] = render_members(replicas, set(), secrets, 1).encode()
        files[f"{name}/secrets.conf"] = secrets.encode()
        job.services.append(service(name, port, ["nginx", "-c", f"{FOLDER}/{name}/nginx.conf", "-g", "daemon off;"]))
        job.paths.append(path(name, [port], CLIENT_KEY))
    files["haproxy.cfg"] = haproxy_conf(BACKEND_PORTS, CLIENT_KEY, ENGINE_KEY).encode()
    job.services.append(service("haproxy", HAPROXY_PORT, ["haproxy", "-db", "-f", f"{FOLDER}/haproxy.cfg"]))
    job.paths.append(path("haproxy", [HAPROXY_PORT], CLIENT_KEY))
    return Setup(job, files)


def engines(demo: Node, brief: bool) -> Setup:
    """The demo node's replicas and its running nginx, as they are; HAProxy beside them for the time of the run."""
    facts = json.loads(demo.ssh("cat /etc/gpu-node/node.json"))
    ports = [replica["port"] for replica in facts["replicas"]]
    listen = int(facts["balancer"]["listen"][0].rpartition(":")[2])
    client_key = json.loads(demo.ssh("cat /etc/gpu-node/secrets/clients.json"))[0]["key"]
    engine_key = demo.ssh("cat /etc/gpu-node/secrets/engine.env").strip().partition("=")[2]
    rounds = 2 if brief else 5
    job = Job(
        model=facts["served_model_name"],
        tokens=16,
        # the tiny profile speculates: a chunk carries up to 8 tokens
        chunks=2,
        cells=[Cell(1, rounds, 5.0, 0.3), Cell(16, rounds, 10.0, 3.0)],
        paths=[
            path("direct", ports, engine_key),
            path("nginx", [listen], client_key),
            path("haproxy", [HAPROXY_PORT], client_key),
        ],
        services=[
            service(
                "haproxy",
                HAPROXY_PORT,
                [f"{FOLDER}/bin/haproxy", "-db", "-f", f"{FOLDER}/haproxy.cfg"],
                LD_LIBRARY_PATH=f"{FOLDER}/bin",
            )
        ],
        watch={"nginx": "/run/nginx.pid"},
        warm_s=1.0,
        limit_s=900,
        # the tiny model reads a short question as fast as it answers
        prompt=PROMPT[:48],
    )
    return Setup(job, {"haproxy.cfg": haproxy_conf(ports, client_key, engine_key).encode()})


# --- the node ------------------------------------------------------------------------------------------------


def prepare(node: Node) -> None:
    say(f"node {NODE} with nginx and HAProxy from the distribution ...")
    call_testhost("up", NODE, "--ssh-port", str(SSH_PORT))
    subprocess.run([client(), "update", "--cpu-shares", str(CPU_WEIGHT), NODE], check=True, capture_output=True)
    node.ssh(
        "command -v haproxy nginx >/dev/null || { apt-get update -qq && DEBIAN_FRONTEND=noninteractive"
        " apt-get install -y -qq --no-install-recommends nginx haproxy; }; systemctl disable -q --now nginx haproxy",
        timeout=600,
    )


def carry_haproxy(source: Node, target: Node) -> None:
    """The engines listen on their node's loopback alone, and that node's packages are not the bench's to change."""
    script = (
        "mkdir -p /tmp/haproxy && cp /usr/sbin/haproxy /tmp/haproxy/"
        " && ldd /usr/sbin/haproxy | sed -n 's/.*=> \\(.*\\) (.*/\\1/p' | grep -v -e /libc.so -e /libm.so"
        " | xargs cp -L -t /tmp/haproxy && tar -C /tmp/haproxy -c ."
    )
    archive = subprocess.run(source.ssh_argv(script), capture_output=True, check=True, timeout=60).stdout
    unpack = f"mkdir -p {FOLDER}/bin && tar -C {FOLDER}/bin -x"
    subprocess.run(target.ssh_argv(unpack), input=archive, capture_output=True, check=True, timeout=60)


def send_files(node: Node, files: dict[str, bytes]) -> None:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size, member.mode, member.mtime = len(content), 0o600, int(time.time())
            archive.addfile(member, io.BytesIO(content))
    script = f"umask 077; mkdir -p {FOLDER} && tar -C {FOLDER} -x --no-same-owner"
    subprocess.run(node.ssh_argv(script), input=buffer.getvalue(), capture_output=True, check=True, timeout=60)


def run_job(node: Node, setup: Setup) -> list[dict[str, Any]]:
    job = setup.job
    scripts = {name: (ROOT / "bench" / name).read_bytes() for name in ("load.py", "sse_backend.py")}
    send_files(node, {**setup.files, **scripts})
    total = sum(cell.rounds for cell in job.cells) * len(job.paths)
    process = subprocess.Popen(
        node.ssh_argv(f"python3 {FOLDER}/load.py"), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdin and process.stdout
    process.stdin.write(json.dumps(asdict(job)))
    process.stdin.close()
    results = []
    for line in process.stdout:
        result = json.loads(line)
        results.append(result)
        say(
            f"  {len(results)}/{total} streams={result['streams']} round={result['round']} {result['path']}:"
            f" {result['events_per_s']:.0f} chunks/s, first {1000 * statistics.median(result['first_s']):.2f} ms,"
            f" load {result['load']:.1f}"
        )
    if process.wait() != 0:
        raise BenchError(f"the run on {node.container} ended with {process.returncode}: its message is above")
    return results


# --- results -------------------------------------------------------------------------------------------------


def quantile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def summarize(results: list[dict[str, Any]], streams: int, name: str) -> dict[str, Any]:
    """One path in one cell, compared with `direct` round by round; the median of the rounds stands for the cell."""
    mine = [result for result in results if (result["streams"], result["path"]) == (streams, name)]
    direct = [result for result in results if (result["streams"], result["path"]) == (streams, "direct")]
    first = [value for result in mine for value in result["first_s"]]
    direct_first = [value for result in direct for value in result["first_s"]]

    def paired(value: Callable[[dict[str, Any]], float], compare: Callable[[float, float], float]) -> list[float]:
        return [compare(value(one), value(base)) for one, base in zip(mine, direct, strict=True)]

    added = paired(lambda result: 1000 * statistics.median(result["first_s"]), lambda one, base: one - base)
    tokens = paired(lambda result: float(result["events_per_s"]), lambda one, base: one / base)
    requests = paired(lambda result: float(result["requests_per_s"]), lambda one, base: one / base)
    events = sum(result["events"] for result in mine)
    cpu = sum(result["cpu_s"].get(name, 0.0) for result in mine)
    window = sum(result["window_s"] for result in mine)
    return {
        "streams": streams,
        "path": name,
        "requests_timed": len(first),
        "first_ms": {"p50": 1000 * quantile(first, 0.5), "p99": 1000 * quantile(first, 0.99)},
        "added_ms": {
            "p50": statistics.median(added),
            "p50_quartiles": [quantile(added, 0.25), quantile(added, 0.75)],
            "p99": 1000 * (quantile(first, 0.99) - quantile(direct_first, 0.99)),
        },
        "events_per_s": events / window,
        "requests_per_s": statistics.median(result["requests_per_s"] for result in mine),
        "events_ratio": statistics.median(tokens),
        "requests_ratio": statistics.median(requests),
        "cpu_us_per_event": 1e6 * cpu / events if cpu else None,
        "client_cpu_share": sum(result["cpu_s"]["client"] for result in mine) / window,
    }


def conditions(results: list[dict[str, Any]], services: Sequence[str]) -> dict[str, float]:
    """How busy the machine was, and how much of that was not the bench's."""
    loads = [result["load"] for result in results]
    window = sum(result["window_s"] for result in results)
    ours = sum(sum(result["cpu_s"].get(name, 0.0) for name in ("client", *services)) for result in results)
    return {
        "load_median": statistics.median(loads),
        "load_min": min(loads),
        "load_max": max(loads),
        "others_cpus": (sum(result["cpu_s"]["machine"] for result in results) - ours) / window,
        "client_cpu_share_max": max(result["cpu_s"]["client"] / result["window_s"] for result in results),
    }


def table(rows: Sequence[dict[str, Any]]) -> str:
    lines = [
        "| streams | path | TTFT p50 ms | added p50 ms (quartiles) | TTFT p99 ms | added p99 ms | chunks/s | of direct"
        " | requests/s | of direct | proxy CPU µs/chunk | client CPU |",
        "|--:|:--|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for row in rows:
        added, direct = row["added_ms"], row["path"] == "direct"
        low, high = added["p50_quartiles"]
        cells = [
            f"{row['streams']}",
            row["path"],
            f"{row['first_ms']['p50']:.2f}",
            "" if direct else f"{added['p50']:+.2f} ({low:+.2f} to {high:+.2f})",
            f"{row['first_ms']['p99']:.2f}",
            "" if direct else f"{added['p99']:+.2f}",
            f"{row['events_per_s']:.0f}",
            "" if direct else f"{row['events_ratio']:.3f}",
            f"{row['requests_per_s']:.1f}",
            "" if direct else f"{row['requests_ratio']:.3f}",
            f"{row['cpu_us_per_event']:.0f}" if row["cpu_us_per_event"] else "",
            f"{100 * row['client_cpu_share']:.0f} %",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def verdicts(rows: Sequence[dict[str, Any]]) -> list[str]:
    by_name = {(row["streams"], row["path"]): row for row in rows}
    lines = []
    for (streams, name), row in by_name.items():
        if name in ("direct", "haproxy"):
            continue
        # every request has the same number of tokens, so this is the tokens' ratio too; speculation varies the chunks
        added, ratio = row["added_ms"]["p50"], row["requests_ratio"]
        peer = by_name[streams, "haproxy"]
        lines.append(
            f"{name}, {streams} streams: p50 {added:+.2f} ms (goal {GOAL_ADDED_MS:+.2f}:"
            f" {'met' if added <= GOAL_ADDED_MS else 'MISSED'}), throughput {ratio:.3f} of direct"
            f" (goal {GOAL_THROUGHPUT}: {'met' if ratio >= GOAL_THROUGHPUT else 'MISSED'}),"
            f" against HAProxy {added - peer['added_ms']['p50']:+.2f} ms and {ratio / peer['requests_ratio']:.3f}"
        )
    return lines


def say(text: str) -> None:
    print(f"bench: {text}", file=sys.stderr, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", action="store_true", help="the demo node's real engines (make demo)")
    parser.add_argument(
        "--candidate",
        type=Path,
        action="append",
        default=[],
        metavar="FILE",
        help="another nginx.conf.j2 beside the role's, several times for several",
    )
    parser.add_argument("--brief", action="store_true", help="few rounds: does it work, not how fast is it")
    parser.add_argument("--keep", action="store_true", help="leave the bench's node for the next run")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write summary and every round there")
    options = parser.parse_args()
    if options.engines and options.candidate:
        parser.error("--candidate needs the bench's own node: the demo node's nginx stays as it is")
    try:
        report = bench(options)
    except (BenchError, NodeError, OSError, subprocess.SubprocessError) as err:
        print(f"bench: error: {err}", file=sys.stderr)
        return 1
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n")
    return 0


def bench(options: argparse.Namespace) -> dict[str, Any]:
    # nothing but SSH is published: the load runs on the node
    source = Node(NODE, SSH_PORT, 0)
    target = Node(DEMO, DEMO_SSH_PORT, 0) if options.engines else source
    try:
        prepare(source)
        if options.engines:
            carry_haproxy(source, target)
        setup = engines(target, options.brief) if options.engines else paced(options.candidate, options.brief)
        results = run_job(target, setup)
    finally:
        if options.engines:
            target.run(f"rm -rf {FOLDER}")
        if not options.keep:
            source.down()
    job = setup.job
    rows = [summarize(results, cell.streams, one["name"]) for cell in job.cells for one in job.paths]
    around = conditions(results, sorted({one["name"] for one in job.services} | set(job.watch)))
    print(table(rows))
    print()
    print("\n".join(f"- {line}" for line in verdicts(rows)))
    others = "others, the engines among them" if options.engines else "others"
    print(
        f"- load average {around['load_median']:.1f} ({around['load_min']:.1f} to {around['load_max']:.1f}) on the"
        f" machine, {around['others_cpus']:.2f} CPUs used by {others};"
        f" the load generator used at most {100 * around['client_cpu_share_max']:.0f} % of one CPU"
    )
    return {"summary": rows, "conditions": around, "rounds": results}


if __name__ == "__main__":
    sys.exit(main())
