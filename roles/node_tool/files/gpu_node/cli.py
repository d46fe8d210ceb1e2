"""The command line of `gpu-node`."""

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence

from gpu_node import drain, files, history, prober, releases, smoke, status
from gpu_node.config import load_node
from gpu_node.errors import ConfigError, ToolError
from gpu_node.host import Host
from gpu_node.live import LiveNode
from gpu_node.membership import Applied
from gpu_node.paths import Paths
from gpu_node.rollout import Rollout, refuse_while_held
from gpu_node.switch import GO_ON, OUTCOMES, half_switched, switch, way_back
from gpu_node.table import as_table
from gpu_node.tool import Tool
from gpu_node.unit import UnitSteps, stop_without_configuration

UNIT_STEPS = ("unit-prepare", "unit-run", "unit-ready", "unit-stop", "unit-cleanup")
USAGE_ERROR = 2


def _status(tool: Tool, options: argparse.Namespace) -> int:
    table = status.rows(tool)
    tool.host.say(json.dumps(table) if options.json else status.as_text(tool, table))
    return 0


def _drain(tool: Tool, options: argparse.Namespace) -> int:
    index = options.replica
    tool.node.replica(index)
    stood = "operator" in tool.reasons.of(index)
    try:
        applied = tool.membership.go_out(
            index, "operator", tool.by, lambda text: tool.host.say(f"replica {index}: {text}")
        )
        drain.prove_out(tool.membership, tool.host, applied)
    except ToolError:
        if not stood:
            tool.reasons.remove(index, "operator")
            tool.membership.stay(index)
        raise
    tool.host.say(f"replica {index}: out of the balancer (generation {applied.generation})")
    timeout_s = tool.node.drain_timeout_s if options.timeout is None else options.timeout
    if left := tool.wait_idle(index, timeout_s):
        tool.host.say(f"replica {index}: still {left} after {timeout_s} s; it stays out")
        return 1
    tool.host.say(f"replica {index}: drained")
    return 0


def _undrain(tool: Tool, options: argparse.Namespace) -> int:
    index = options.replica
    tool.node.replica(index)
    tool.membership.let_in(index, "operator")
    left = tool.reasons.of(index)
    tool.host.say(f"replica {index}: " + (f"still out: {', '.join(left)}" if left else "in the balancer"))
    return 0


def _logs(tool: Tool, options: argparse.Namespace) -> int:
    follow = ["--follow"] if options.follow else []
    unit = tool.node.replica(options.replica).unit
    tool.host.become(["journalctl", "--no-pager", "-u", unit, "-n", str(options.lines), *follow])


def _probe(tool: Tool, options: argparse.Namespace) -> int:
    if options.every is None:
        prober.probe_once(tool)
    else:
        prober.probe_for_ever(tool, options.every or tool.node.prober.interval_s)
    return 0


def _switch_to(tool: Tool, index: int, find: Callable[[LiveNode], str], force_drain: bool) -> int:
    tool.node.replica(index)
    # A rollout keeps the first lock all the time, also between two replicas.
    with (
        files.lock(tool.paths.rollout_lock, tool.by, timeout_s=0),
        files.lock(tool.paths.switch_lock, tool.by, timeout_s=0),
    ):
        refuse_while_held(tool.paths)
        node = LiveNode(tool)
        try:
            journal = switch(node, index, find(node), force_drain)
        except (ToolError, OSError) as error:
            if not half_switched(node, index):
                raise
            print(f"gpu-node: error: {error}; {GO_ON}", file=sys.stderr)
            return OUTCOMES["failed"]
    if journal is None:
        return 0
    if journal.outcome != "new":
        print(f"gpu-node: error: {journal.error}", file=sys.stderr)
    return OUTCOMES[str(journal.outcome)]


def _switch(tool: Tool, options: argparse.Namespace) -> int:
    return _switch_to(tool, options.replica, lambda _: str(options.release), options.force_drain)


def _rollback(tool: Tool, options: argparse.Namespace) -> int:
    return _switch_to(tool, options.replica, lambda node: way_back(node, options.replica), options.force_drain)


