"""The files that nginx includes: keys go through unchanged or are refused."""

import json
import re

import pytest
from gpu_node import config, nginx
from gpu_node.errors import ConfigError
from gpu_node.nginx import pcre_literal, render_members, render_secrets
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.node_tool.fakes import CLIENT_KEY, ENGINE_KEY, World, node_value

REPLICAS = config.parse_node(node_value(), "node.json").replicas
KEYS = st.text(alphabet=[chr(code) for code in range(0x21, 0x7F)], min_size=1, max_size=40)


def as_nginx_reads(quoted: str) -> str:
    """What nginx's configuration parser makes of the inside of a double-quoted parameter."""
    assert '"' not in re.sub(r"\\.", "", quoted)
    return re.sub(r'\\(["\'\\])', r"\1", quoted)


@given(KEYS, KEYS)
def test_key_matches_itself_only(key: str, other: str) -> None:
    pattern = as_nginx_reads(f"^(?i:Bearer) {pcre_literal(key)}$")
    assert re.search(pattern, f"Bearer {key}") and re.search(pattern, f"bearer {key}")
    assert bool(re.search(pattern, f"Bearer {other}")) == (key == other)
    assert not re.search(pattern, f"Bearer {key}x") and not re.search(pattern, f"xBearer {key}")
    if key.swapcase() != key:
        assert not re.search(pattern, f"Bearer {key.swapcase()}")


@given(KEYS)
def test_one_client_is_one_line(key: str) -> None:
    text = render_secrets([config.Client("demo", key)], "engine")
    assert len([line for line in text.splitlines() if line.endswith('"demo";')]) == 1


def test_secrets_without_clients() -> None:
    text = render_secrets([], "engine")
    assert 'default "local";' in text and 'default "Bearer engine";' in text


def test_members() -> None:
    text = render_members(REPLICAS, {1}, "secrets", 17)
    assert text.count("server 127.0.0.1:8000 max_fails=0;") == 2
    assert text.count("server 127.0.0.1:8001 max_fails=0 down;") == 2
    assert "hash $gpu_node_affinity consistent;" in text and "least_conn;" in text
    assert re.search(r'\$gpu_node_members \{\s*default "1";', text)
    assert nginx.parse_generation(text) == 17
    assert render_members(REPLICAS, {1}, "other secrets", 17) != text


@pytest.mark.parametrize(
    "clients",
    [
        {},
        ["demo"],
        [{"name": "demo"}],
        [{"name": "", "key": "k"}],
        [{"name": 'a"b', "key": "k"}],
        [{"name": "demo", "key": ""}],
        [{"name": "demo", "key": "SECRET with space"}],
        [{"name": "demo", "key": "SECRET\n"}],
        [{"name": "demo", "key": "SECRETé"}],
        [{"name": "demo", "key": "SECRET" * 100}],
        [{"name": "one", "key": "SECRET"}, {"name": "two", "key": "SECRET"}],
    ],
)
def test_clients_refused_without_showing_the_key(world: World, clients: object) -> None:
    world.paths.clients_json.write_text(json.dumps(clients))
    with pytest.raises(ConfigError) as caught:
        config.load_clients(world.paths, ("127.0.0.1:8080",))
    assert "SECRET" not in str(caught.value) and "clients.json" in str(caught.value)


def test_no_client_key_on_an_open_port(world: World) -> None:
    world.paths.clients_json.write_text("[]")
    assert config.load_clients(world.paths, ("127.0.0.1:8080", "[::1]:8080")) == []
    with pytest.raises(ConfigError, match=r"listens on 0.0.0.0:8080: add a client key"):
        config.load_clients(world.paths, ("127.0.0.1:8080", "0.0.0.0:8080"))


@pytest.mark.parametrize(
    "text", ["", "VLLM_API_KEY=\n", "VLLM_API_KEY=SECRET$x\n", 'VLLM_API_KEY="SECRET"\n', "SECRET\n"]
)
def test_engine_key_refused_without_showing_it(world: World, text: str) -> None:
    world.paths.engine_env.write_text(text)
    with pytest.raises(ConfigError) as caught:
        config.load_engine_key(world.paths)
    assert "SECRET" not in str(caught.value)


def test_broken_json_does_not_show_its_content(world: World) -> None:
    world.paths.clients_json.write_text(f'[{{"key": "{CLIENT_KEY}"')
    with pytest.raises(ConfigError) as caught:
        config.load_clients(world.paths, ("127.0.0.1:8080",))
    assert CLIENT_KEY not in str(caught.value) and caught.value.__cause__ is None
    assert CLIENT_KEY not in repr(config.Client("demo", CLIENT_KEY))
    assert config.load_engine_key(world.paths) == ENGINE_KEY
