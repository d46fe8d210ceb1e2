"""Proof that a replica which is out gets no new request, and the wait for the running ones."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gpu_node.engine import Engine
from gpu_node.errors import BalancerError, EngineError, ParseError
from gpu_node.host import Host
from gpu_node.membership import Applied, Membership
from gpu_node.proc import Proc

SAME_ANSWERS = 5  # answers in a row, each over a new connection, that show the new generation
QUIET_SAMPLES = 2
SAMPLE_EVERY_S = 0.25
CONFIRM_AFTER_S = 0.1
REPORT_EVERY_S = 5


@dataclass(frozen=True)
class Sample:
    """One look. connections: nginx's to the replica; requests: the engine's running and waiting, None = no answer."""

    connections: int
    requests: float | None

    @property
    def quiet(self) -> bool:
        return self.connections == 0 and self.requests == 0

    def __str__(self) -> str:
        requests = "the engine does not say how many" if self.requests is None else f"{self.requests:.0f}"
        return f"{requests} requests, {self.connections} connections from nginx"


def drained(samples: Sequence[Sample]) -> bool:
    """Whether the last looks all found nothing. An engine that does not answer proves nothing."""
    return len(samples) >= QUIET_SAMPLES and all(sample.quiet for sample in samples[-QUIET_SAMPLES:])


def prove_out(membership: Membership, host: Host, applied: Applied, timeout_s: float = 15) -> None:
    """Return when new connections to nginx meet the applied generation. Raises BalancerError after timeout_s."""
    if not applied.running:
        return
    deadline = host.clock() + timeout_s
    streak = 0
    while streak < SAME_ANSWERS:
        served = membership.served_generation()
        streak = streak + 1 if served is not None and served >= applied.generation else 0
        if host.clock() >= deadline and streak < SAME_ANSWERS:
            raise BalancerError(f"nginx still answers with generation {served}, not {applied.generation}: see its log")
        host.sleep(0.02)


def look(port: int, engine: Engine, proc: Proc) -> Sample:
    """One sample. Without a listener on the port there is no engine that could run a request."""
    connections = proc.connections_of("nginx", port)
    if not proc.listeners(port):
        return Sample(connections, 0)
    try:
        metrics = engine.metrics(timeout_s=3)
    except (EngineError, ParseError):
        return Sample(connections, None)
    return Sample(connections, metrics.running + metrics.waiting)


def wait_idle(
    take: Callable[[], Sample], host: Host, prefix: str, timeout_s: float, say: Callable[[str], None]
) -> Sample | None:
    """Wait until the replica is idle: None; or what still ran after timeout_s."""
    started = host.clock()
    report = started + REPORT_EVERY_S
    samples: list[Sample] = []
    while True:
        samples = [*samples[1 - QUIET_SAMPLES :], take()]
        if drained(samples):
            return None
        now = host.clock()
        # A quiet look that only lacks its confirmation gets it.
        if now - started >= timeout_s and not samples[-1].quiet:
            return samples[-1]
        if now >= report:
            say(f"{prefix}draining, {now - started:.0f} s: {samples[-1]}")
            report += REPORT_EVERY_S
        host.sleep(CONFIRM_AFTER_S if samples[-1].quiet else SAMPLE_EVERY_S)
