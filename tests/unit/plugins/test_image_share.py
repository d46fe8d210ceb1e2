"""Which node makes an image, and who takes it."""

from __future__ import annotations

from typing import Any

import pytest
from ansible_collections.serving.gpu_node.plugins.module_utils.image_share import maker, takers


def seat(host: str, **more: Any) -> dict[str, Any]:
    return {"host": host, "site": "default", "ref": "image:1", "present": False, "archive": False, **more}


def test_the_first_of_a_batch_makes_it_for_all() -> None:
    seats = [seat("c"), seat("a"), seat("b")]
    assert [maker(seats, host, ["a", "b", "c"]) for host in "abc"] == ["a", "a", "a"]


def test_a_node_that_has_it_gives_it_and_asks_nobody() -> None:
    seats = [seat("a"), seat("b", present=True), seat("c")]
    assert [maker(seats, host, ["a", "b", "c"]) for host in "abc"] == ["b", "b", "b"]


def test_of_an_earlier_batch_only_what_lies_ready_is_given() -> None:
    ready = [seat("canary", present=True, archive=True), seat("a"), seat("b")]
    assert [maker(ready, host, ["a", "b"]) for host in "ab"] == ["canary", "canary"]
    without = [seat("canary", present=True), seat("a"), seat("b")]
    assert [maker(without, host, ["a", "b"]) for host in "ab"] == ["a", "a"]


@pytest.mark.parametrize("other", [{"ref": "image:2"}, {"site": "elsewhere"}])
def test_other_images_and_other_sites_are_no_help(other: dict[str, Any]) -> None:
    seats = [seat("a", present=True, archive=True, **other), seat("b")]
    assert maker(seats, "b", ["a", "b"]) == "b"


def test_takers_are_those_that_lack_it() -> None:
    seats = [seat("a", present=True), seat("b"), seat("c", present=True), seat("d")]
    makers = {"a": "a", "b": "a", "c": "c", "d": "elsewhere"}
    assert takers(makers, seats, "a") == ["b"]
    assert takers(makers, seats, "c") == []
