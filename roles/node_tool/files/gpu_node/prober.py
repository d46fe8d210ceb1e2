"""Takes a replica that does not answer or does not generate out of the balancer, and back in once it generates.

`look` and `judge` decide and are pure; `Prober` does. A replica is never killed from here.
"""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from enum import Enum
from typing import Any

from gpu_node import files
from gpu_node import metrics as own_metrics
from gpu_node.config import ProberConfig, ReplicaConfig
from gpu_node.engine import Metrics
from gpu_node.errors import EngineError, ParseError, ToolError
from gpu_node.tool import Tool


@dataclass(frozen=True)
class Memory:
    """What is known from the passes before.

    progress: the counters that move while an engine works. proofs, proof_tokens: how many generations the prober asked
    for since the unit started, and their prompts' tokens; each gave one token. Who counts its work takes them off.
    """

    failures: int = 0
    progress: tuple[float, float, float] | None = None
    moved_at: float = 0.0
    proofs: int = 0
    proof_tokens: int = 0


class Verdict(Enum):
    """What a look leads to."""

    KEEP = "keep"
    OUT = "out"
    GENERATE = "generate"


def progress_of(metrics: Metrics) -> tuple[float, float, float]:
    """Prompt tokens count only when a prefill ends; during a long one only the KV use moves."""
    return metrics.generation_tokens, metrics.prompt_tokens, metrics.kv_usage


def look(
    memory: Memory, metrics: Metrics | None, now: float, limits: ProberConfig, *, out: bool, may_generate: bool
) -> tuple[Memory, Verdict, str]:
    """Decide after one look; the text says why. metrics None: /health or /metrics did not answer.

    out: the prober has taken it out, so only a generation can prove it. may_generate: nobody drains it for quiet.
    A frozen engine's gauges do not even count new requests, so an idle engine has to generate now and then as well.
    """
    if metrics is None:
        memory = replace(memory, failures=memory.failures + 1)
        if memory.failures >= limits.http_failures:
            return memory, Verdict.OUT, f"HTTP did not answer {memory.failures} times in a row"
        return memory, Verdict.KEEP, "HTTP did not answer"
    progress = progress_of(metrics)
    moved = progress != memory.progress
    memory = replace(memory, failures=0, progress=progress, moved_at=now if moved else memory.moved_at)
    still = now - memory.moved_at
    if out:
        return memory, Verdict.GENERATE if may_generate else Verdict.KEEP, "out, generating for a proof"
    if metrics.running + metrics.waiting > 0:
        if still >= limits.stall_s:
            busy = f"{metrics.running:.0f} running and {metrics.waiting:.0f} waiting requests"
            return memory, Verdict.OUT, f"{busy}, but nothing moved for {still:.0f} s"
        return memory, Verdict.KEEP, "busy"
    if still >= limits.idle_probe_s and may_generate:
        return memory, Verdict.GENERATE, f"idle for {still:.0f} s, generating for a proof"
    return memory, Verdict.KEEP, "idle"


def judge(memory: Memory, generated: bool, after: Metrics | None, now: float, *, out: bool) -> tuple[Memory, bool]:
    """Decide after a generation; whether the replica is to be in (True) or out. after: metrics when it failed.

    An engine in which something moved meanwhile is not frozen: the proof only queued behind a long prefill.
    """
    if generated:
        return replace(memory, failures=0, moved_at=now), True
    if after is not None and progress_of(after) != memory.progress:
        return replace(memory, failures=0, progress=progress_of(after), moved_at=now), not out
    return memory, False


def parse_memory(text: str | None) -> Memory:
    """The memory from its file; a fresh one when there is none or it is not understood."""
    try:
        value: Any = json.loads(text or "null")
        progress = value["progress"]
        return Memory(
            int(value["failures"]),
            None if progress is None else (float(progress[0]), float(progress[1]), float(progress[2])),
            float(value["moved_at"]),
            # An earlier version did not count them.
            int(value.get("proofs", 0)),
            int(value.get("proof_tokens", 0)),
        )
    except (ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError):
        return Memory()


