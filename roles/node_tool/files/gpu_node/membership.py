"""The one owner of the balancer's membership: renders it from the out-reasons, tests, reloads, proves the takeover."""

import contextlib
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from gpu_node import files, nginx
from gpu_node.config import NodeConfig, load_clients, load_engine_key, served
from gpu_node.errors import BalancerError, RefusedError
from gpu_node.host import Host
from gpu_node.paths import Paths
from gpu_node.proc import Proc
from gpu_node.reasons import Reasons

LOCK_TIMEOUT_S = 60
TAKEOVER_TIMEOUT_S = 15
SECRET_MODE = 0o600
ANNOUNCE_REPORT_S = 10
# What announced its leaving and then neither went out nor said that it stays was killed in between.
FORGOTTEN_AFTER_S = 60


@dataclass(frozen=True)
class Applied:
    """What an apply did. generation: what nginx serves now, or will when it starts."""

    changed: bool
    generation: int
    running: bool


class Membership:
    """nginx's view of which replicas are in."""

    def __init__(self, paths: Paths, node: NodeConfig, host: Host, holder: str) -> None:
        self._paths = paths
        self._node = node
        self._host = host
        self._holder = holder
        self.reasons = Reasons(paths)

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the membership lock: nobody else changes reasons or files meanwhile."""
        with files.lock(self._paths.membership_lock, self._holder, LOCK_TIMEOUT_S):
            yield

    def served_generation(self) -> int | None:
        """The generation that a new connection to nginx meets; None when no status page answers."""
        try:
            status, text = self._host.get(self._node.status_port, "/members", timeout_s=2)
        except OSError:
            return None
        match = re.search(r"\d{1,18}", text, re.ASCII) if status == 200 else None
        return int(match[0]) if match else None

    def _nginx(self) -> int | None:
        """The pid of nginx's master process, when it runs."""
        text = (files.read_text(self._paths.nginx_pid) or "").strip()
        if not text.isdecimal():
            return None
        proc = Proc(self._paths.proc)
        return int(text) if proc.name(int(text)) == "nginx" and proc.process(int(text)) else None

    def _wanted(self, generation: int) -> tuple[str, str]:
        """The texts of members.conf and secrets.conf."""
        secrets = nginx.render_secrets(load_clients(self._paths, self._node.listen), load_engine_key(self._paths))
        out = {replica.index for replica in self._node.replicas if self.reasons.of(replica.index)}
        replicas = [
            replace(replica, port=served(self._paths, self._node, replica.index).port)
            for replica in self._node.replicas
        ]
        return nginx.render_members(replicas, out, secrets, generation), secrets

    def _write(self, anew: bool = False) -> tuple[bool, int, dict[Path, str | None]]:
        """Bring the files up to date; whether they changed, their generation, and what they held before.

        anew: write the next generation even when all else is as it was.
        """
        folder = self._paths.members_conf.parent
        folder.mkdir(parents=True, exist_ok=True)
        folder.chmod(0o700)
        before = {path: files.read_text(path) for path in (self._paths.secrets_conf, self._paths.members_conf)}
        generation = nginx.parse_generation(before[self._paths.members_conf] or "") or 0
        members, secrets = self._wanted(generation)
        if not anew and before == {self._paths.secrets_conf: secrets, self._paths.members_conf: members}:
            return False, generation, before
        # Above what nginx serves too, in case the file was lost.
        generation = max(generation, self.served_generation() or 0) + 1
        members, secrets = self._wanted(generation)
        files.atomic_write(self._paths.secrets_conf, secrets, SECRET_MODE)
        files.atomic_write(self._paths.members_conf, members, SECRET_MODE)
        return True, generation, before

    def render(self) -> Applied:
        """Write the files only. nginx takes them over when it starts, or at the next apply."""
        with self.locked():
            changed, generation, _ = self._write()
            return Applied(changed, generation, self._nginx() is not None)

    def apply(self, anew: bool = False) -> Applied:
        """Make nginx serve the current membership. Raises BalancerError; the former files are back in place then.

        anew: reload in any case, as nginx.conf itself may have changed.
        """
        with self.locked():
            return self._apply(anew)

    def _apply(self, anew: bool = False) -> Applied:
        master = self._nginx()
        # A new generation is the proof of a reload; without nginx there is nothing to prove.
        changed, generation, before = self._write(anew and master is not None)
        # A run killed between the files and the reload left nginx on an older generation: the answer shows it.
        if master is None or (not changed and self.served_generation() == generation):
            return Applied(changed, generation, master is not None)
        test = self._host.run(["nginx", "-t", "-q"])
        if test.returncode:
            for path, text in before.items() if changed else ():
                if text is None:
                    files.remove(path)
                else:
                    files.atomic_write(path, text, SECRET_MODE)
            raise BalancerError(
                f"nginx refuses its configuration, so the membership stays as it was: {test.message};"
                " repair it and run `gpu-node apply`"
            )
        self._host.hang_up(master)
        deadline = self._host.clock() + TAKEOVER_TIMEOUT_S
        while (self.served_generation() or -1) < generation:
            if self._host.clock() >= deadline:
                raise BalancerError(
                    f"nginx (pid {master}) does not serve generation {generation} on"
                    f" http://127.0.0.1:{self._node.status_port}/members {TAKEOVER_TIMEOUT_S} s after the reload:"
                    " its error log says why; then run `gpu-node apply`"
                )
            self._host.sleep(0.05)
        return Applied(True, generation, True)

    def take_out(self, index: int, reason: str, by: str) -> Applied:
        """Add the reason and apply. The reason stands even when BalancerError is raised."""
        with self.locked():
            self.reasons.add(index, reason, by)
            return self._apply()

    def let_in(self, index: int, *removed: str) -> Applied:
        """Remove the reasons and apply. They are gone even when BalancerError is raised."""
        with self.locked():
            for reason in removed:
                self.reasons.remove(index, reason)
            self.stay(index)
            return self._apply()

    def stay(self, index: int) -> None:
        """Take back what was announced when the replica is in. Under the lock."""
        if self._paths.leaving.exists() and not self.reasons.of(index):
            files.remove(self._paths.leaving)

    def _members(self) -> list[int]:
        return [replica.index for replica in self._node.replicas if not self.reasons.of(replica.index)]

    def go_out(
        self,
        index: int,
        reason: str,
        by: str,
        say: Callable[[str], None],
        serves: Callable[[], bool] = lambda: True,
    ) -> Applied:
        """take_out, but the last replica that is in first has /health say that the node leaves.

        Meanwhile it serves on, and a balancer in front of the node has time to send its requests elsewhere. serves:
        whether it can; one that died goes at once. An undrain meanwhile takes back what an operator asked for
        (RefusedError); what a switch or a stop needs is announced anew.
        """
        heard = False
        while True:
            with self.locked():
                # Decided under the lock: of two that stop at once, one goes and the other one is the last.
                last = self._members() == [index] and self._announces() and serves()
                if not last or (heard and self._paths.leaving.exists()):
                    self.reasons.add(index, reason, by)
                    return self._apply()
                if heard and reason == "operator":
                    raise RefusedError(
                        f"replica {index} stays in: while /health announced its leaving, that was taken back"
                        " (`gpu-node undrain`, or a rollout that began)"
                    )
                self._announce(by)
            self._wait_announced(say, lambda: self._members() == [index])
            heard = True

    def announce(self, by: str, say: Callable[[str], None]) -> None:
        """Have /health say that the node leaves, long enough for a balancer in front of it. Nothing goes out yet."""
        heard = False
        while not (heard and self._paths.leaving.exists()):
            with self.locked():
                if not self._members() or not self._announces():
                    return
                self._announce(by)
            self._wait_announced(say, lambda: True)
            heard = True

    def _announces(self) -> bool:
        return self._node.announce_s > 0 and self._nginx() is not None

    def _announced_at(self) -> float | None:
        """When the leaving was announced; None: it was not."""
        try:
            return float(json.loads(files.read_text(self._paths.leaving) or "null")["since"])
        except (ValueError, LookupError, TypeError, RecursionError):
            return None

    def _announce(self, by: str) -> None:
        # One that stands, of a run that was killed, has been heard for some time already.
        if self._announced_at() is None:
            files.open_folder(self._paths.leaving.parent)
            note = {"since": self._host.wall_clock(), "by": by}
            files.atomic_write(self._paths.leaving, json.dumps(note) + "\n")

    def _wait_announced(self, say: Callable[[str], None], alone: Callable[[], bool]) -> None:
        # A clock that was set back must not make it longer.
        left = min((self._announced_at() or 0) + self._node.announce_s - self._host.wall_clock(), self._node.announce_s)
        until = report = self._host.clock()
        until += left
        # Nobody waits on when it was taken back, or another replica came in meanwhile.
        while (now := self._host.clock()) < until and self._paths.leaving.exists() and alone():
            if now >= report:
                say(f"/health says that this node leaves; {until - now:.0f} s until it takes no more requests")
                report += ANNOUNCE_REPORT_S
            self._host.sleep(min(1.0, until - now))

    def forget_leaving(self) -> None:
        """Take back an announcement that nobody follows up: a replica is in, and it is long past."""
        since = self._announced_at()
        if since is None and not self._paths.leaving.exists():
            return
        past = self._host.wall_clock() - (since or 0)
        if self._members() and not 0 <= past < self._node.announce_s + FORGOTTEN_AFTER_S:
            files.remove(self._paths.leaving)

    def reconcile(self) -> None:
        """Apply when files or nginx lag behind the reasons, as after a kill or a repaired nginx. Cheap when not."""
        with self.locked():
            self.forget_leaving()
            text = files.read_text(self._paths.members_conf) or ""
            generation = nginx.parse_generation(text)
            served = self.served_generation()
            members, secrets = self._wanted(generation or 0)
            same = (members, secrets) == (text, files.read_text(self._paths.secrets_conf))
            if not same or (served is not None and served != generation):
                self._apply()
