"""nginx's configuration: what the node's clients rely on and no engine is needed to see."""

from __future__ import annotations

from pathlib import Path

import jinja2

TEMPLATE = Path(__file__).parents[3] / "roles/balancer/templates/nginx.conf.j2"


def location(path: str) -> list[str]:
    """The directives of a location of the balancer's server."""
    text = jinja2.Template(TEMPLATE.read_text()).render(
        ansible_managed="x",
        balancer_max_body_mib=64,
        serving_plan_result={"balancer": {"status_port": 8079}},
        _balancer_listen="127.0.0.1:8080",
        _balancer_errors={503: "No replica is in service"},
    )
    body = text.split(f"location {path} {{\n")[1].split("\n        }\n")[0]
    return [line.strip() for line in body.splitlines()]


def test_a_request_that_was_sent_goes_to_no_other_replica_and_its_error_passes() -> None:
    """With `non_idempotent` or `http_500` nginx would repeat a completion that began."""
    directives = location("/v1/")
    assert [line for line in directives if line.startswith("proxy_next_upstream")] == [
        "proxy_next_upstream error;",
        "proxy_next_upstream_tries 2;",
    ]
    assert not any("intercept_errors" in line for line in directives)


def test_a_token_goes_out_when_it_comes_in() -> None:
    """Here, and by the header in an nginx or an ingress in front of the node, which buffers otherwise."""
    assert {"proxy_buffering off;", "add_header X-Accel-Buffering no always;"} <= set(location("/v1/"))
