"""Weights on real nodes: fetched once, verified byte for byte, from a real local hub with faults."""

from __future__ import annotations

import json
import os
import re
import signal
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from nodes import Node, Playbook

from tests.doubles.hub.server import Hub, Repository, make_repository

from .weights import ARTIFACTS, SERVER_PORT, Fleet

FILES = {
    "config.json": 900,
    "tokenizer.json": 40_000,
    **{f"model-{number:05}-of-00008.safetensors": 2_000_000 + number for number in range(1, 9)},
    "drafter/model.safetensors": 700_000,
}
TOKEN = "hub-token-4c1d"
UNIT = "gpu-node-weights-m.service"
# On a bare node, as playbooks/prepare.yml does: how packages are reached comes first.
BOTH = ("package_access", "model_weights")
MEBIBYTE = 1 << 20
# Bytes a second of the hub: slow enough that a test meets the fetch on its way.
SLOW = 1_000_000
# Seconds until a play has come to its fetch, on a machine that does other things as well.
ON_ITS_WAY = 300


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hub]:
    with Hub(tmp_path_factory.mktemp("hub"), host="0.0.0.0") as running:
        yield running


@pytest.fixture(scope="module")
def fleet(node: Callable[[str], Node], hub: Hub, tmp_path_factory: pytest.TempPathFactory) -> Fleet:
    """Three bare nodes."""
    return Fleet([node(f"weights{number}") for number in (1, 2, 3)], hub, tmp_path_factory.mktemp("fleet"))


@pytest.fixture
def repository(request: pytest.FixtureRequest, hub: Hub, fleet: Fleet) -> Repository:
    """A repository of the test's own; nothing is left of another test."""
    for node in fleet.nodes:
        fleet.forget(node)
    name = request.node.name[5:60]
    return fresh_repository(hub, name, seed=zlib.crc32(name.encode()))


def fresh_repository(hub: Hub, name: str, seed: int, **options: str) -> Repository:
    hub.clear_faults()
    hub.bucket.rate = 0
    made = make_repository(hub.root / "example" / name, FILES, seed=seed, **options)  # type: ignore[arg-type]
    hub.reset_stats()
    return made


def kill(playbook: Playbook) -> None:
    """As when the controller dies: nothing is tidied up."""
    os.killpg(playbook.process.pid, signal.SIGKILL)
    playbook.process.wait()


def begun() -> str:
    """A command that succeeds when some of a running fetch is on the disk."""
    return f"systemctl is-active -q {UNIT} && find {ARTIFACTS}/m/.incoming/*/parts -size +200k | grep -q ."


def words(text: str) -> str:
    """A playbook's output without the line ends that its width puts in."""
    return " ".join(text.split())


# -- one node ----------------------------------------------------------------------------------------------------------


def test_check_mode_on_a_bare_node_says_what_would_come(fleet: Fleet, repository: Repository) -> None:
    play = fleet.converge(fleet.source(repository), "--check", "--diff", roles=BOTH)
    assert "would fetch m: 11 of 11 files, 16.7 MB, from" in words(play.output), play.tail(60)
    assert fleet.hub.file_bytes == 0
    fleet.ssh("n1", f"test ! -e {ARTIFACTS} && test ! -e /usr/local/bin/gpu-node-weights && test ! -e /etc/gpu-node")


@pytest.mark.full
def test_faults_on_the_way_end_in_a_whole_artifact_and_the_second_run_asks_nobody(
    fleet: Fleet, repository: Repository
) -> None:
    files = f"{repository.name}/model-*"
    fleet.hub.fault("cut", files, times=3)
    fleet.hub.fault("stall", files, times=1)
    fleet.hub.fault("status", files, times=2, amount=503)
    fleet.hub.fault("rate_limit", files, times=1, seconds=1)
    fleet.hub.fault("wrong_bytes", files, times=1)
    source = fleet.source(repository)
    play = fleet.converge(source, roles=BOTH, model_weights_stall_seconds=2)
    assert "complete: m " in play.output
    fleet.assert_whole("n1", repository)
    fleet.hub.clear_faults()
    fleet.hub.reset_stats()
    again = fleet.converge(source, "--diff")
    assert again.changed == 0, again.tail(60)
    assert fleet.hub.requests == 0
    check = fleet.converge(source, "--check", "--diff", model_weights_manage=False)
    assert check.changed == 0


