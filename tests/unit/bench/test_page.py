"""The page: everything of the report is on it, nothing comes from elsewhere, and a real browser draws it."""

from __future__ import annotations

import json
import re
import shutil
import struct
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from gpu_node_bench import baselines, charts, cli, references
from gpu_node_bench.charts import Mark, Series
from gpu_node_bench.page import page

from tests.unit.bench.reports import eight_card_report, two_card_report

VOID = {"meta", "br"}
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


class Checker(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [value or "" for name, value in attrs if name in ("src", "href", "srcset", "action")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)


def drawn(report: dict[str, Any]) -> str:
    return page(report, references.load(report["profile"]))


@pytest.mark.parametrize("report", [two_card_report(), eight_card_report()])
def test_the_page_is_whole_and_takes_nothing_from_elsewhere(report: dict[str, Any]) -> None:
    text = drawn(report)
    checker = Checker()
    checker.feed(text)
    assert checker.open == []
    assert "script" not in checker.tags
    assert "link" not in checker.tags
    assert all(link.startswith("#") for link in checker.links)
    assert "url(" not in text
    assert "@import" not in text
    assert checker.tags.count("svg") == 5
    assert "prefers-color-scheme:dark" in text
    assert 'name="viewport"' in text
    assert "nan" not in re.sub(r"<title>.*?</title>", "", text).lower().replace("finance", "")


def test_what_is_invalid_comes_first_with_its_reason() -> None:
    text = drawn(eight_card_report())
    assert text.index("ended early: 512 of 896") < text.index("<h2>Figures</h2>")
    assert text.count('class="tag bad">invalid') == 2
    assert "unsteady, spread 31%" in text


def test_a_plot_without_a_number_says_so() -> None:
    report = two_card_report()
    for one in report["figures"]:
        if one["kind"] == "decode":
            one.update(value=None, spread=None, runs=[], invalid="no usage")
    assert drawn(report).count("no figure has a number") == 1


def test_published_figures_come_with_their_sources() -> None:
    text = drawn(two_card_report())
    assert '<a href="#source-1">[1]</a>' in text
    assert 'id="source-1"' in text
    assert "localmaxxing, run cmsb828qn0061qd01l1fsm6pa" in text
    assert "predecessor" in text


def test_the_baseline_is_compared(tmp_path: Path) -> None:
    old, new = two_card_report(1.2), two_card_report()
    (tmp_path / "old.json").write_text(json.dumps(old))
    new["comparison"] = baselines.comparison(new, tmp_path / "old.json")
    text = drawn(new)
    assert re.search(r"\d+ worse than the baseline of these releases", text)
    assert '<small class="bad">-16.7% to baseline</small>' in text


def test_texts_of_the_node_cannot_become_markup() -> None:
    report = two_card_report()
    report["name"] = report["targets"][0]["notes"][0] = '<img src=x onerror="1">'
    assert "<img" not in drawn(report)


def test_a_node_without_cards() -> None:
    report = two_card_report()
    report.update(cards=[], cards_note="there is no nvidia-smi here", node={})
    text = drawn(report)
    assert "cards not measured: there is no nvidia-smi here" in text


def test_points_are_where_they_belong() -> None:
    text = charts.lines(
        [Series("a", ((1, 0.0), (8, 50.0), (32, None), (64, 100.0)))], [Mark(64, 25.0, "published")],
        label="x", x_title="x", y_title="y", places=[1, 8, 32, 64],
    )  # fmt: skip
    ys = [float(found) for found in re.findall(r'<circle[^>]* cy="([0-9.]+)"', text)]
    top, bottom = ys[2], ys[0]
    assert ys[1] == pytest.approx((top + bottom) / 2, abs=0.1)
    (mark,) = re.findall(r'class="ref" x1="[0-9.]+" x2="[0-9.]+" y1="([0-9.]+)"', text)
    assert float(mark) == pytest.approx(bottom + (top - bottom) / 4, abs=0.1)


@pytest.mark.parametrize(
    ("top", "wanted"),
    [(0, [0, 1]), (1, [0, 0.25, 0.5, 0.75, 1]), (276, [0, 100, 200, 300]), (8473, [0, 2500, 5000, 7500, 10000])],
)
def test_axes_have_round_values(top: float, wanted: list[float]) -> None:
    assert charts.ticks(top) == pytest.approx(wanted)


def test_the_command_line_makes_a_page(tmp_path: Path) -> None:
    (tmp_path / "report.json").write_text(json.dumps(two_card_report()))
    out = tmp_path / "deep/page.html"
    assert cli.main(["page", str(tmp_path / "report.json"), "--out", str(out)]) == 0
    assert out.read_text().startswith("<!doctype html>")


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium on this machine: the page is not drawn by a browser")
@pytest.mark.parametrize(("width", "dark"), [(1200, False), (500, True)])
def test_a_browser_draws_it_without_being_wider_than_the_screen(tmp_path: Path, width: int, dark: bool) -> None:
    path = tmp_path / "page.html"
    measured = (
        "<script>document.title=[document.documentElement.scrollWidth,document.querySelectorAll('svg').length,"
        "getComputedStyle(document.body).backgroundColor].join('|')</script></body>"
    )
    path.write_text(drawn(eight_card_report()).replace("</body>", measured))
    scheme = ["--force-dark-mode", "--blink-settings=preferredColorScheme=0"] if dark else []
    common = [
        str(CHROMIUM),
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        f"--user-data-dir={tmp_path / 'profile'}",
    ]
    common += [f"--window-size={width},2400", *scheme]
    dom = subprocess.run(
        [*common, "--dump-dom", path.as_uri()], capture_output=True, text=True, timeout=120, check=True
    )
    found = re.search(r"<title>(\d+)\|(\d+)\|(.*?)</title>", dom.stdout)
    assert found
    assert int(found[1]) <= width
    assert int(found[2]) == 5
    assert found[3] == ("rgb(19, 22, 25)" if dark else "rgb(247, 247, 245)")
    shot = tmp_path / "page.png"
    subprocess.run([*common, f"--screenshot={shot}", path.as_uri()], capture_output=True, timeout=120, check=True)
    assert struct.unpack(">I", shot.read_bytes()[16:20])[0] == width