def _rollout(tool: Tool, options: argparse.Namespace) -> int:
    return Rollout(tool, options.rollout, options.force_drain).run(options.bake, options.error_budget)


def _leave(tool: Tool, options: argparse.Namespace) -> int:
    return Rollout(tool, options.rollout, options.force_drain).leave()


def _history(tool: Tool, options: argparse.Namespace) -> int:
    lines = history.read(tool.paths)[-options.lines :] if options.lines else []
    tool.host.say(json.dumps(lines) if options.json else history.as_text(lines))
    return 0


def _releases(tool: Tool, options: argparse.Namespace) -> int:
    table = releases.rows(tool)
    tool.host.say(json.dumps(table) if options.json else as_table(releases.COLUMNS, table))
    return 0


def _report(tool: Tool, applied: Applied) -> int:
    state = "changed" if applied.changed else "unchanged"
    where = "served by nginx" if applied.running else "nginx does not run"
    tool.host.say(f"balancer membership {state} (generation {applied.generation}, {where})")
    return 0


def _render(tool: Tool, _: argparse.Namespace) -> int:
    applied = tool.membership.render()
    tool.host.say(f"balancer files {'changed' if applied.changed else 'unchanged'} (generation {applied.generation})")
    return 0


def _apply(tool: Tool, _: argparse.Namespace) -> int:
    return _report(tool, tool.membership.apply(anew=True))


def _smoke(tool: Tool, options: argparse.Namespace) -> int:
    table = smoke.smoke(tool)
    tool.host.say(json.dumps(table) if options.json else smoke.as_text(table))
    return 0 if all(row["ok"] for row in table) else 1


def _boot(tool: Tool, _: argparse.Namespace) -> int:
    """Before nginx starts: nothing is in that has not generated since."""
    with tool.membership.locked():
        for replica in tool.node.replicas:
            if tool.unit_state(replica.index).active != "active":
                tool.reasons.add(replica.index, "unit", "boot")
    try:
        return _report(tool, tool.membership.apply())
    except ToolError as error:
        # On a node that is being set up the secrets come later; the prober brings nginx in line in any case.
        tool.host.warn(str(error))
        return 0


def _unit_step(tool: Tool, options: argparse.Namespace) -> int:
    steps = UnitSteps(tool, options.replica)
    {
        "unit-prepare": steps.prepare,
        "unit-run": steps.run,
        "unit-ready": steps.ready,
        "unit-stop": steps.stop,
        "unit-cleanup": steps.cleanup,
    }[options.verb]()
    return 0