def test_a_token_goes_to_the_hub_alone_and_is_seen_nowhere(fleet: Fleet, hub: Hub) -> None:
    gated = fresh_repository(hub, "gated", 7, access="gated", token=TOKEN)
    refused = fleet.run(fleet.source(gated))
    assert refused.rc == 2
    assert "needs a token of somebody who was let in (model_weights_hub_token)" in words(refused.output)
    hub.bucket.rate = SLOW
    running = fleet.start(fleet.source(gated), "-vvv", "--diff", model_weights_hub_token=TOKEN)
    fleet.wait_on("n1", begun(), ON_ITS_WAY)
    seen = fleet.ssh("n1", "cat /proc/[0-9]*/cmdline /proc/[0-9]*/environ 2>/dev/null | tr '\\0' '\\n'")
    hub.bucket.rate = 0
    play = running.finish(600)
    assert play.rc == 0, play.tail(60)
    assert "gpu_node_weights" in seen
    assert TOKEN not in seen
    assert TOKEN not in play.output
    assert TOKEN not in fleet.ssh("n1", "journalctl --all --no-pager")
    assert fleet.ssh("n1", f"grep -rl {TOKEN} /etc /var/lib/gpu-node /run /tmp /root || true").split() == [
        "/etc/gpu-node/secrets/hub-token"
    ]
    assert fleet.ssh("n1", "stat -c '%a %U' /etc/gpu-node/secrets/hub-token").strip() == "600 root"
    fleet.assert_whole("n1", gated)
    fleet.converge(fleet.source(gated))
    fleet.ssh("n1", "test ! -e /etc/gpu-node/secrets/hub-token")


@pytest.mark.full
def test_a_killed_job_goes_on_from_where_it_was(fleet: Fleet, repository: Repository) -> None:
    fleet.hub.bucket.rate = SLOW
    running = fleet.start(fleet.source(repository))
    fleet.wait_on("n1", begun(), ON_ITS_WAY)
    fleet.ssh("n1", f"systemctl kill --signal=KILL {UNIT}")
    play = running.finish(600)
    assert play.rc == 2
    assert "ended with exit code 137" in words(play.output)
    fleet.ssh("n1", f"! ls -d {ARTIFACTS}/m/????????????")
    fleet.hub.bucket.rate = 0
    fleet.converge(fleet.source(repository))
    fleet.assert_whole("n1", repository)
    # What was in flight: 1 MiB of each of the eight streams, at most.
    assert fleet.hub.file_bytes <= repository.total + 8 * MEBIBYTE


@pytest.mark.full
def test_without_its_controller_the_job_goes_on_and_the_next_run_follows_it(
    fleet: Fleet, repository: Repository
) -> None:
    # The second play has to come to a fetch that is still under way, and one so slow is no stall here.
    fleet.hub.bucket.rate = SLOW // 10
    patient: Any = {"model_weights_stall_seconds": 300}
    running = fleet.start(fleet.source(repository), **patient)
    fleet.wait_on("n1", f"systemctl is-active -q {UNIT}", ON_ITS_WAY)
    kill(running)
    again = fleet.start(fleet.source(repository), **patient)
    again.wait_for("is running already; following it", ON_ITS_WAY)
    fleet.hub.bucket.rate = 0
    play = again.finish(600)
    assert play.rc == 0, play.tail(60)
    fleet.assert_whole("n1", repository)
    assert fleet.hub.file_bytes == repository.total


@pytest.mark.full
def test_a_node_that_reboots_in_the_fetch_goes_on_in_the_next_run(fleet: Fleet, repository: Repository) -> None:
    fleet.hub.bucket.rate = SLOW
    running = fleet.start(fleet.source(repository))
    fleet.wait_on("n1", begun(), ON_ITS_WAY)
    fleet.nodes["n1"].reboot()
    running.finish(600)
    assert running.process.returncode != 0
    fleet.hub.bucket.rate = 0
    fleet.converge(fleet.source(repository))
    fleet.assert_whole("n1", repository)
    assert fleet.hub.file_bytes <= repository.total + 8 * MEBIBYTE


