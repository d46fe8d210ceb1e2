"""The report for people: nothing that needs them is hidden, and nothing of it is markup by accident."""

from __future__ import annotations

from html.parser import HTMLParser
from typing import Any

from ansible_collections.serving.gpu_node.plugins.module_utils.acceptance_report import (
    failures,
    report_lines,
    report_page,
    requested_replicas,
)


def check(verdict: str, what: str, **more: Any) -> dict[str, Any]:
    row = {"id": what, "part": "Engine", "target": "replica 0", "what": what, "verdict": verdict, "seen": f"saw {what}"}
    return {**row, "wanted": "more", "why": "", "remedy": "do it", "applies": True, "seconds": 1.0, **more}


REPORT: dict[str, Any] = {
    "node": "gpu-node",
    "level": "standard",
    "profile": "8x",
    "model": "m",
    "began": "2026-12-01T08:00:00Z",
    "seconds": 61.0,
    "result": "fail",
    "counts": {"pass": 1, "warn": 1, "fail": 1, "not run": 2, "open": 1},
    "releases": {"0": "0123456789ab"},
    "versions": {"vLLM": "0.33.0"},
    "checks": [
        check("pass", "fine"),
        check("warn", "warm", part="Cards"),
        check("not run", "open", seen="", why="the cards are busy"),
        check("not run", "nothing", seen="", why="no GPUs", applies=False),
        check("fail", "broken", seen="<script>alert(1)</script>"),
    ],
}


def test_the_table_has_every_check_and_then_what_to_do() -> None:
    lines = report_lines(REPORT)
    assert lines[0] == "gpu-node, level standard: Failed (1 pass, 1 warn, 1 fail, 2 not run) in 61 s"
    assert len(lines) == 1 + 5 + 3
    assert lines[6].startswith("FAIL replica 0, broken") and lines[6].endswith("; wanted: more; do it")
    assert [line.split()[0] for line in lines[6:]] == ["FAIL", "NOT", "WARN"]


def test_what_the_play_fails_for() -> None:
    assert failures(REPORT, False) == ["replica 0, broken: <script>alert(1)</script> (wanted: more). Do it"]
    assert failures(REPORT, True)[1] == "replica 0, open: the cards are busy (wanted: more). Do it"
    assert len(failures(REPORT, True)) == 2


class Page(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.outside: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.outside += [str(value) for name, value in attrs if name in ("src", "href")]


def test_the_page_is_whole_by_itself() -> None:
    text = report_page(REPORT)
    page = Page()
    page.feed(text)
    assert page.outside == []
    assert "script" not in page.tags
    assert "&lt;script&gt;" in text
    assert page.tags.count("table") == 2
    assert page.tags.count("tr") == 2 + 5
    assert page.tags.count("li") == 3
    assert "prefers-color-scheme: dark" in text and "width=device-width" in text


def test_only_what_is_needed_is_asked_with() -> None:
    replica = {"index": 0, "unit": "u", "port": 1, "gpus": [], "engine_args": {}, "env": {"TOKEN": "x"}}
    assert requested_replicas([replica]) == [{"index": 0, "unit": "u", "port": 1, "gpus": [], "engine_args": {}}]