def _index(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is no replica index: it is a number from 0")
    return int(text)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1
    if not 0 <= seconds < 1e9:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds")
    return seconds


def _share(text: str) -> float:
    try:
        share = float(text)
    except ValueError:
        share = -1
    if not 0 <= share <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no share from 0 to 1")
    return share


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is no count")
    return int(text)


def parser() -> argparse.ArgumentParser:
    """The verbs and their options."""
    main_parser = argparse.ArgumentParser(prog="gpu-node", description="The serving node's own command.")
    verbs = main_parser.add_subparsers(dest="verb", required=True, metavar="VERB")

    def verb(
        name: str, does: Callable[[Tool, argparse.Namespace], int], help_text: str, replica: bool = False
    ) -> argparse.ArgumentParser:
        sub = verbs.add_parser(name, help=help_text, description=help_text)
        sub.set_defaults(does=does)
        if replica:
            sub.add_argument("replica", type=_index, metavar="N", help="index of the replica")
        return sub

    verb("status", _status, "Show the replicas.").add_argument("--json", action="store_true")
    sub = verb("drain", _drain, "Take a replica out and wait for its requests. Exit 1: some still run.", replica=True)
    sub.add_argument("--timeout", type=_seconds, metavar="S", help="seconds to wait (default: drain_timeout_s)")
    verb("undrain", _undrain, "Let a drained replica in again.", replica=True)
    sub = verb("logs", _logs, "Show a replica's journal.", replica=True)
    sub.add_argument("--follow", action="store_true")
    sub.add_argument("--lines", type=int, default=100, metavar="K")
    sub = verb("probe", _probe, "Probe the replicas once, or for ever.")
    sub.add_argument(
        "--every", type=_seconds, nargs="?", const=0, metavar="S", help="for ever, every S seconds (default: interval)"
    )
    sub = verb(
        "switch", _switch, replica=True,
        help_text="Switch a replica to a release. Exit 3: rolled back; 4: it stays out; 2: refused.",
    )  # fmt: skip
    sub.add_argument("release", metavar="RELEASE", help="id of the release")
    sub.add_argument("--force-drain", action="store_true", help="stop although requests still run")
    sub = verb("rollback", _rollback, "Switch a replica to its previous release.", replica=True)
    sub.add_argument("--force-drain", action="store_true", help="stop although requests still run")
    sub = verb(
        "rollout", _rollout,
        help_text="Bring every replica to what rollout ID wants, then watch them. Run again, it goes on."
        " Exit 2: refused; 3: a replica was rolled back; 4: one stays out; 5: the watch found errors.",
    )  # fmt: skip
    sub.add_argument("rollout", metavar="ID", help="id of the rollout, as in wanted.json")
    sub.add_argument("--bake", type=_seconds, default=0, metavar="S", help="seconds to watch (default: 0)")
    sub.add_argument(
        "--error-budget", type=_share, default=0.0, metavar="SHARE",
        help="share of answers on /v1 that may have a status from 500 on (default: 0)",
    )  # fmt: skip
    sub.add_argument("--force-drain", action="store_true", help="stop although requests still run")
    sub = verb(
        "leave", _leave,
        help_text="Take the whole node out and stop its replicas until `gpu-node rollout ID`. Exit 2: refused.",
    )  # fmt: skip
    sub.add_argument("rollout", metavar="ID", help="id of the rollout, as in wanted.json")
    sub.add_argument("--force-drain", action="store_true", help="stop although requests still run")
    sub = verb("history", _history, "Show the switches that this node has finished.")
    sub.add_argument("--json", action="store_true")
    sub.add_argument("-n", "--lines", type=_count, default=20, metavar="K", help="the last K (default: 20)")
    verb("releases", _releases, "Show the releases on this node.").add_argument("--json", action="store_true")
    verb("render", _render, "Write the balancer's files; nginx is left alone.")
    verb("apply", _apply, "Write the balancer's files, test them and reload nginx.")
    sub = verb("smoke", _smoke, "Ask every replica and the balancer for completions. Exit 1: one failed.")
    sub.add_argument("--json", action="store_true")
    verb("boot", _boot, "Step of gpu-node-boot.service.")
    for name in UNIT_STEPS:
        verb(name, _unit_step, "Step of a replica's unit.", replica=True)
    return main_parser


def _author(verb: str) -> str:
    user = os.environ.get("SUDO_USER") or os.environ.get("USER") or f"uid {os.getuid()}"
    return f"gpu-node {verb} (pid {os.getpid()}, {user})"


def run(arguments: Sequence[str] | None, paths: Paths, host: Host) -> int:
    """Do what the arguments say; the exit code. Expected errors go to stderr."""
    options = parser().parse_args(arguments)
    try:
        try:
            node = load_node(paths)
        except ConfigError as error:
            if options.verb not in ("unit-stop", "unit-cleanup"):
                raise
            # A running container must come to its end although somebody removed the configuration.
            host.warn(str(error))
            stop_without_configuration(host, options.replica, remove=options.verb == "unit-cleanup")
            return 0
        does: Callable[[Tool, argparse.Namespace], int] = options.does
        return does(Tool(paths, node, host, _author(options.verb)), options)
    except ToolError as error:
        print(f"gpu-node: error: {error}", file=sys.stderr)
    except PermissionError as error:
        print(f"gpu-node: error: {error.filename}: permission denied: run it as root", file=sys.stderr)
    except OSError as error:
        print(f"gpu-node: error: {error}", file=sys.stderr)
    return 1 if options.verb in UNIT_STEPS else USAGE_ERROR


def main() -> int:
    """Entry point."""
    return run(None, Paths.from_environment(), Host())
