"""Two reports against each other, baselines by release, and published figures with their sources."""

from __future__ import annotations

import copy
import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from gpu_node_bench import baselines, cli, compare, references
from gpu_node_bench.errors import BenchError
from gpu_node_bench.figures import KINDS, figure, invalid
from gpu_node_bench.request import Options

from tests.unit.bench.reports import eight_card_report, two_card_report


def changed(report: dict[str, Any], id_: str, factor: float) -> dict[str, Any]:
    other = copy.deepcopy(report)
    (one,) = [one for one in other["figures"] if one["id"] == id_]
    one["value"] *= factor
    return other


def verdict(old: dict[str, Any], new: dict[str, Any], id_: str) -> compare.Row:
    (row,) = [row for row in compare.compare(old, new) if row.id == id_]
    return row


@pytest.mark.parametrize(
    ("measure", "factor", "wanted"),
    [
        ("decode/code", 0.94, "same"),
        ("decode/code", 0.92, "worse"),
        ("decode/code", 1.08, "better"),
        ("first/short", 1.16, "worse"),
        ("first/short", 0.8, "better"),
        ("first/short", 1.1, "same"),
        ("repeat/211722", 1.2, "same"),
        ("acceptance", 0.94, "worse"),
        ("load/code/64", 0.89, "worse"),
    ],
)
def test_each_kind_has_its_direction_and_tolerance(measure: str, factor: float, wanted: str) -> None:
    old = two_card_report()
    new = changed(old, f"replica 0/{measure}", factor)
    assert verdict(old, new, f"replica 0/{measure}").verdict == wanted
    assert compare.exit_code(compare.compare(old, new)) == (1 if wanted == "worse" else 0)


def test_what_has_no_number_cannot_be_compared_and_is_no_success() -> None:
    old, new = two_card_report(), two_card_report()
    invalid(new["figures"][0], "ended early")
    row = verdict(old, new, "replica 0/decode/code")
    assert (row.verdict, row.change, row.why) == ("unknown", None, "new: invalid: ended early")
    assert compare.exit_code(compare.compare(old, new)) == 3
    del new["figures"][0]
    assert verdict(old, new, "replica 0/decode/code").why == "not in the new report"
    assert verdict(new, old, "replica 0/decode/code").why == "not in the old report"
    assert compare.exit_code([]) == 3


def test_other_methods_give_figures_of_other_things() -> None:
    """But only those that the method is of."""
    options = Options(tokens_long=448, level_tokens=64)
    made = {kind: figure("r", "m", kind, options)["method"] for kind in KINDS}
    old, new = two_card_report(), two_card_report()
    for one in new["figures"]:
        one["method"] = made[one["kind"]]
    for measure in ("decode/code", "acceptance", "accepted/code"):
        row = verdict(old, new, f"replica 0/{measure}")
        assert (row.verdict, row.why) == ("unknown", "measured in different ways: tokens_long 896 and 448")
    row = verdict(old, new, "replica 0/load/code/8")
    assert (row.verdict, row.why) == ("unknown", "measured in different ways: level_tokens 512 and 64")
    for id_ in ("replica 0/first/short", "replica 0/prefill/107016", "cards/memory/0000:01:00.0"):
        assert verdict(old, new, id_).verdict == "same"