@pytest.mark.full
def test_a_flipped_byte_is_named_and_only_its_file_comes_again(fleet: Fleet, repository: Repository) -> None:
    fleet.converge(fleet.source(repository))
    good = fleet.playbook("verify_weights", verify_weights_name="m")
    assert good.rc == 0, good.tail(60)
    assert good.changed == 0
    name = "model-00003-of-00008.safetensors"
    file = f"{fleet.folder_of('n1')}/{name}"
    # As a disk does it: the file's times stay.
    fleet.ssh(
        "n1",
        f"touch -r {file} /tmp/times && printf X | dd of={file} bs=1 seek=100000 conv=notrunc status=none"
        f" && touch -r /tmp/times {file}",
    )
    bad = fleet.playbook("verify_weights")
    assert bad.rc == 2
    assert f"{name} has SHA-256" in words(bad.output)
    fleet.hub.reset_stats()
    fleet.converge(fleet.source(repository))
    assert fleet.hub.file_bytes == repository.entries[name].size
    fleet.ssh("n1", f"ls -d {ARTIFACTS}/m/*.bad-1")
    fleet.ssh("n1", f"rm -r {ARTIFACTS}/m/*.bad-1")
    fleet.assert_whole("n1", repository)


@pytest.mark.full
def test_pruning_lists_first_and_keeps_what_current_and_previous_use(fleet: Fleet, hub: Hub) -> None:
    digests = []
    for number in (1, 2, 3):
        made = fresh_repository(hub, f"prune-{number}", number)
        fleet.converge(fleet.source(made), name="p")
        digests.append(fleet.ssh("n1", f"ls -td {ARTIFACTS}/p/????????????").split()[0].rpartition("/")[2])
    old, previous, current = digests
    for release, digest in (("r1", previous), ("r2", current)):
        content = json.dumps({"model": {"name": "p", "digest": digest + "0" * 52}, "drafter": None})
        fleet.ssh("n1", f"mkdir -p /var/lib/gpu-node/releases/{release} /var/lib/gpu-node/replicas/0")
        fleet.ssh("n1", f"cat >/var/lib/gpu-node/releases/{release}/release.json", stdin=content)
    for link, release in (("current", "r2"), ("previous", "r1")):
        fleet.ssh("n1", f"ln -sfn ../../releases/{release} /var/lib/gpu-node/replicas/0/{link}")
    listed = fleet.playbook("prune_weights")
    assert listed.changed == 0
    why = "no release that is served, wanted or a way back uses it"
    assert f"{ARTIFACTS}/p/{old}: 16.7 MB, {why}" in words(listed.output)
    assert f"p/{previous}" not in listed.output
    assert f"p/{current}" not in listed.output
    removed = fleet.playbook("prune_weights", prune_weights_remove=True)
    assert removed.rc == 0, removed.tail(60)
    assert sorted(fleet.ssh("n1", f"ls {ARTIFACTS}/p").split()) == sorted([previous, current])
    assert "every artifact is in use" in fleet.playbook("prune_weights", prune_weights_remove=True).output
    fleet.ssh("n1", f"rm -rf /var/lib/gpu-node/releases /var/lib/gpu-node/replicas {ARTIFACTS}/p")


@pytest.mark.full
def test_what_may_only_be_verified_is_not_fetched(fleet: Fleet, repository: Repository) -> None:
    play = fleet.run(fleet.source(repository), model_weights_manage=False)
    assert play.rc == 2
    assert "artifact 'm' (model) is not complete on n1 and this run may only verify. Found:" in words(play.output)
    assert fleet.hub.requests == 0


