"""The module `follow` on a made-up systemd, and the action on a made-up node."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
from ansible.errors import AnsibleConnectionFailure
from ansible.module_utils.basic import AnsibleModule
from ansible_collections.serving.gpu_node.plugins.action import follow as follow_action
from ansible_collections.serving.gpu_node.plugins.modules import follow

from tests.unit.plugins.module_runner import run_module

Look = dict[str, Any] | Exception


# What systemd says of a unit that it does not know.
GONE = {
    "LoadState": "not-found",
    "ActiveState": "inactive",
    "SubState": "dead",
    "Result": "success",
    "ExecMainStatus": "0",
    "ExecMainCode": "0",
    "InvocationID": "",
    "Description": "job.service",
}


class Systemd:
    """A node's systemd and journal, as far as the module asks them."""

    def __init__(self) -> None:
        self.state = dict(GONE)
        self.journal: list[dict[str, Any]] = []
        # what reaches the journal only when it is told to write what it holds
        self.late: list[dict[str, Any]] = []
        self.calls: list[list[str]] = []

    def begin(self) -> None:
        self.state |= {"LoadState": "loaded", "ActiveState": "active", "SubState": "running", "InvocationID": "i1"}

    def end(self, status: int = 0, code: int = 1, result: str = "success") -> None:
        failed = result != "success"
        self.begin()
        self.state |= {
            "ActiveState": "failed" if failed else "active",
            "SubState": "failed" if failed else "exited",
            "ExecMainStatus": str(status),
            "ExecMainCode": str(code),
            "Result": result,
        }

    def say(self, *messages: Any) -> None:
        for message in messages:
            self.journal.append({"__CURSOR": f"c{len(self.journal) + 1}", "MESSAGE": message})

    def run_command(self, _: Any, argv: list[str], check_rc: bool = False) -> tuple[int, str, str]:
        self.calls.append(argv)
        if argv[:2] == ["systemctl", "show"]:
            return 0, "".join(f"{key}={value}\n" for key, value in self.state.items()), ""
        if argv == ["journalctl", "--sync"]:
            self.journal += self.late
            self.late = []
        elif argv[0] == "journalctl":
            after = next((int(word.split("=c")[1]) for word in argv if word.startswith("--after-cursor=")), 0)
            return 0, "".join(json.dumps(entry) + "\n" for entry in self.journal[after:]), ""
        elif argv[0] == "systemd-run":
            self.begin()
            (description,) = [word for word in argv if word.startswith("--description=")]
            self.state["Description"] = description.partition("=")[2]
        return 0, "", ""

    def verbs(self) -> list[str]:
        return [
            " ".join(call[:2]) for call in self.calls if call[0] == "systemd-run" or call[1] in ("stop", "reset-failed")
        ]


@pytest.fixture
def systemd(monkeypatch: pytest.MonkeyPatch) -> Systemd:
    made = Systemd()
    monkeypatch.setattr(
        AnsibleModule, "run_command", lambda self, argv, check_rc=False: made.run_command(self, argv, check_rc)
    )
    return made


def look(check: bool = False, **options: Any) -> dict[str, Any]:
    return run_module(follow.main, {"unit": "job", "argv": ["/bin/sh", "-c", "build; done"], **options}, check)


def test_a_job_is_started_as_a_unit_without_a_shell(systemd: Systemd) -> None:
    answer = look(environment_files=["/etc/gpu-node/proxy.env"])
    assert (answer["attached"], answer["ended"], answer["lines"]) == (False, False, [])
    (start,) = [call for call in systemd.calls if call[0] == "systemd-run"]
    assert start[-4:] == ["--", "/bin/sh", "-c", "build; done"]
    assert "--unit=job.service" in start
    assert "--property=EnvironmentFile=-/etc/gpu-node/proxy.env" in start


def test_a_job_is_told_from_another_one_of_its_unit(systemd: Systemd) -> None:
    assert look()["same_job"] is True
    assert look(argv=["/bin/sh", "-c", "build; gone"])["same_job"] is False


def test_a_job_with_another_request_is_another_job(systemd: Systemd, tmp_path: Path) -> None:
    request, other = tmp_path / "request.json", tmp_path / "other.json"
    request.write_text('{"runs": 3}')
    other.write_text("{}")
    inputs = [str(request), str(other)]
    assert look(inputs=inputs)["same_job"] is True
    assert look(inputs=inputs)["same_job"] is True
    request.write_text('{"runs": 5}')
    assert look(inputs=inputs)["same_job"] is False
    assert systemd.verbs() == ["systemd-run --quiet"]
    request.write_text('{"runs": 3}')
    assert look(inputs=inputs)["same_job"] is True


