"""site.yml on a node that serves, from the checkout and from the installed collection."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from nodes import Node, Play, parse_recap
from testhost import ROOT

BIN = Path(sys.executable).parent


@pytest.mark.full  # scenario default has a second run
def test_the_second_run_changes_nothing_and_shows_no_secret(served: Node) -> None:
    play = served.converge("-vvv", "--diff")
    assert play.changed == 0, play.tail(80)
    engine_key = served.ssh("cat /etc/gpu-node/secrets/engine.env").strip().removeprefix("VLLM_API_KEY=")
    assert len(engine_key) >= 32
    assert engine_key not in play.output
    assert served.client_key not in play.output


def test_check_mode_is_clean_on_a_serving_node(served: Node) -> None:
    play = served.converge("--check", "--diff")
    assert play.changed == 0, play.tail(80)


@pytest.mark.full  # a dry run like the one before
def test_the_installed_collection_does_the_same_job(served: Node, tmp_path: Path) -> None:
    """Built, installed elsewhere and called by its name, with nothing of the checkout in reach but the inventory."""
    galaxy = [str(BIN / "ansible-galaxy"), "collection"]
    build = [*galaxy, "build", str(ROOT), "--output-path", str(tmp_path)]
    subprocess.run(build, check=True, capture_output=True, timeout=120)
    (archive,) = tmp_path.glob("serving-gpu_node-*.tar.gz")
    installed = tmp_path / "collections"
    install = [*galaxy, "install", str(archive), "--no-deps", "--offline", "-p", str(installed)]
    # from elsewhere: the checkout's own collections_path says that it is installed already
    subprocess.run(install, check=True, capture_output=True, timeout=120, cwd=tmp_path)

    (tmp_path / "ansible.cfg").write_text(f"[defaults]\ncollections_path = {installed}\ninject_facts_as_vars = False\n")
    inventories = ["-i", str(ROOT / "inventories" / "demo"), "-i", str(served.inventory)]
    done = subprocess.run(
        [str(BIN / "ansible-playbook"), "serving.gpu_node.site", *inventories, "-l", "gpu-node", "--check", "--diff"],
        cwd=tmp_path,
        env={**os.environ, "ANSIBLE_CONFIG": str(tmp_path / "ansible.cfg"), "ANSIBLE_NOCOLOR": "1"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    play = Play(done.returncode, done.stdout + done.stderr, parse_recap(done.stdout))
    assert play.rc == 0, play.tail(80)
    assert play.changed == 0, play.tail(80)
