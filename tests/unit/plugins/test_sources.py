"""Sources of artifacts: what an operator writes, laid over the profile's; every wrong one is named with its remedy."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from ansible_collections.serving.gpu_node.plugins.module_utils.listing import select
from ansible_collections.serving.gpu_node.plugins.module_utils.sources import (
    check_source,
    folder_source,
    lay_sources,
    recipe_problems,
    recipe_source,
    source_identity,
    source_key,
    source_words,
)
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.plugins.samples import PACK, profile

COMMIT = "0123456789abcdef0123456789abcdef01234567"
DIGEST = "0123456789abcdef" * 4
MODEL = {"type": "hub", "repository": "deepseek-ai/DeepSeek-V4.1-Flash", "revision": ""}
ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.dates() | st.binary(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


def artifacts(name: str = "8x") -> dict[str, Any]:
    own: dict[str, Any] = profile(name)["artifacts"]
    return own


def lay(given_sources: dict[Any, Any], name: str = "8x") -> dict[str, Any]:
    laid, problems = lay_sources(artifacts(name), given_sources)
    assert problems == []
    return {key: item["source"] for key, item in laid.items()}


# Laying over


def test_without_a_word_the_profile_decides() -> None:
    assert lay_sources(artifacts(), {}) == (artifacts(), [])


def test_one_field_is_changed_and_the_others_stay() -> None:
    assert lay({"model": {"revision": COMMIT}})["model"] == {**MODEL, "revision": COMMIT}
    own = {"type": "hub", "repository": "example/own", "revision": COMMIT}
    assert lay({"model": own})["model"] == own


def test_another_type_takes_nothing_over() -> None:
    assert lay({"model": {"type": "path", "path": "/srv/model"}})["model"] == {"type": "path", "path": "/srv/model"}


def test_a_source_where_the_profile_has_none() -> None:
    assert lay({"drafter": PACK}) == {"model": MODEL, "drafter": PACK, "pack": {}}


def test_the_name_of_the_artifact_stays_and_nothing_given_is_changed() -> None:
    mine, given_sources = artifacts(), {"model": {"revision": COMMIT}}
    before = copy.deepcopy((mine, given_sources))
    laid, _ = lay_sources(mine, given_sources)
    assert laid["model"]["name"] == "deepseek-v4.1-flash"
    assert (mine, given_sources) == before


@pytest.mark.parametrize(("key", "nearest"), [("modell", "model"), ("draft", "drafter"), ("", "model"), (7, "model")])
def test_an_unknown_artifact_is_named_with_the_nearest_one(key: Any, nearest: str) -> None:
    _, problems = lay_sources(artifacts(), {key: {"revision": COMMIT}})
    start = f"serving_plan_sources: unknown artifact '{key}'; the nearest known one is '"
    assert problems[0].startswith(start)
    if key:
        assert problems == [f"{start}{nearest}'"] or key == 7


def test_a_drafter_of_a_profile_that_has_none() -> None:
    _, problems = lay_sources(artifacts("2x"), {"drafter": PACK})
    assert problems == ["serving_plan_sources: unknown artifact 'drafter'; the nearest known one is 'model'"]


@pytest.mark.parametrize("source", ["/srv/model", None, ["/srv/model"], 5])
def test_a_source_that_is_no_mapping(source: Any) -> None:
    laid, problems = lay_sources(artifacts(), {"model": source})
    assert problems == [f"serving_plan_sources: model: {source!r} is no mapping; write {{type: path, path: /srv/...}}"]
    assert laid == artifacts()


def test_a_real_model_is_not_made_up() -> None:
    laid, problems = lay_sources(artifacts(), {"model": {"type": "generated", "seed": 1}})
    assert problems == ["serving_plan_sources: model: type 'generated' is not one of hub, mirror, peer, path, archive"]
    assert laid == artifacts()
    # the demo's is
    assert lay({"model": {"seed": 7}}, "cpu")["model"] == {"type": "generated", "seed": 7}


# Checks


@pytest.mark.parametrize(
    "source",
    [
        {"type": "hub", "repository": "example/pack", "revision": COMMIT},
        {"type": "hub", "repository": "example/pack", "revision": COMMIT, "folder": "drafter-code-k7"},
        {"type": "hub", "repository": "example/pack", "revision": COMMIT, "folder": "heads/code/"},
        {"type": "hub", "repository": "example/pack", "revision": COMMIT, "folder": ""},
        {"type": "hub", "repository": "example/a", "revision": COMMIT, "include": ["*.json", "a/"], "exclude": []},
        {"type": "hub", "repository": "example/a", "revision": COMMIT, "endpoint": "https://cache.example:8443/hub"},
        {"type": "mirror", "url": "http://mirror.example/models/a", "digest": DIGEST},
        {"type": "peer", "node": "gpu-node-1"},
        {"type": "path", "path": "/srv/models/a model"},
        {"type": "path", "path": "/srv/models/a", "adopt": True, "digest": DIGEST},
        {"type": "archive", "path": "/srv/models/a.tar"},
        {"type": "generated", "seed": 0},
    ],
)
def test_sources_that_are_in_order(source: dict[str, Any]) -> None:
    assert check_source("model", source) == ([], [])


@pytest.mark.parametrize(
    ("source", "missing"),
    [
        (MODEL, ["revision"]),
        ({**MODEL, "revision": None}, ["revision"]),
        ({"type": "hub"}, ["repository", "revision"]),
        ({"type": "path", "path": ""}, ["path"]),
        ({"type": "generated"}, ["seed"]),
    ],
)
def test_what_nobody_has_filled_in_yet_is_no_mistake(source: dict[str, Any], missing: list[str]) -> None:
    expected = [f"serving_plan_sources: model: {name} of the source of type {source['type']}" for name in missing]
    assert check_source("model", source) == ([], expected)


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ({"type": "https"}, "type 'https' is not one of hub, mirror, peer, path, archive"),
        ({"type": ["hub"]}, "type ['hub'] is not one of hub, mirror, peer, path, archive"),
        ({"type": {"hub": 1}}, "type {'hub': 1} is not one of hub, mirror, peer, path, archive"),
        ({"path": "/srv/model"}, "type is missing; write type: hub, mirror, peer, path or archive"),
        (
            {"type": "path", "path": "/srv/model", "revision": COMMIT},
            "unknown field 'revision' of a source of type path; it has path, include, exclude, adopt, digest",
        ),
        (
            {"type": "path", "path": "srv/model"},
            "path 'srv/model' is not absolute; write the folder on the node from / on",
        ),
        ({"type": "path", "path": "~/model"}, "path '~/model' is not absolute; write the folder on the node from / on"),
        (
            {"type": "path", "path": "/srv/../etc"},
            "path '/srv/../etc' has '..' or a control character in it; "
            "write the folder on the node as it is, from / on",
        ),
        ({"type": "path", "path": 5}, "path: 5 is no text; put it in quotes"),
        (
            {**MODEL, "revision": "main"},
            "revision 'main' is no commit; branches and tags move, so give a commit's 40 hex digits (0-9, a-f)",
        ),
        (
            {**MODEL, "revision": COMMIT.upper()},
            f"revision '{COMMIT.upper()}' is no commit; branches and tags move, so give a commit's 40 hex digits "
            "(0-9, a-f)",
        ),
        (
            {**MODEL, "revision": COMMIT + "\n"},
            f"revision '{COMMIT}\\n' is no commit; branches and tags move, so give a commit's 40 hex digits (0-9, a-f)",
        ),
        # a commit of decimal digits alone is a number to YAML
        ({**MODEL, "revision": 10**39}, f"revision: {10**39} is no text; put it in quotes"),
        (
            {**MODEL, "revision": COMMIT, "repository": "https://huggingface.co/a/b"},
            "repository 'https://huggingface.co/a/b' is no name like owner/model",
        ),
        (
            {**MODEL, "revision": COMMIT, "repository": "a/b/c"},
            "repository 'a/b/c' is no name like owner/model",
        ),
        (
            {**MODEL, "revision": COMMIT, "repository": "../b"},
            "repository '../b' is no name like owner/model",
        ),
        (
            {**MODEL, "revision": COMMIT, "folder": "../x"},
            "folder '../x' is not inside the repository; write it like drafter-code-k7",
        ),
        (
            {**MODEL, "revision": COMMIT, "folder": "/x"},
            "folder '/x' is not inside the repository; write it like drafter-code-k7",
        ),
        (
            {**MODEL, "revision": COMMIT, "folder": "x\ny"},
            "folder 'x\\ny' is not inside the repository; write it like drafter-code-k7",
        ),
        ({**MODEL, "revision": COMMIT, "folder": False}, "folder: False is no text; put it in quotes"),
        (
            {**MODEL, "revision": COMMIT, "include": "*.json"},
            "include: '*.json' is no list of patterns; write it like ['*.safetensors', '*.json']",
        ),
        (
            {**MODEL, "revision": COMMIT, "exclude": [1]},
            "exclude: [1] is no list of patterns; write it like ['*.safetensors', '*.json']",
        ),
        (
            {**MODEL, "revision": COMMIT, "endpoint": "https://me:secret@cache.example"},
            "endpoint: the URL holds a user or a password, which would be shown; leave them out",
        ),
        (
            {"type": "mirror", "url": "mirror.example/a", "digest": DIGEST},
            "url 'mirror.example/a' is no URL; write it like https://mirror.example/models/name",
        ),
        (
            {"type": "mirror", "url": "https://mirror.example/a?x=1", "digest": DIGEST},
            "url 'https://mirror.example/a?x=1' has a query; give the folder's address, to which file names are added",
        ),
        (
            {"type": "mirror", "url": "https://mirror.example/a", "digest": DIGEST[:12]},
            f"digest '{DIGEST[:12]}' is no digest; give the 64 hex digits of the manifest's",
        ),
        ({"type": "peer", "node": "a b"}, "node 'a b' is no name of a host in the inventory"),
        (
            {"type": "path", "path": "/srv/a", "adopt": "yes"},
            "adopt: 'yes' is not true or false; write adopt: true",
        ),
        ({"type": "generated", "seed": "x"}, "seed: 'x' is no whole number; write seed: 0"),
        ({"type": "generated", "seed": True}, "seed: True is no whole number; write seed: 0"),
    ],
)
def test_a_wrong_source_is_named(source: dict[str, Any], problem: str) -> None:
    assert check_source("model", source) == ([f"serving_plan_sources: model: {problem}"], [])


def test_every_mistake_is_named_at_once() -> None:
    problems, missing = check_source("drafter", {"type": "hub", "repository": 1, "folder": "..", "token": "x"})
    assert [text.split(": ", 2)[2].split(" ")[0].rstrip(":") for text in problems] == [
        "unknown",
        "repository",
        "folder",
    ]
    assert missing == ["serving_plan_sources: drafter: revision of the source of type hub"]
    # the value of a field that is not known may be a secret
    assert "'token'" in problems[0] and "x;" not in problems[0]


TYPES = ["hub", "mirror", "peer", "path", "archive", "generated"]
NAMES = ["repository", "revision", "folder", "include", "exclude", "endpoint", "url", "digest", "node", "path", "adopt"]
KINDS = st.sampled_from(TYPES) | ANYTHING
FIELDS = st.sampled_from([*NAMES, "seed"]) | st.text(max_size=5) | st.integers()
SOURCES = st.builds(lambda kind, rest: {**rest, "type": kind}, KINDS, st.dictionaries(FIELDS, ANYTHING, max_size=4))


@given(SOURCES | st.dictionaries(FIELDS, ANYTHING, max_size=3))
def test_any_source_is_in_order_or_gets_sentences(source: dict[Any, Any]) -> None:
    problems, missing = check_source("model", source)
    assert all(text.startswith("serving_plan_sources: model: ") for text in [*problems, *missing])
    if not problems and not missing:
        assert source["type"] in TYPES
        assert len(source_key(source)) == 12
        if source["type"] in ("path", "archive"):
            assert source["path"].startswith("/")
        if source["type"] == "hub":
            assert len(source["revision"]) == 40 and source["repository"].count("/") == 1
            assert not (source.get("folder") or "").startswith("/")


@given(
    st.dictionaries(
        st.sampled_from(["model", "drafter", "pack"]) | ANYTHING.filter(lambda key: key.__hash__), ANYTHING | SOURCES
    )
)
def test_any_mapping_is_laid_over_or_gets_sentences(sources: dict[Any, Any]) -> None:
    laid, problems = lay_sources(artifacts(), sources)
    assert list(laid) == ["model", "drafter", "pack"]
    wrong = [key for key, source in sources.items() if key not in laid or not isinstance(source, dict)]
    assert len(problems) >= len(wrong)
    for key in laid:
        check_source(key, laid[key]["source"])


# Packs


def test_of_a_pack_only_the_recipe_is_taken_in_both_layouts() -> None:
    for source in (
        {"type": "hub", "repository": "example/pack", "revision": COMMIT},
        {"type": "path", "path": "/srv/pack"},
        {"type": "archive", "path": "/srv/pack.tar", "folder": "pack"},
    ):
        narrowed = recipe_source(source)
        assert check_source("pack", narrowed) == ([], [])
        files = ["recipe/docker/build.sh", "docker/build.sh", "model.safetensors", "recipe/head.safetensors", "a/b.sh"]
        assert list(select(files, "", narrowed["include"], narrowed["exclude"])) == files[:2]
    own = recipe_source({"type": "path", "path": "/srv/pack", "include": ["x/"], "adopt": True})
    assert own == {"type": "path", "path": "/srv/pack", "include": ["x/"], "exclude": ["*.safetensors"]}


@pytest.mark.parametrize(
    "source",
    [
        {"type": "mirror", "url": "https://m.example/pack", "digest": DIGEST},
        {"type": "peer", "node": "n1"},
        {"type": "path", "path": "/srv/pack", "digest": DIGEST},
        {"type": 5},
    ],
)
def test_a_source_that_names_its_content_is_not_narrowed(source: dict[str, Any]) -> None:
    assert recipe_source(source) == source


@pytest.mark.parametrize(
    ("source", "drafter"),
    [
        (
            {
                "type": "hub",
                "repository": "a/b",
                "revision": COMMIT,
                "endpoint": "https://c.example",
                "include": ["x/"],
            },
            {"type": "hub", "repository": "a/b", "revision": COMMIT, "endpoint": "https://c.example", "folder": "d"},
        ),
        ({"type": "hub", "repository": "a/b", "folder": "x/"}, {"type": "hub", "repository": "a/b", "folder": "x/d"}),
        ({"type": "path", "path": "/srv/pack/"}, {"type": "path", "path": "/srv/pack/d"}),
        ({"type": "path", "path": "/p", "adopt": True}, {"type": "path", "path": "/p/d", "adopt": True}),
        ({"type": "archive", "path": "/p.tar"}, {"type": "archive", "path": "/p.tar", "folder": "d"}),
        ({"type": "peer", "node": "n1", "digest": DIGEST}, {"type": "peer", "node": "n1"}),
        ({"type": "mirror", "url": "https://m.example/pack", "digest": DIGEST}, {}),
        ({"type": "path", "path": "/srv/pack", "digest": DIGEST}, {}),
        ({"type": "archive", "path": "/srv/pack", "digest": DIGEST}, {}),
        ({"type": "path"}, {}),
        ({"type": ["hub"]}, {}),
        ({}, {}),
    ],
)
def test_where_a_folder_of_a_pack_comes_from(source: dict[str, Any], drafter: dict[str, Any]) -> None:
    assert folder_source(source, "d") == drafter


def test_a_recipe_that_nobody_has_is_refused_with_the_remedy() -> None:
    (problem,) = recipe_problems("pack", False)
    assert problem.startswith(
        "serving_image_recipe: pack needs a pack, and none is configured; set serving_plan_sources.pack"
    )
    assert recipe_problems("pack", True) == recipe_problems("auto", False) == recipe_problems("own", False) == []


# Keys


def test_a_key_is_of_what_comes_and_not_of_the_way_it_takes() -> None:
    plain: dict[str, Any] = {"type": "hub", "repository": "example/a", "revision": COMMIT}
    same = [
        {**plain, "endpoint": "https://cache.example"},
        {**plain, "folder": "", "include": [], "exclude": None},
        dict(reversed(plain.items())),
    ]
    assert {source_key(source) for source in same} == {source_key(plain)}
    folder = {**plain, "folder": "heads/code"}
    assert source_key(folder) == source_key({**plain, "folder": "heads/code/"}) != source_key(plain)
    path: dict[str, Any] = {"type": "path", "path": "/srv/a"}
    assert source_key({**path, "adopt": True}) == source_key(path) != source_key({**path, "digest": DIGEST})


def test_other_bytes_of_the_generator_are_another_source(monkeypatch: pytest.MonkeyPatch) -> None:
    generated: dict[str, Any] = {"type": "generated", "seed": 0}
    assert source_identity(generated)["generator"] == "tiny-deepseek-v3"
    before = source_key(generated)
    monkeypatch.setattr("ansible_collections.serving.gpu_node.plugins.module_utils.sources.GENERATOR_VERSION", 10**6)
    assert source_key(generated) != before


@pytest.mark.parametrize(
    ("source", "words"),
    [
        (MODEL, "deepseek-ai/DeepSeek-V4.1-Flash at ?"),
        ({**MODEL, "revision": COMMIT, "folder": "a/b"}, "deepseek-ai/DeepSeek-V4.1-Flash, folder a/b at 0123456789ab"),
        ({**MODEL, "endpoint": "https://c"}, "deepseek-ai/DeepSeek-V4.1-Flash at ? through https://c"),
        ({"type": "mirror", "url": "https://m/a", "digest": DIGEST}, "https://m/a"),
        ({"type": "peer", "node": "gpu-node-1"}, "node gpu-node-1"),
        ({"type": "path", "path": "/srv/a", "adopt": True}, "/srv/a as it lies there"),
        ({"type": "archive", "path": "/srv/a.tar"}, "/srv/a.tar"),
        ({"type": "generated", "seed": 0}, "nowhere: generated on the node"),
    ],
)
def test_where_it_comes_from_in_words(source: dict[str, Any], words: str) -> None:
    assert source_words(source) == words
