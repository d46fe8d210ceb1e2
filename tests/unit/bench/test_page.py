"""The page: everything of the report is on it, nothing comes from elsewhere, and a real browser draws it."""

from __future__ import annotations

import json
import re
import shutil
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
    # the 8x node's replicas and the node itself have their loads apart
    assert checker.tags.count("svg") == (6 if report["profile"] == "8x" else 5)
    assert "prefers-color-scheme:dark" in text
    assert 'name="viewport"' in text
    assert "nan" not in re.sub(r"<title>.*?</title>", "", text).lower().replace("finance", "")


def test_what_is_invalid_comes_first_with_its_reason() -> None:
    text = drawn(eight_card_report())
    assert text.index("ended early: 512 of 896") < text.index("<h2>Figures</h2>")
    assert text.count('class="tag bad">invalid') == 3


def test_what_a_level_was_like_is_on_the_page() -> None:
    """The time to its first tokens, and what qualifies its figure."""
    text = drawn(eight_card_report())
    assert "<b>replica 1/load/code/128</b>: 37 requests were preempted" in text
    assert "<small>first token 792 ms, p99 2.02 s</small>" in text


def test_a_replicas_published_load_is_no_measure_of_the_node() -> None:
    text = drawn(eight_card_report())
    row = re.search(r'<th scope="row">128 streams</th>.*?</tr>', text)
    total = re.search(r'<th scope="row">128 streams in all</th>.*?</tr>', text)
    assert row
    assert total
    assert "4,469" in row[0]
    assert "a replica, k=7" in row[0]
    assert "4,469" not in total[0]
    plots = re.findall(r"<h3>Many streams to .*?</section>", text)
    assert [plot.count('class="ref"') for plot in plots] == [2, 0]


def test_what_the_plan_no_longer_makes_and_what_was_passed_over_are_noted() -> None:
    report = eight_card_report()
    report["node"]["notes"] = ["the inventory's plan of now makes something else than what was measured"]
    report["unusable_baselines"] = ["x.json is not JSON"]
    report["cards_note"] = "nvidia-smi ended by itself (exit code 15)"
    text = drawn(report)
    assert "<b>node</b>: the inventory's plan of now" in text.replace("&#x27;", "'")
    assert "<b>baseline</b>: x.json is not JSON" in text
    assert "<b>cards</b>: nvidia-smi ended by itself (exit code 15)" in text
    assert "a baseline cannot be used: see the notes" in text


def test_acceptance_by_position_of_some_workloads_says_which() -> None:
    report = two_card_report()
    spoken = report["targets"][0]["speculation"]
    report["targets"][0]["speculation"] = {"code": spoken["all"]}
    assert "replica 0, code</li>" in drawn(report)


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
@pytest.mark.parametrize(
    ("report", "width", "dark"),
    [(eight_card_report(), 1200, False), (eight_card_report(), 375, True), (two_card_report(), 375, False)],
)
def test_a_browser_shows_every_figure_without_being_moved(
    tmp_path: Path, report: dict[str, Any], width: int, dark: bool
) -> None:
    """Within a frame: a browser's own window is never as narrow as a phone."""
    seen = """
        const at = query => [...document.querySelectorAll(query)].filter(one => one.offsetParent);
        const end = query => Math.max(0, ...at(query).map(one => one.getBoundingClientRect().right));
        parent.postMessage([
            document.documentElement.scrollWidth, document.querySelectorAll('svg').length,
            at('.figures td.pub').length, at('.figures tr.below').length,
            end('.figures td.n b'), end('.figures td.n small'), end('.below small'),
            getComputedStyle(document.body).backgroundColor,
        ].join('|'), '*')"""
    (tmp_path / "page.html").write_text(drawn(report).replace("</body>", f"<script>{seen}</script></body>"))
    host = tmp_path / "host.html"
    host.write_text(
        "<!doctype html><script>onmessage = event => document.title = event.data</script><body style='margin:0'>"
        f"<iframe src='page.html' style='border:0;width:{width}px;height:6000px'></iframe>"
    )
    scheme = ["--force-dark-mode", "--blink-settings=preferredColorScheme=0"] if dark else []
    common = [str(CHROMIUM), "--headless=new", "--no-sandbox", "--disable-gpu", f"--window-size={width},2400", *scheme]
    common += [f"--user-data-dir={tmp_path / 'profile'}", "--virtual-time-budget=3000"]
    dom = subprocess.run(
        [*common, "--dump-dom", host.as_uri()], capture_output=True, text=True, timeout=120, check=True
    )
    found = re.search(r"<title>(.*?)</title>", dom.stdout)
    assert found, dom.stdout[-2000:]
    whole, plots, beside, below, values, labels, published, colour = found[1].split("|")
    assert int(whole) <= width
    assert int(plots) == (6 if report["profile"] == "8x" else 5)
    assert (int(beside) > 0, int(below) > 0) == ((False, True) if width == 375 else (True, False))
    assert max(float(values), float(labels), float(published)) <= width
    assert colour == ("rgb(19, 22, 25)" if dark else "rgb(247, 247, 245)")
    shot = tmp_path / "page.png"
    subprocess.run([*common, f"--screenshot={shot}", host.as_uri()], capture_output=True, timeout=120, check=True)
    assert shot.read_bytes().startswith(b"\x89PNG")