def test_a_request_that_is_not_there_starts_nothing(systemd: Systemd, tmp_path: Path) -> None:
    answer = look(inputs=[str(tmp_path / "gone.json")])
    assert answer["failed"]
    assert "gone.json, an input of job: No such file or directory" in answer["msg"]
    assert systemd.calls == []
    # Later looks at a job that runs do not need it.
    systemd.begin()
    assert look(begin=False, inputs=[str(tmp_path / "gone.json")])["ended"] is False


def test_a_running_job_is_not_started_again(systemd: Systemd) -> None:
    systemd.begin()
    systemd.say("one", "two")
    answer = look()
    assert (answer["attached"], answer["lines"], answer["cursor"]) == (True, ["one", "two"], "c2")
    assert systemd.verbs() == []


def test_what_is_left_of_a_finished_job_is_cleared_first(systemd: Systemd) -> None:
    systemd.end(1, result="exit-code")
    assert look()["attached"] is False
    assert systemd.verbs() == ["systemctl stop", "systemctl reset-failed", "systemd-run --quiet"]


def test_each_look_brings_the_lines_since_the_last(systemd: Systemd) -> None:
    systemd.begin()
    systemd.say("one", "two", [104, 255, 105], None, "five")
    answer = look(begin=False, cursor="c1")
    assert answer["lines"] == ["two", "h\ufffdi", "five"]
    assert look(begin=False, cursor=answer["cursor"])["lines"] == []


def test_lines_that_come_late_are_not_lost(systemd: Systemd) -> None:
    systemd.end()
    systemd.say("one")
    systemd.late = [{"__CURSOR": "c2", "MESSAGE": "the last word"}]
    answer = look(begin=False)
    assert (answer["ended"], answer["rc"], answer["lines"]) == (True, 0, ["one", "the last word"])


@pytest.mark.parametrize(
    ("status", "code", "result", "rc"),
    [
        (0, 1, "success", 0),
        (3, 1, "exit-code", 3),
        (9, 2, "signal", 137),
        (6, 3, "core-dump", 134),
        (0, 1, "timeout", 1),
        (0, 0, "resources", 1),
    ],
)
def test_the_exit_code(systemd: Systemd, status: int, code: int, result: str, rc: int) -> None:
    systemd.end(status, code, result)
    assert look(begin=False)["rc"] == rc


def test_a_job_that_a_reboot_took_is_no_success(systemd: Systemd) -> None:
    answer = look(begin=False, cursor="c7")
    assert answer["failed"] is True
    assert "job.service is gone before it ended: the node was restarted, or the unit was stopped" in answer["msg"]


def test_check_mode_starts_nothing(systemd: Systemd) -> None:
    assert look(check=True)["changed"] is True
    assert systemd.calls == []


# The action


class Node:
    """Answers the action's looks, one after the other."""

    def __init__(self, looks: list[Look]) -> None:
        self.looks = looks
        self.asked: list[dict[str, Any]] = []

    def execute(self, module_name: str, module_args: dict[str, Any], task_vars: Any) -> dict[str, Any]:
        assert module_name == "serving.gpu_node.follow"
        self.asked.append(dict(module_args))
        answer = self.looks.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


def seen(*lines: str, cursor: str = "c", attached: bool = False) -> dict[str, Any]:
    return {
        "changed": True,
        "lines": list(lines),
        "cursor": cursor,
        "attached": attached,
        "ended": False,
        "same_job": True,
    }


def ended(rc: int, *lines: str) -> dict[str, Any]:
    return {**seen(*lines), "ended": True, "rc": rc}


Act = Callable[..., tuple[dict[str, Any], Node]]


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    lines: list[str] = []
    monkeypatch.setattr(follow_action, "Display", lambda: SimpleNamespace(display=lines.append))
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    return lines


@pytest.fixture
def act(shown: list[str], monkeypatch: pytest.MonkeyPatch) -> Act:
    def run(looks: list[Look], check: bool = False, **options: Any) -> tuple[dict[str, Any], Node]:
        node = Node(looks)
        task = MagicMock(async_val=0, check_mode=check, args={"unit": "job", "argv": ["x"], **options})
        action = follow_action.ActionModule(task, MagicMock(), MagicMock(), MagicMock(), MagicMock(), MagicMock())
        monkeypatch.setattr(action, "_execute_module", node.execute)
        return action.run(task_vars={"inventory_hostname": "gpu-node"}), node

    return run