@pytest.mark.full
def test_a_timer_verifies_when_it_is_asked_for(fleet: Fleet, repository: Repository) -> None:
    timed = {"model_weights_verify_schedule": "Sun 04:00"}
    fleet.converge(fleet.source(repository), **timed)
    assert "gpu-node-verify-weights.timer" in fleet.ssh("n1", "systemctl list-timers --all")
    fleet.ssh("n1", "systemctl start gpu-node-verify-weights.service")
    assert fleet.converge(fleet.source(repository), **timed).changed == 0
    fleet.converge(fleet.source(repository))
    fleet.ssh("n1", "test ! -e /etc/systemd/system/gpu-node-verify-weights.timer")


def test_a_disk_without_room_is_refused_with_the_numbers(fleet: Fleet, repository: Repository) -> None:
    fleet.ssh("n1", f"mount -t tmpfs -o size=200m tmpfs {ARTIFACTS}")
    try:
        play = fleet.run(fleet.source(repository))
    finally:
        fleet.ssh("n1", f"umount {ARTIFACTS}")
    assert play.rc == 2
    message = words(play.output)
    assert "16.7 MB are still to come (m 16.7 MB), 268.4 MB are to spare, 209.7 MB are free" in message, play.tail()
    assert "playbooks/prune_weights.yml" in message
    assert fleet.hub.file_bytes == 0


@pytest.mark.full
def test_a_disk_that_fills_up_in_the_fetch_ends_it_with_one_line_and_the_next_run_goes_on(
    fleet: Fleet, repository: Repository
) -> None:
    fleet.ssh("n1", f"mount -t tmpfs -o size=300m tmpfs {ARTIFACTS}")
    try:
        fleet.hub.bucket.rate = SLOW
        running = fleet.start(fleet.source(repository))
        fleet.wait_on("n1", begun(), ON_ITS_WAY)
        fleet.ssh("n1", f"cat /dev/zero >{ARTIFACTS}/filler 2>/dev/null || true")
        play = running.finish(600)
        assert play.rc == 2
        assert "No space left on device" in words(play.output), play.tail()
        assert "make room" in words(play.output)
        fleet.ssh("n1", f"rm {ARTIFACTS}/filler")
        fleet.hub.bucket.rate = 0
        fleet.converge(fleet.source(repository))
        fleet.assert_whole("n1", repository)
        assert fleet.hub.file_bytes <= repository.total + 8 * MEBIBYTE
    finally:
        fleet.ssh("n1", f"umount -l {ARTIFACTS}")


# -- several nodes -----------------------------------------------------------------------------------------------------

ALL = ("n1", "n2", "n3")


def assert_nothing_serves(fleet: Fleet) -> None:
    for node in fleet.nodes:
        fleet.ssh(node, "test ! -e /run/systemd/system/gpu-node-weights-server.service")
        fleet.ssh(node, "test ! -e /run/gpu-node-weights-server")
        listening = fleet.ssh(node, "ss -Hltn").split()
        assert not [one for one in listening if one.endswith((f":{SERVER_PORT}", ":80"))]


def test_three_nodes_take_one_copy_from_the_hub(fleet: Fleet, repository: Repository) -> None:
    source = fleet.source(repository)
    play = fleet.converge(source, on=ALL, roles=BOTH)
    # Each of the others from the one before it.
    for node, before in (("n2", "n1"), ("n3", "n2")):
        wanted = rf"\[{node}\] complete: m .* from {re.escape(fleet.address(before))}:{SERVER_PORT}, "
        assert re.search(wanted, play.output), play.tail(80)
    for node in ALL:
        fleet.assert_whole(node, repository)
    assert fleet.hub.file_bytes <= repository.total * 1.02
    assert_nothing_serves(fleet)
    fleet.hub.reset_stats()
    again = fleet.converge(source, on=ALL)
    assert again.changed == 0, again.tail(60)
    assert fleet.hub.requests == 0


@pytest.mark.full
def test_a_node_that_has_it_gives_it_and_the_hub_is_not_asked(fleet: Fleet, repository: Repository) -> None:
    source = fleet.source(repository)
    fleet.converge(source, on=("n2",))
    fleet.hub.reset_stats()
    # One at a time: none may wait for one that does not come before it has ended.
    fleet.converge(source, "--forks", "1", on=ALL)
    for node in ALL:
        fleet.assert_whole(node, repository)
    assert fleet.hub.requests == 0
    assert_nothing_serves(fleet)


