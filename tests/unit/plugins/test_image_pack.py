"""A pack's own recipe on the node: which image its script made, which libraries are new, and who `docker` is."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from gpu_node_image import pack
from gpu_node_image.errors import ImageError


def put(folder: Path, *names: str, text: str = "x") -> Path:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def test_the_recipe_is_found_in_both_layouts(tmp_path: Path) -> None:
    below = put(tmp_path / "a", "recipe/docker/build.sh", "recipe/kernels/build.sh")
    assert pack.find_recipe(below) == below / "recipe"
    itself = put(tmp_path / "b", "docker/build.sh", "kernels/build.sh")
    assert pack.find_recipe(itself) == itself
    with pytest.raises(ImageError, match=r"holds no recipe: docker/build\.sh and kernels/build\.sh are neither in it"):
        pack.find_recipe(put(tmp_path / "c", "docker/build.sh"))


LAYERS = {"base": ["1", "2"], "final": ["1", "2", "3"], "devel": ["8", "9"], "other": ["7"]}


@pytest.mark.parametrize(
    ("fresh", "pulled", "made", "name"),
    [
        ({"localhost/x:1": "final"}, [], "", "localhost/x:1"),
        ({"localhost/x:2": "final", "localhost/x:1": "final"}, [], "", "localhost/x:1"),
        # what it is built on, and what only a stage of it was built on
        ({"b:1": "base", "x:1": "final"}, ["base"], "", "x:1"),
        ({"localhost/stage:1": "base", "localhost/x:1": "final"}, [], "", "localhost/x:1"),
        ({"d:1": "devel", "x:1": "final"}, ["devel"], "", "x:1"),
        # an engine that tells of a digest also for what it built
        ({"x:1": "final"}, ["final"], "", "x:1"),
        # made before, and the same again; its base was pulled again, or not
        ({}, [], "old:1", "old:1"),
        ({"b:1": "base"}, ["base"], "old:1", "old:1"),
        # made before, and now it is another one
        ({"y:1": "other"}, [], "old:1", "y:1"),
    ],
)
def test_the_image_that_the_script_made_is_told_from_what_it_pulled(
    fresh: dict[str, str], pulled: list[str], made: str, name: str
) -> None:
    layers = {image: LAYERS[image] for image in [*fresh.values(), *(["final"] if made else [])]}
    assert pack.choose_image(fresh, layers, pulled, made) == name


def test_none_and_several_are_refused_with_their_names_and_the_variable() -> None:
    remedy = "set serving_image_pack_image to the name of the one that replicas run"
    with pytest.raises(ImageError) as caught:
        pack.choose_image({}, {}, [], "")
    assert str(caught.value) == (
        f"docker/build.sh of the pack made no image with a name, or none that changed; {remedy}"
    )
    fresh = {"localhost/x:1": "final", "localhost/y:1": "other", "docker.io/d:1": "devel"}
    for made in ("", "localhost/x:1"):
        with pytest.raises(ImageError) as caught:
            pack.choose_image(fresh, {image: LAYERS[image] for image in fresh.values()}, ["devel"], made)
        assert str(caught.value) == f"docker/build.sh of the pack made or pulled localhost/x:1, localhost/y:1; {remedy}"
    # The same image as before, or another one that looks pulled?
    with pytest.raises(ImageError, match=r"made or pulled d:1; "):
        pack.choose_image({"d:1": "devel"}, {image: LAYERS[image] for image in ("devel", "final")}, ["devel"], "x:1")


def test_the_image_that_the_operator_named_must_be_there() -> None:
    there = {"localhost/x:latest": "1", "y:2": "2"}
    assert pack.named_image("x", there) == ("localhost/x:latest", "1")
    assert pack.named_image("localhost/x:latest", there) == ("localhost/x:latest", "1")
    assert pack.named_image("y:2", there) == ("y:2", "2")
    with pytest.raises(ImageError, match=r"made no image z:1; there are now localhost/x:latest, y:2$"):
        pack.named_image("z:1", there)


def test_only_libraries_that_are_new_or_have_other_bytes_are_the_kernels(tmp_path: Path) -> None:
    recipe = put(tmp_path / "recipe", "kernels/old.so", "kernels/build.sh", "kernels/changed.so")
    at = put(tmp_path / "at", "kernels/old.so", "kernels/build.sh", "kernels/out/new.so", "kernels/new.o")
    put(at, "kernels/changed.so", text="y")
    put(tmp_path, "outside.so")
    (at / "kernels/link.so").symlink_to(tmp_path / "outside.so")
    assert pack.new_libraries(recipe, at) == ["kernels/changed.so", "kernels/out/new.so"]


def test_what_an_interrupted_build_noted_counts_for_the_same_pack_alone(tmp_path: Path) -> None:
    file = tmp_path / "images.json"
    state = pack.State.read(file, "one")
    assert (state.begun, state.before, state.made) == (False, {}, "")
    state.begun, state.before, state.made = True, {"a:1": "x"}, "b:1"
    state.write()
    assert pack.State.read(file, "one") == state
    # A new version of a pack may have other kernels alone: its script then makes the same image under the same name.
    assert pack.State.read(file, "two") == pack.State(file, "two", made="b:1")
    file.write_text("half a fi")
    assert pack.State.read(file, "one") == pack.State(file, "one")


@pytest.mark.parametrize(
    ("text", "first"),
    [
        ("", 'unqualified-search-registries = ["docker.io"]'),
        ('[[registry]]\nlocation="r"\n', 'unqualified-search-registries = ["docker.io"]'),
        ('# x\nunqualified-search-registries = ["quay.io"]\n', "# x"),
    ],
)
def test_a_name_without_a_registry_is_docker_hubs_unless_the_node_says_otherwise(
    tmp_path: Path, text: str, first: str
) -> None:
    file = tmp_path / "registries.conf"
    file.write_text(text)
    found = pack.short_names(file)
    assert found.splitlines()[0] == first and found.endswith(text)
    assert pack.short_names(tmp_path / "none") == 'unqualified-search-registries = ["docker.io"]\n'


@pytest.mark.parametrize(
    ("script", "root"),
    [
        ("echo /var/lib/docker", "/var/lib/docker"),
        # Podman's own `docker`, and an engine that does not answer
        ("echo 'template: info' >&2; exit 125", ""),
        ("echo 'Cannot connect to the Docker daemon' >&2; exit 1", ""),
        ("", ""),
    ],
)
def test_only_an_engine_that_answers_is_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, root: str
) -> None:
    command = put(tmp_path, "docker", text=f"#!/bin/sh\n{script}\n") / "docker"
    command.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    assert pack.find_engine() == pack.Engine(root)