def test_lines_are_shown_as_they_come(act: Act, shown: list[str]) -> None:
    result, node = act([seen("one", cursor="c1"), seen("two", "three", cursor="c3"), ended(0, "four")])
    assert shown == [f"  [gpu-node] {word}" for word in ("one", "two", "three", "four")]
    assert (result["rc"], result["changed"], result["lines"]) == (0, True, ["one", "two", "three", "four"])
    assert "failed" not in result
    assert [(args.get("begin", True), args.get("cursor", "")) for args in node.asked] == [
        (True, ""),
        (False, "c1"),
        (False, "c3"),
    ]


def test_a_running_job_is_followed_on(act: Act, shown: list[str]) -> None:
    result, _ = act([seen("from before", attached=True), ended(0)])
    assert shown[0] == "  [gpu-node] job is running already; following it"
    assert result["attached"] is True


def test_another_job_of_the_unit_is_waited_for_and_then_this_one_is_started(act: Act, shown: list[str]) -> None:
    other = {"same_job": False}
    result, node = act(
        [{**seen("old", attached=True), **other}, {**ended(1), **other, "attached": False}, seen("new"), ended(0)]
    )
    assert shown == ["  [gpu-node] job is running already; following it", "  [gpu-node] old", "  [gpu-node] new"]
    assert result["rc"] == 0
    assert [args.get("begin", True) for args in node.asked] == [True, False, True, False]


def test_whose_job_it_is_is_told_when_it_is_met(act: Act) -> None:
    """Somebody may write another request while the job runs: that changes nothing of the job."""
    result, node = act([seen("mine", attached=True), {**ended(0), "same_job": False}])
    assert (result["rc"], len(node.asked)) == (0, 2)


def test_lost_connections_lose_nothing(act: Act, shown: list[str]) -> None:
    lost = AnsibleConnectionFailure("gone")
    result, node = act([seen("one", cursor="c1"), *[lost] * 30, seen("two", cursor="c2"), *[lost] * 30, ended(0)])
    assert shown == ["  [gpu-node] one", "  [gpu-node] two"]
    assert result["rc"] == 0
    # looked again from where the last answer ended
    assert [args["cursor"] for args in node.asked[1:32]] == ["c1"] * 31
    assert node.asked[32]["cursor"] == "c2"


def test_a_connection_that_stays_lost_is_a_failure_that_says_what_goes_on(act: Act) -> None:
    result, _ = act([seen("one"), *[AnsibleConnectionFailure("no route")] * 31])
    assert result["failed"] is True
    assert "the job goes on there; run this again" in result["msg"]
    assert "no route" in result["msg"]


def test_a_node_that_cannot_be_reached_at_all_is_a_failure_at_once(act: Act) -> None:
    """Unreachable, it would end the play before a rollout says where it stopped."""
    result, node = act([AnsibleConnectionFailure("no route")])
    assert (result["failed"], result["msg"]) == (True, "no connection to have job run there; run this again: no route")
    assert len(node.asked) == 1


def test_a_failed_job_fails_with_its_last_lines(act: Act) -> None:
    result, _ = act([seen(*[f"line {number}" for number in range(300)]), ended(7, "the reason")])
    assert result["failed"] is True
    assert result["rc"] == 7
    message = result["msg"].splitlines()
    assert message[0] == "job ended with exit code 7; its last lines (all of them: journalctl -u job):"
    assert message[-2:] == ["line 299", "the reason"]
    assert len(message) == 16
    assert len(result["lines"]) == 200


@pytest.mark.parametrize("before", [[], [seen("one")]])
def test_a_look_that_fails_is_the_tasks_failure(act: Act, before: list[Look]) -> None:
    result, _ = act([*before, {"failed": True, "msg": "job.service is gone"}])
    assert (result["failed"], result["msg"]) == (True, "job.service is gone")


def test_check_mode_asks_once_and_waits_for_nothing(act: Act) -> None:
    result, node = act([{"changed": True, "lines": [], "attached": False, "ended": True}], check=True)
    assert result["changed"] is True
    assert len(node.asked) == 1
