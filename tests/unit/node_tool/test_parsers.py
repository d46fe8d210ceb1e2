"""Any text in: a result or a named error out."""

import contextlib
import json
from typing import Any

import pytest
from gpu_node import config, engine, errors, journal, nginx, prober, proc, tool
from gpu_node.config import parse_node
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.node_tool.fakes import TCP_HEAD, node_value

METRICS = """# HELP vllm:num_requests_running Number of requests
vllm:num_requests_running{engine="0",model_name="ti}ny"} 2.0
vllm:num_requests_running{engine="1",model_name="tiny"} 1.0
vllm:num_requests_waiting{engine="0"} 4.0
vllm:num_requests_waiting_by_reason{reason="capacity"} 9.0
vllm:generation_tokens_total{engine="0"} 1.5e3
vllm:prompt_tokens_total{engine="0"} 70 1700000000
vllm:kv_cache_usage_perc{engine="0"} 0.25
"""
# json that is near a configuration: the known names with any value
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from([*node_value(), "index"]), inner, max_size=5)
    ),
    max_leaves=10,
)


def test_metrics() -> None:
    assert engine.parse_metrics(METRICS) == engine.Metrics(3, 4, 1500, 70, 0.25)


@pytest.mark.parametrize("spoilt", ["NaN", "+Inf", "two", ""])
def test_metrics_without_a_number(spoilt: str) -> None:
    with pytest.raises(errors.ParseError, match="generation_tokens_total"):
        engine.parse_metrics(METRICS.replace("1.5e3", spoilt))


@given(st.text() | st.text(alphabet="vllm:num_requests_running{}= 0.1eE+-\n\"'").map(lambda text: METRICS + text))
def test_any_metrics(text: str) -> None:
    with contextlib.suppress(errors.ParseError):
        engine.parse_metrics(text)


def test_tcp_table() -> None:
    v4 = "   0: 0100007F:1F40 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 4711 1\n"
    v6 = "   1: 00000000000000000000000001000000:1F90 0000000000000000FFFF00000100007F:0016 01 0:0 0:0 0 0 0 8 1\n"
    first, second = proc.parse_tcp_table(TCP_HEAD + v4 + v6)
    assert (str(first.local), first.local_port, first.state, first.inode) == ("127.0.0.1", 8000, proc.LISTEN, 4711)
    assert (str(second.local), str(second.remote), second.remote_port) == ("::1", "::ffff:7f00:1", 22)
    assert first.loopback and second.loopback


@given(st.text() | st.text(alphabet="0123456789ABCDEF: \n").map(lambda text: TCP_HEAD + text))
def test_any_tcp_table(text: str) -> None:
    with contextlib.suppress(errors.ParseError):
        proc.parse_tcp_table(text)


def test_tcp_error_names_the_line() -> None:
    with pytest.raises(errors.ParseError, match="line 2"):
        proc.parse_tcp_table(TCP_HEAD + "0: XX 00 0A\n")


def test_journal() -> None:
    text = "\n".join([
        json.dumps({"MESSAGE": "Started vLLM replica 0", "_PID": "1"}),
        json.dumps({"MESSAGE": "ab" * 32, "_PID": "7"}),
        json.dumps({"MESSAGE": "replica 0: loading", "_PID": "7"}),
        json.dumps({"MESSAGE": [104, 105, 255], "_PID": "9"}),
        json.dumps({"MESSAGE": "weights", "_PID": "9"}),
        '{"MESSAGE": "cut o',
    ])  # fmt: skip
    assert journal.engine_lines(journal.parse_journal(text), 0, 5) == ["hi\ufffd", "weights"]


def test_the_last_words_are_of_the_last_start() -> None:
    said = [
        "old engine",
        "replica 0: starting release 0123456789ab (m, image 0)",
        "new engine",
    ]
    entries = [journal.Entry(7, text) for text in said]
    assert journal.engine_lines(entries, 0, 5) == ["new engine"]
    assert journal.engine_lines(entries[:1], 0, 5) == ["old engine"]