class Prober:
    """The prober of one replica."""

    def __init__(self, tool: Tool, replica: ReplicaConfig) -> None:
        self._tool = tool
        self._replica = replica
        self._limits = tool.node.prober

    def _metrics(self) -> Metrics | None:
        engine = self._tool.engine(self._replica.index)
        if not engine.healthy(self._limits.http_timeout_s):
            return None
        try:
            return engine.metrics(self._limits.http_timeout_s)
        except (EngineError, ParseError):
            return None

    def _generates(self) -> int | None:
        """How many tokens the prompt had; None when nothing came."""
        engine = self._tool.engine(self._replica.index)
        try:
            done = engine.complete(self._tool.served(self._replica.index).model, 1, self._limits.stall_s)
        except EngineError:
            return None
        return done.prompt_tokens

    def run(self) -> str:
        """One pass; a line that says what it found."""
        tool, index = self._tool, self._replica.index
        file = tool.paths.probe_memory(index)
        state = tool.unit_state(index)
        if state.active != "active":
            # The unit's own steps own its membership until it serves again.
            files.remove(file) if file.exists() else None
            return f"replica {index}: not probed, its unit is {state.word}"
        reasons = tool.reasons.of(index)
        # `unit` on an active unit is what a killed ready step or a boot step that came late left behind.
        out = bool({"unit", "prober"} & set(reasons))
        may_generate = not set(reasons) - {"unit", "prober"}
        memory, verdict, why = look(
            parse_memory(files.read_text(file)), self._metrics(), tool.host.clock(), self._limits,
            out=out, may_generate=may_generate,
        )  # fmt: skip
        if verdict is Verdict.GENERATE:
            prompt_tokens = self._generates()
            generated = prompt_tokens is not None
            after = None if generated else self._metrics()
            memory, healthy = judge(memory, generated, after, tool.host.clock(), out=out)
            if prompt_tokens is not None:
                memory = replace(memory, proofs=memory.proofs + 1, proof_tokens=memory.proof_tokens + prompt_tokens)
            if healthy and out:
                verdict, why = self._let_in()
            elif not healthy:
                verdict, why = Verdict.OUT, f"{why}: no token within {self._limits.stall_s} s"
        if verdict is Verdict.OUT and "prober" not in reasons:
            tool.membership.take_out(index, "prober", f"prober: {why}")
            why += "; taken out of the balancer"
        files.atomic_write(file, json.dumps(asdict(memory)))
        return f"replica {index}: {why}"

    def _let_in(self) -> tuple[Verdict, str]:
        tool, index = self._tool, self._replica.index
        with tool.membership.locked():
            # systemd changes the state before it runs the stop step, and that step needs this lock for its reason:
            # an active unit here means that no reason of a stop is removed.
            if tool.unit_state(index).active != "active":
                return Verdict.KEEP, "generates, but its unit is being stopped"
            tool.reasons.remove(index, "unit")
            tool.reasons.remove(index, "prober")
            tool.membership.stay(index)
        tool.membership.apply()
        return Verdict.KEEP, "generates; back in the balancer"


@contextmanager
def _reported(tool: Tool, said: dict[str, str], key: str) -> Iterator[None]:
    """Say an error once, not at every pass; the loop goes on."""
    try:
        yield
    except (ToolError, OSError) as error:
        if said.get(key) != str(error):
            tool.host.warn(f"{key}: {error}")
            said[key] = str(error)


def probe_once(tool: Tool) -> None:
    """One pass over all replicas, then let nginx catch up with the reasons. Raises ToolError."""
    for replica in tool.node.replicas:
        tool.host.say(Prober(tool, replica).run())
    tool.membership.reconcile()
    own_metrics.write(tool)


def probe_for_ever(tool: Tool, every_s: float) -> None:
    """A thread for each replica, so that a stalled one does not delay the others. Ends when node.json changes."""
    config = tool.paths.node_json
    version = files.read_text(config)
    ended = threading.Event()

    def watch(replica: ReplicaConfig) -> None:
        said: dict[str, str] = {}
        before = ""
        while not ended.wait(every_s):
            with _reported(tool, said, f"replica {replica.index}"):
                line = Prober(tool, replica).run()
                if "balancer" in line and line != before:
                    tool.host.say(line)
                before = line

    threads = [threading.Thread(target=watch, args=(replica,), daemon=True) for replica in tool.node.replicas]
    for thread in threads:
        thread.start()
    said: dict[str, str] = {}
    while files.read_text(config) == version:
        with _reported(tool, said, "balancer"):
            tool.membership.reconcile()
        with _reported(tool, said, "metrics"):
            own_metrics.write(tool)
        ended.wait(every_s)
    tool.host.say(f"{config} changed: starting anew")
    ended.set()
