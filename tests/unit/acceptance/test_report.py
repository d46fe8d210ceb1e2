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


def way(one: str, to: str, **more: Any) -> dict[str, Any]:
    return {"from": f"0000:{one}:00.0", "to": f"0000:{to}:00.0", "gb_s": 52.04, "correct": True, "peer": True, **more}


class Tables(HTMLParser):
    """The cells of the tables of figures, row by row."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.rows: list[list[str]] = []
        self._inside = self._cell = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "table":
            self._inside = ("class", "figures") in attrs
        elif tag == "tr" and self._inside:
            self.rows.append([])
        self._cell = self._inside and tag in ("td", "th")
        if self._cell:
            self.rows[-1].append("")

    def handle_endtag(self, tag: str) -> None:
        self._cell = False

    def handle_data(self, data: str) -> None:
        if self._cell:
            self.rows[-1][-1] += data


def test_the_ways_between_cards_are_a_table_by_address() -> None:
    rows = [
        way("01", "c1"),
        {"from": "0000:c1:00.0", "to": "0000:01:00.0", "error": "hung: nothing within 30 s"},
        way("01", "e1", peer=False, gb_s=6.0),
        way("e1", "01", correct=False),
    ]
    text = report_page({**REPORT, "data": {"pairs": rows}})
    assert Tables(text).rows == [
        ["from \\ to", "01:00.0", "c1:00.0", "e1:00.0"],
        ["01:00.0", "-", "52.0", "6.0 by host"],
        ["c1:00.0", "hung", "-", "-"],
        ["e1:00.0", "other data", "-", "-"],
    ]
    assert 'title="hung: nothing within 30 s"' in text


def test_the_sums_over_cards_are_a_table_by_size() -> None:
    small = {"bytes": 8, "us": 21.5, "bus_gb_s": 0.0, "correct": True}
    large = {"bytes": 67108864, "us": 3355.44, "bus_gb_s": 30.04, "correct": True}
    found = {
        "replica 0": {"sizes": [small, large], "error": "", "nccl": "2.31.2"},
        "replica 1": {"sizes": [{**small, "correct": False}], "error": "hung in an all-reduce", "nccl": "2.31.2"},
    }
    assert Tables(report_page({**REPORT, "data": {"all_reduce": found}})).rows == [
        ["bytes", "replica 0", "replica 1"],
        ["8", "21.5 \u00b5s, 0.0 GB/s", "wrong sum"],
        ["67,108,864", "3,355.4 \u00b5s, 30.0 GB/s", "-"],
    ]


def test_a_report_without_measurements_has_no_such_table() -> None:
    for report in (REPORT, {**REPORT, "data": {}}):
        assert Tables(report_page(report)).rows == []


def test_only_what_is_needed_is_asked_with() -> None:
    replica = {"index": 0, "unit": "u", "port": 1, "gpus": [], "engine_args": {}, "env": {"TOKEN": "x"}}
    assert requested_replicas([replica]) == [{"index": 0, "unit": "u", "port": 1, "gpus": [], "engine_args": {}}]