@given(st.text() | VALUES.map(json.dumps) | VALUES.map(lambda value: json.dumps({"MESSAGE": value, "_PID": value})))
def test_any_journal(text: str) -> None:
    journal.engine_lines(journal.parse_journal(text), 0, 3)


@given(
    st.text()
    | VALUES.map(json.dumps)
    | VALUES.map(lambda v: json.dumps({"failures": v, "progress": v, "moved_at": v, "proofs": v}))
)
def test_any_probe_memory(text: str) -> None:
    prober.parse_memory(text)


def test_a_probe_memory_of_an_earlier_version_has_no_proofs() -> None:
    found = prober.parse_memory('{"failures": 1, "progress": [1, 2, 0.5], "moved_at": 3.0}')
    assert found == prober.Memory(1, (1, 2, 0.5), 3.0, 0, 0)


@given(st.text())
def test_any_unit_state(text: str) -> None:
    assert tool.parse_unit_state(text).word


@given(st.text())
def test_any_members_conf(text: str) -> None:
    assert nginx.parse_generation(text) is None or text


@given(st.lists(st.binary(max_size=20), max_size=5))
def test_any_event_stream(lines: list[bytes]) -> None:
    with contextlib.suppress(errors.EngineError):
        list(engine.parse_events([b"data: " + line for line in lines]))


def test_node() -> None:
    node = parse_node(node_value(), "node.json")
    assert node.replica(1).port == 8001 and node.prober.stall_s == 30
    with pytest.raises(errors.ConfigError, match="no replica 7: this node has 0, 1"):
        node.replica(7)


def changed(path: list[Any], value: Any) -> Any:
    result = node_value()
    inner: Any = result
    for name in path[:-1]:
        inner = inner[name]
    inner[path[-1]] = value
    return result


@pytest.mark.parametrize(
    ("path", "value", "names"),
    [
        (["replicas"], [], "'replicas' is empty"),
        (["replicas", 0, "port"], "8000", "'port': expected a port from 1 to 65535, found \"8000\""),
        (["replicas", 0, "port"], True, "'port'.*found true"),
        (["replicas", 0, "port"], 8001, "port 8001 is given twice"),
        (["replicas", 0, "index"], 1, "index 1 is given twice"),
        (["replicas", 0, "index"], -1, "'index'"),
        (["replicas", 0, "unit"], " ", "'unit'"),
        (["balancer", "status_port"], 8080, "port 8080 is given twice"),
        (["balancer", "listen"], [], "'listen' is empty"),
        (["balancer", "listen"], [1], "a list of texts"),
        (["balancer", "listen"], ["127.0.0.1"], "has no port"),
        (["balancer"], None, "expected an object, found null"),
        (["start_timeout_s"], 0, "at least 1"),
        (["prober", "http_failures"], 0, "a count from 1"),
    ],
)
def test_node_refuses(path: list[Any], value: Any, names: str) -> None:
    with pytest.raises(errors.ConfigError, match=f"node.json.*{names}|{names}"):
        parse_node(changed(path, value), "node.json")


@given(VALUES, st.sampled_from([[name] for name in node_value()] + [["balancer", "listen"], ["replicas", 0, "port"]]))
def test_any_node(value: Any, path: list[Any]) -> None:
    for candidate in (value, changed(path, value)):
        with contextlib.suppress(errors.ConfigError):
            parse_node(candidate, "node.json")


@given(st.text(alphabet="0123456789.:[]*abc", max_size=20))
def test_any_listen(text: str) -> None:
    with contextlib.suppress(errors.ConfigError):
        config.endpoint(text)
        config.is_loopback(text)


@pytest.mark.parametrize(
    ("listen", "loopback"),
    [("127.0.0.1:80", True), ("[::1]:80", True), ("localhost:80", True), ("0.0.0.0:80", False), ("80", False),
     ("*:80", False), ("[::]:80", False), ("10.1.2.3:80", False)],
)  # fmt: skip
def test_loopback(listen: str, loopback: bool) -> None:
    assert config.is_loopback(listen) is loopback
