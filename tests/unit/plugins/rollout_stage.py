"""A collection in which the roles around a rollout are stand-ins, and a fleet of hosts that do what a test says."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from tests.unit.plugins.playbooks import ROOT, run_playbook

STAND_INS = {
    "package_access": ["main"],
    "topology": ["main"],
    "acceptance": ["all_reduce"],
    "kernels": ["qualify"],
    "serving_plan": ["resolve"],
    "replica": ["retire", "main", "write_releases"],
    "node_tool": ["main"],
    "balancer": ["main"],
    "host_settings": ["main", "reboot"],
    "nvidia_driver": ["main"],
    "container_runtime": ["main"],
}
PLAN = {
    "device": "cpu",
    "profile": "cpu",
    "state": "resolved",
    "kernels": {},
    "missing": [],
    "replicas": [{"index": 0, "release": "1" * 12, "gpus": []}, {"index": 1, "release": "1" * 12, "gpus": []}],
}

# What `claim` and `follow` do is told by the host's variable `fake`.
ACTION = """
import json, os, time
from ansible.plugins.action import ActionBase

class ActionModule(ActionBase):
    def run(self, tmp=None, task_vars=None):
        args, node = self._task.args, self._task.delegate_to or task_vars["inventory_hostname"]
        fake = task_vars["hostvars"][node]["fake"]
        def say(text):
            with open(task_vars["calls"], "a") as stream:
                stream.write(f"{node} {text}\\n")
        BODY
"""
CLAIM = """
        hold = args.get("hold", "take")
        if hold != "take":
            say(hold)
            return {"changed": hold == "release"}
        back, drained = args.get("back"), args.get("drained")
        wanted = args["targets"] or fake.get("back", {"0": "0" * 12})
        differs = fake.get("differs", ["0"])
        found = fake.get("found", {})
        if self._task.check_mode and not task_vars.get("ansible_check_mode"):
            return {"changed": True, "conflict": fake.get("conflict", ""), "found": found}
        steps = " " + drained.rpartition("/")[2] + (" done" if args.get("drained_done") else "") if drained else ""
        say("claim" + (" back " + args["back_of"] if back else "") + steps + " " + wanted.get("0", "-"))
        if fake.get("conflict"):
            return {"failed": True, "msg": fake["conflict"]}
        if fake.get("refuses"):
            return {"failed": True, "msg": fake["refuses"]}
        before = fake.get("before", {"0": "0" * 12, "1": "0" * 12})
        ended = found.get("rollout") in args.get("unfinished", []) and found.get("drained_done")
        due = differs or (drained and not ended)
        record = {
            "rollout": "r1",
            "state": "staged" if due else "done",
            "targets": wanted,
            "before": before,
            "by": "alice@ctl",
            "drained": drained,
            "renewed": fake.get("renewed", time.time()),
            "back_of": args.get("back_of"),
        }
        return {"changed": True, "id": "r1", "record": record, "differs": differs, "current": before}
"""
FOLLOW = """
        verb = " ".join(args["argv"][1:])
        say(args["unit"] + ": " + verb)
        for start, text in fake.get("jobs", {}).items():
            if verb.startswith(start):
                return {"failed": True, "msg": text}
        return {"changed": True, "rc": 0}
"""


@dataclass
class Stage:
    """Run a playbook there with :meth:`run`; what was called is in :meth:`calls`."""

    folder: Path
    hosts: dict[str, dict[str, Any]] = field(default_factory=dict)
    plan: dict[str, Any] = field(default_factory=lambda: dict(PLAN))
    group: dict[str, Any] = field(default_factory=dict)
    image: dict[str, Any] = field(default_factory=lambda: {"recipe": "own"})

    @property
    def collection(self) -> Path:
        return self.folder / "collections/ansible_collections/serving/gpu_node"

    def build(self) -> None:
        """Write the collection, the inventory and the stand-ins."""
        for role, names in STAND_INS.items():
            tasks = self.collection / "roles" / role / "tasks"
            tasks.mkdir(parents=True)
            for name in names:
                self.stand_in(tasks / f"{name}.yml", f"{role}/{name}")
        (self.collection / "roles/rollout").symlink_to(ROOT / "roles/rollout")
        plugins = self.collection / "plugins"
        plugins.mkdir()
        for kind in ("filter", "module_utils"):
            (plugins / kind).symlink_to(ROOT / "plugins" / kind)
        (plugins / "action").mkdir()
        (plugins / "modules").mkdir()
        for name, body in (("claim", CLAIM), ("follow", FOLLOW)):
            (plugins / "action" / f"{name}.py").write_text(ACTION.replace("        BODY\n", body))
            (plugins / "modules" / f"{name}.py").write_text("")
        for name in ("serve", "rollout", "rollback", "status"):
            text = (ROOT / "playbooks" / f"{name}.yml").read_text()
            (self.folder / f"{name}.yml").write_text(text)
        for name, fact, value in (
            ("plan", "serving_plan_result", self.plan),
            ("artifacts", "serving_image_result", self.image),
        ):
            set_fact = {
                "ansible.builtin.set_fact": {fact: value},
                "failed_when": f"fake.broken | default('') == '{name}'",
                "name": f"Stand in for {name}",
            }
            topology: dict[str, Any] = {"ansible.builtin.set_fact": {"topology_result": {"topology": {"releases": {}}}}}
            topology["name"] = "Stand in for the topology"
            play = {"name": name, "hosts": "gpu_nodes", "gather_facts": False, "tasks": [topology, set_fact]}
            (self.folder / f"{name}.yml").write_text(yaml.safe_dump([play]))

    def stand_in(self, path: Path, what: str) -> None:
        line = f"{{{{ inventory_hostname }}}} {what}"
        note = {"ansible.builtin.shell": f"echo '{line}' >> {self.folder}/calls", "changed_when": False}
        fail = {
            "ansible.builtin.fail": {"msg": f"{what} broke"},
            "when": f"fake.breaks | default('') == '{what}'",
            "name": f"Stand in for {what}",
        }
        path.write_text(yaml.safe_dump([note, fail]))

    def run(self, playbook: str, *arguments: str) -> tuple[dict[str, dict[str, int]], str]:
        """Return the recap's counts by host, and everything that was printed."""
        local = {"ansible_connection": "local", "ansible_python_interpreter": sys.executable}
        hosts = {name: {"fake": fake} for name, fake in self.hosts.items()}
        group = {"hosts": hosts, "vars": {**local, **self.group, "calls": str(self.folder / "calls")}}
        (self.folder / "hosts.json").write_text(json.dumps({"gpu_nodes": group}))
        if not self.collection.exists():
            self.build()
        (self.folder / "calls").unlink(missing_ok=True)
        return run_playbook(
            self.folder,
            self.folder / "hosts.json",
            self.folder / f"{playbook}.yml",
            "-e",
            "ansible_become=no",
            *arguments,
            collections=self.folder / "collections",
        )

    def calls(self, host: str = "") -> list[str]:
        """What was called, in order; of one host without its name."""
        path = self.folder / "calls"
        lines = path.read_text().splitlines() if path.exists() else []
        return [line.removeprefix(f"{host} ") for line in lines if not host or line.startswith(f"{host} ")]