@pytest.mark.full
def test_with_serial_a_batch_takes_it_from_the_one_before(fleet: Fleet, repository: Repository) -> None:
    fleet.converge(fleet.source(repository), on=ALL, serial=1)
    for node in ALL:
        fleet.assert_whole(node, repository)
    assert fleet.hub.file_bytes == repository.total
    assert_nothing_serves(fleet)


@pytest.mark.full
def test_another_site_asks_for_itself(fleet: Fleet, repository: Repository) -> None:
    fleet.converge(
        fleet.source(repository),
        on=("n1", "n2"),
        model_weights_site="{{ 'here' if inventory_hostname == 'n1' else 'there' }}",
    )
    assert fleet.hub.file_bytes == 2 * repository.total


@pytest.mark.full
def test_a_named_peer_gives_what_it_has_also_when_it_is_not_worked_on(fleet: Fleet, repository: Repository) -> None:
    fleet.converge(fleet.source(repository), on=("n1",))
    fleet.hub.reset_stats()
    fleet.converge({"type": "peer", "node": "n1"}, on=("n2",))
    fleet.assert_whole("n2", repository)
    assert fleet.hub.requests == 0
    assert_nothing_serves(fleet)
    unknown = fleet.run({"type": "peer", "node": "n9"}, on=("n2",))
    assert unknown.rc == 2
    assert "node 'n9' is no host of the inventory" in words(unknown.output)


@pytest.mark.full
def test_a_seed_that_fails_ends_the_others_with_one_line_and_all_go_on_later(
    fleet: Fleet, repository: Repository
) -> None:
    bad = f"{repository.name}/model-00005*"
    fleet.hub.fault("wrong_bytes", bad, times=-1)
    play = fleet.run(fleet.source(repository), on=ALL)
    assert play.rc == 2
    message = words(play.output)
    assert "model-00005-of-00008.safetensors: its sha256 is" in message, play.tail(80)
    assert message.count("that node's own fetch has failed: m does not come over plain HTTP") >= 2, play.tail(80)
    assert_nothing_serves(fleet)
    fleet.hub.clear_faults()
    fleet.hub.reset_stats()
    fleet.converge(fleet.source(repository), on=ALL)
    for node in ALL:
        fleet.assert_whole(node, repository)
    assert fleet.hub.file_bytes < repository.total / 2, "what had come was kept"


@pytest.mark.full
def test_a_first_node_that_fails_before_the_fetch_is_left_out(fleet: Fleet, repository: Repository) -> None:
    fleet.ssh("n1", f"mkdir -p {ARTIFACTS} && mount -t tmpfs -o size=200m tmpfs {ARTIFACTS}")
    try:
        play = fleet.run(fleet.source(repository), on=("n1", "n2"))
    finally:
        fleet.ssh("n1", f"umount {ARTIFACTS}")
    assert play.recap["n1"]["failed"] == 1
    assert play.recap["n2"]["failed"] == 0, play.tail(60)
    fleet.assert_whole("n2", repository)
    assert fleet.hub.file_bytes == repository.total


@pytest.mark.full
def test_a_server_that_an_interrupted_run_left_is_gone_after_the_next(fleet: Fleet, repository: Repository) -> None:
    fleet.hub.bucket.rate = SLOW
    running = fleet.start(fleet.source(repository), on=("n1", "n2"))
    fleet.wait_on("n1", "systemctl is-active -q gpu-node-weights-server", ON_ITS_WAY)
    fleet.wait_on("n2", f"systemctl is-active -q {UNIT}", ON_ITS_WAY)
    outside = fleet.nodes["n3"].run(
        f"curl -s -o /dev/null -w '%{{http_code}}' http://{fleet.address('n1')}:{SERVER_PORT}/"
    )
    assert outside.stdout in ("403", "")
    kill(running)
    fleet.hub.bucket.rate = 0
    fleet.converge(fleet.source(repository), on=("n1", "n2"))
    assert fleet.hub.file_bytes <= repository.total * 1.02
    assert_nothing_serves(fleet)