def test_another_version_of_the_program_measures_something_else() -> None:
    row = verdict(two_card_report(), {**two_card_report(), "program": "2"}, "replica 0/decode/code")
    assert (row.verdict, row.why) == ("unknown", "measured by versions 1 and 2 of the program")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda one: one.pop("program"), "the report has no 'program'"),
        (lambda one: one.update(figures={}), "the report has 'figures': {}"),
        (lambda one: one["figures"].append(7), r"figures\[24\] is no object"),
        (lambda one: one["figures"][1].pop("value"), r"figures\[1\] has no 'value'"),
        (lambda one: one["figures"][1].update(value="276"), r"figures\[1\] has 'value': \"276\""),
        (lambda one: one["figures"][1].update(value=math.nan), r"figures\[1\] has 'value': nan"),
        (lambda one: one["figures"][1].update(value=None), r"figures\[1\] has a value and is invalid, or neither"),
        (lambda one: one["figures"][0].update(kind="speed"), r"figures\[0\] has 'kind': 'speed'"),
        (lambda one: one["figures"][0].pop("method"), r"figures\[0\] has no 'method'"),
        (lambda one: one["targets"][0].pop("notes"), r"targets\[0\] has no 'notes'"),
    ],
)
def test_a_broken_report_cannot_be_used_which_is_not_worse(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], change: Callable[[dict[str, Any]], object], words: str
) -> None:
    whole, broken = tmp_path / "whole.json", tmp_path / "broken.json"
    report = two_card_report()
    whole.write_text(json.dumps(report))
    change(report)
    broken.write_text(json.dumps(report))
    for pair in ((whole, broken), (broken, whole)):
        assert cli.main(["compare", *map(str, pair)]) == 2
        assert re.search(f"broken.json is no whole report: {words}", capsys.readouterr().err)
    assert cli.main(["page", str(broken), "--out", str(tmp_path / "page.html")]) == 2


