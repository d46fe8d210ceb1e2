"""The replicas' caches: one for each image, made when it is needed and removed when no release needs it."""

import shutil

import pytest
from gpu_node.live import LiveNode
from gpu_node.switch import switch
from gpu_node.unit import UnitSteps

from tests.unit.node_tool.fakes import IMAGE_ID, World
from tests.unit.node_tool.test_rollout import want

OLD, STAGED, OTHERS = "01" * 32, "23" * 32, "45" * 32


@pytest.fixture
def caches(world: World) -> World:
    """Replica 0 has caches of the image that serves and of three others, replica 1 of one that it does not need."""
    for index, image in ((0, IMAGE_ID), (0, OLD), (0, STAGED), (0, OTHERS), (1, OTHERS)):
        folder = world.paths.cache(index, image)
        folder.mkdir(exist_ok=True)
        (folder / "kernel").write_text("compiled")
    return world


def there(world: World, index: int = 0) -> set[str]:
    return {entry.name for entry in world.paths.caches(index).iterdir()}


def of(*images: str) -> set[str]:
    return {image[:12] for image in images}


def image(world: World, name: str, image_id: str) -> str:
    return world.make_release(0, name, image={"ref": "x", "id": image_id})


def test_a_switch_removes_what_no_release_needs(caches: World) -> None:
    want(caches, targets={"0": image(caches, "S", STAGED)}, state="staged")
    (caches.paths.caches(0) / "notes").mkdir()
    assert switch(LiveNode(caches.tool()), 0, caches.releases[0, "B"])
    assert there(caches) == of(IMAGE_ID, STAGED) | {"notes"} and there(caches, 1) == of(IMAGE_ID, OTHERS)
    assert any(line.startswith("replica 0: removed ") and line.split(",")[0].endswith(OLD[:12]) for line in caches.said)


def test_the_way_back_keeps_its_cache(caches: World) -> None:
    LiveNode(caches.tool()).point(0, "current", image(caches, "O", OLD))
    caches.units[0].running = image(caches, "O", OLD)
    assert switch(LiveNode(caches.tool()), 0, caches.releases[0, "B"])
    assert there(caches) == of(IMAGE_ID, OLD)


def test_a_switch_that_failed_removes_nothing(caches: World) -> None:
    caches.bad_releases.add(caches.releases[0, "B"])
    assert switch(LiveNode(caches.tool()), 0, caches.releases[0, "B"])
    assert there(caches) == of(IMAGE_ID, OLD, STAGED, OTHERS)


def test_nothing_is_removed_while_a_release_cannot_be_read(caches: World) -> None:
    damaged = image(caches, "S", STAGED)
    want(caches, targets={"0": damaged}, state="staged")
    (caches.paths.release(damaged) / "engine.yaml").write_text("changed")
    journal = switch(LiveNode(caches.tool()), 0, caches.releases[0, "B"])
    assert journal is not None and journal.outcome == "new"
    assert there(caches) == of(IMAGE_ID, OLD, STAGED, OTHERS)
    assert any("caches of images that no release needs stay: " in line for line in caches.warned)


def test_a_start_makes_the_cache_of_its_image(world: World) -> None:
    """Podman does not; an image that is gone back to may have lost its own."""
    world.stop_unit(0)
    folder = world.paths.cache(0, IMAGE_ID)
    shutil.rmtree(world.paths.caches(0).parent)
    UnitSteps(world.tool(), 0).prepare()
    assert folder.is_dir() and folder.stat().st_mode & 0o777 == 0o700
    UnitSteps(world.tool(), 0).prepare()
