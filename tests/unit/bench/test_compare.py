"""Two reports against each other, baselines by release, and published figures with their sources."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from gpu_node_bench import baselines, cli, compare, references
from gpu_node_bench.errors import BenchError
from gpu_node_bench.figures import invalid

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
        ("load/code/128", 0.89, "worse"),
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


def test_an_unsteady_figure_is_neither_better_nor_worse() -> None:
    old, new = two_card_report(), two_card_report(0.5)
    new["figures"][0]["unsteady"] = "3 runs differ by 40% of their mean, more than 15%"
    for one, other, why in ((old, new, "new unsteady"), (new, old, "old unsteady")):
        row = verdict(one, other, "replica 0/decode/code")
        assert (row.verdict, row.change, row.why) == ("unknown", None, why)


def test_other_methods_give_figures_of_other_things() -> None:
    old, new = two_card_report(), two_card_report()
    new["method"]["tokens_long"] = 448
    row = verdict(old, new, "replica 0/decode/code")
    assert (row.verdict, row.why) == ("unknown", "measured in different ways: tokens_long 896 and 448")


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
    assert baselines.choose(tmp_path, report["release"]) is None
    assert "kept" in baselines.keep(report, tmp_path, replace=False)
    assert "stays" in baselines.keep(later, tmp_path, replace=False)
    assert baselines.choose(tmp_path, report["release"]) == path
    found = baselines.comparison(later, path)
    assert found["same_release"]
    assert found["exit_code"] == 1
    assert found["old"]["replica 0/decode/code"] == pytest.approx(270.9)
    baselines.keep(later, tmp_path, replace=True)
    assert baselines.comparison(later, path)["exit_code"] == 0


def test_a_new_release_is_compared_with_the_one_before(tmp_path: Path) -> None:
    for release, day in (("a" * 12, "2026-11-01"), ("b" * 12, "2026-11-03"), ("c" * 12, "2026-11-02")):
        baselines.keep({**two_card_report(), "release": release, "created": f"{day}T00:00:00+00:00"}, tmp_path, False)
    found = baselines.choose(tmp_path, "d" * 12)
    assert found == tmp_path / f"{'b' * 12}.json"
    assert not baselines.comparison(two_card_report(), found)["same_release"]


def test_a_report_with_holes_is_no_baseline(tmp_path: Path) -> None:
    assert "not kept as a baseline: 2 of" in baselines.keep(eight_card_report(), tmp_path, replace=True)
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