def test_the_command_line_compares(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old, new = tmp_path / "old.json", tmp_path / "new.json"
    old.write_text(json.dumps(two_card_report()))
    new.write_text(json.dumps(two_card_report(0.9)))
    assert cli.main(["compare", str(old), str(old)]) == 0
    capsys.readouterr()
    assert cli.main(["compare", str(old), str(new)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split() == ["replica", "0/decode/code", "tok/s", "270.9", "243.8", "-10.0%", "7%", "WORSE"]
    loose = [f"--tolerance={kind}=0.2" for kind in compare.TOLERANCES]
    assert cli.main(["compare", str(old), str(new), *loose]) == 0
    assert cli.main(["compare", str(old), str(new), "--tolerance", "speed=1"]) == 2
    assert "expected KIND=SHARE" in capsys.readouterr().err
    (tmp_path / "x.json").write_text("{}")
    assert cli.main(["compare", str(old), str(tmp_path / "x.json")]) == 2
    assert cli.main(["compare", str(old), str(tmp_path / "gone.json")]) == 2


def test_the_first_report_of_a_release_is_its_baseline(tmp_path: Path) -> None:
    report, later = two_card_report(), two_card_report(0.9)
    path = baselines.path(tmp_path, report["release"])
    assert baselines.choose(tmp_path, report["release"]) == (None, [])
    assert "24 figures kept" in baselines.keep(report, tmp_path, replace=False)
    assert "stays" in baselines.keep(later, tmp_path, replace=False)
    assert baselines.choose(tmp_path, report["release"]) == (path, [])
    found = baselines.comparison(later, path)
    assert found["same_release"]
    assert found["exit_code"] == 1
    assert found["old"]["replica 0/decode/code"] == pytest.approx(270.9)
    baselines.keep(later, tmp_path, replace=True)
    assert baselines.comparison(later, path)["exit_code"] == 0


def test_a_new_release_is_compared_with_the_one_before(tmp_path: Path) -> None:
    for release, day in (("a" * 12, "2026-11-01"), ("b" * 12, "2026-11-03"), ("c" * 12, "2026-11-02")):
        baselines.keep({**two_card_report(), "release": release, "created": f"{day}T00:00:00+00:00"}, tmp_path, False)
    found, _ = baselines.choose(tmp_path, "d" * 12)
    assert found == tmp_path / f"{'b' * 12}.json"
    assert not baselines.comparison(two_card_report(), found)["same_release"]


def test_a_baseline_has_numbers_alone_and_takes_those_that_it_lacks(tmp_path: Path) -> None:
    """A first run of one part, or with a figure that had no number, blinds no later one."""
    report, slow = two_card_report(), two_card_report(0.1)
    whole = report["figures"]
    decode = [one for one in whole if one["kind"] == "decode"]
    holed = copy.deepcopy(decode)
    invalid(holed[2], "the runs differ by 30% of their mean")
    assert "2 figures kept" in baselines.keep({**report, "figures": holed}, tmp_path, replace=False)
    path, _ = baselines.choose(tmp_path, report["release"])
    assert path
    assert [one["measure"] for one in compare.load(path)["figures"]] == ["decode/code", "decode/prose"]
    assert "22 figures put into the baseline" in baselines.keep(report, tmp_path, replace=False)
    rows = compare.compare(compare.load(path), slow)
    assert not [row for row in rows if row.verdict == "unknown"]
    assert {row.id for row in rows if row.verdict == "worse"} >= {f"replica 0/{one['measure']}" for one in decode}
    # What is there stays, whoever comes later.
    assert "stays" in baselines.keep(slow, tmp_path, replace=False)
    assert compare.load(path)["summary"] == {"figures": 24, "invalid": 0}
    # A replacement without a number leaves the number that there was.
    invalid(slow["figures"][0], "ended early")
    baselines.keep(slow, tmp_path, replace=True)
    kept = {one["id"]: one["value"] for one in compare.load(path)["figures"]}
    assert kept["replica 0/decode/code"] == pytest.approx(270.9)
    assert kept["replica 0/decode/prose"] == pytest.approx(15.15, rel=0.01)


def test_a_report_without_a_number_is_no_baseline(tmp_path: Path) -> None:
    report = eight_card_report()
    for one in report["figures"]:
        invalid(one, "HTTP 500")
    assert "not kept as a baseline: no figure" in baselines.keep(report, tmp_path, replace=True)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(BenchError, match="letters, digits"):
        baselines.path(tmp_path, "../x")


def test_every_published_figure_has_its_source() -> None:
    two, eight = references.load("2x"), references.load("8x")
    found = {(one.measure, one.value) for one in two.figures}
    assert {
        ("decode/code", 276.0), ("decode/prose", 149.8), ("decode/math", 285.8), ("acceptance", 0.486),
        ("accepted", 2.43), ("first/short", 0.063), ("first/107016", 10.24), ("first/211722", 34.6),
        ("repeat/211722", 0.9),
        ("decode/code", 262.6), ("decode/prose", 155.0), ("decode/math", 274.9), ("acceptance", 0.499),
        ("accepted", 2.5),
    } <= found  # fmt: skip
    assert {(one.measure, one.value) for one in eight.figures} == {
        ("load/code/128", 4469.0), ("load/code/128", 1942.0), ("quality/gsm8k-200", 0.99), ("quality/humaneval", 0.97),
    }  # fmt: skip
    assert references.load("cpu").figures == ()
    assert [one.value for one in two.of("memory/0000:01:00.0")] == [96917]


def test_a_published_figure_without_a_source_is_refused() -> None:
    data = json.loads(references.SHIPPED.read_text())
    del data["sources"]["2x"]["place"]
    with pytest.raises(BenchError, match="decode/code = 276: source '2x' lacks"):
        references.parse(data, "2x", "file")


def test_a_broken_baseline_costs_nothing_but_itself(tmp_path: Path) -> None:
    report = two_card_report()
    own = baselines.path(tmp_path, report["release"])
    baselines.keep({**report, "release": "a" * 12}, tmp_path, False)
    (tmp_path / "zz.json").write_text("[]")
    own.write_text("{")
    found, troubles = baselines.choose(tmp_path, report["release"])
    assert found == tmp_path / f"{'a' * 12}.json"
    assert [Path(one.split()[0]).name for one in troubles] == [own.name, "zz.json"]
    assert "of no use until it is replaced" in baselines.keep(report, tmp_path, replace=False)
    assert own.read_text() == "{"
    assert "24 figures kept" in baselines.keep(report, tmp_path, replace=True)
    assert baselines.choose(tmp_path, report["release"]) == (own, [])


def test_a_baseline_of_another_version_stays_until_it_is_replaced(tmp_path: Path) -> None:
    report = two_card_report()
    baselines.keep({**report, "program": "0"}, tmp_path, False)
    assert "of version 0 of the program" in baselines.keep(report, tmp_path, replace=False)
    baselines.keep(report, tmp_path, replace=True)
    path, _ = baselines.choose(tmp_path, report["release"])
    assert path
    assert compare.load(path)["program"] == "1"
