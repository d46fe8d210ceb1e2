"""The checks of a level, in order."""

from __future__ import annotations

import itertools
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from gpu_node_accept import answers, cards, engine_report, limits, node, secrecy
from gpu_node_accept.cards import Card
from gpu_node_accept.checks import (
    PASS,
    Book,
    CheckError,
    Outcome,
    Title,
    counts,
    failed,
    not_here,
    not_run,
    passed,
    result,
)
from gpu_node_accept.server import Metrics, Server, read_key

ENGINE_ENV = Path("/etc/gpu-node/secrets/engine.env")
RELEASES = Path("/var/lib/gpu-node/replicas")
SITE = "run site.yml"
PROGRAM = Path(__file__).resolve().parents[1]
LEVELS = ("smoke", "standard", "full")
FREE_THEM = "free the cards: `gpu-node leave ID` (ID: `gpu-node status`), then this again, then `gpu-node rollout ID`"
BUSY_S = {"standard": 15.0, "full": 300.0}
# Requests at once on each engine: enough that its cards leave idle. A burn-in takes all that the plan allows.
FEW_STREAMS = 4
STREAM_S = 300.0


def smoke_checks(book: Book, table: Sequence[dict[str, Any]]) -> None:
    """The rows of `gpu-node smoke --json`."""
    for row in table:
        title = Title(f"serves_{'stream' if row['stream'] else 'plain'}", "Engine", f"answers, {_how(row['stream'])}")
        wanted = "a completion by the release that should run"
        if not row["ok"]:
            remedy = "gpu-node logs N shows the engine's own words; gpu-node status the node's"
            book.add(title, row["target"], failed(str(row["error"]), wanted, remedy))
            continue
        first = "" if row["ttft_ms"] is None else f", the first after {row['ttft_ms']:.0f} ms"
        seen = f"{row['completion_tokens']} tokens, {row['tokens_per_s']} a second{first}"
        book.add(title, row["target"], passed(seen, wanted))


def _how(stream: bool) -> str:
    return "streamed" if stream else "plain"


class Acceptance:
    """One run of the checks on this node."""

    def __init__(self, request: dict[str, Any], say: Callable[[str], None]) -> None:
        self.request = request
        self.level = str(request["level"])
        self.replicas: list[dict[str, Any]] = request["replicas"]
        self.gpus = [gpu for replica in self.replicas for gpu in replica["gpus"]]
        self.uuids = [gpu["uuid"] for gpu in self.gpus]
        self.book = Book(say)
        self._say = say
        self.seed = int(time.time()) & 0xFFFFFFFF
        self.held = node.HELD.exists()
        self.versions: dict[str, str] = {}
        self.status: list[dict[str, Any]] = []
        self.data: dict[str, Any] = {}

    # --- the whole

    def run(self) -> None:
        """All checks of the level."""
        if not self.held:
            self._read_status()
        if self.level != "smoke":
            self._cards()
        self._serving()

    def _read_status(self) -> None:
        code, text = node.run(["gpu-node", "status", "--json"], 60)
        try:
            self.status = json.loads(text.splitlines()[-1]) if code == 0 else []
        except (ValueError, IndexError):
            self.status = []

    # --- cards

    def _cards(self) -> None:
        book, target = self.book, "cards"
        titles = {
            "gpu_presence": "the plan's cards are there",
            "gpu_load": "cards at work",
            "gpu_link": "PCIe speed and width under load",
            "gpu_throttle": "slowdown by heat or power supply",
            "gpu_temperature": "temperature under load",
            "gpu_power": "power limit",
            "gpu_pairs": "copies from card to card",
            "gpu_all_reduce": "all-reduce",
            "gpu_dcgm": "DCGM's diagnostics",
            "gpu_ecc": "memory errors",
            "gpu_xid": "errors in the kernel's log since boot",
        }
        title = {name: Title(name, "Cards", what) for name, what in titles.items()}
        if self.request["device"] != "cuda":
            for one in title.values():
                book.add(one, target, not_here(f"profile {self.request['profile']} has no GPUs"))
            return
        try:
            found = node.cards()
        except CheckError as error:
            for one in title.values():
                book.add(one, target, failed(str(error), "an answer of the driver", error.remedy))
            return
        # A plan that was made just now has a swapped card's new UUID; the release has the one that was served.
        served = [gpu for replica in self.replicas for gpu in self._release(replica).get("gpus") or replica["gpus"]]
        book.run(title["gpu_presence"], target, lambda: cards.presence(found, served))
        mine = [card for card in found if card.uuid in self.uuids]
        taken = node.compute_processes(self.uuids)
        watch = node.Watch()
        with watch.running():
            load = book.run(title["gpu_load"], target, lambda: self._load(taken))
        self._look_at_load(title, watch.samples, load)
        self._between(title, taken, mine)
        self._dcgm(title["gpu_dcgm"], taken)
        # Last: what the load brought about counts.
        book.run(title["gpu_ecc"], target, self._ecc)
        book.run(title["gpu_xid"], target, self._xids)

    def _ecc(self) -> Outcome:
        mine = [[card] for card in node.cards() if card.uuid in self.uuids]
        return cards.each(mine, lambda one: cards.ecc(one[0]))

    def _xids(self) -> Outcome:
        try:
            messages = node.kernel_messages()
        except CheckError as error:
            return not_run(str(error), "journalctl -k as root on the node")
        return cards.xids(messages, self.gpus)

    def _load(self, taken: Sequence[str]) -> Outcome:
        """Have the cards work: by the engines that have them, or by the load program when nobody has."""
        seconds = BUSY_S[self.level]
        wanted = f"{seconds:.0f} s without an error"
        if not taken:
            self._say(f"load on {len(self.uuids)} cards, {seconds:.0f} s")
            rows = node.gpu_load(self._image(), self.uuids, PROGRAM, ["load", "--seconds", str(seconds)], seconds + 400)
            error = next((str(row["error"]) for row in rows if row.get("error")), "")
            done = next((row for row in rows if "tflops" in row), None)
            if error or done is None:
                return failed(error or "the load program was ended", wanted, "look for Xid in the kernel's log")
            return passed(f"the load program, {done['seconds']:.0f} s, {done['tflops']} TFLOPS in sum", wanted)
        if self.held or not self.replicas:
            return not_run(f"others have memory on them: {', '.join(taken[:4])}", FREE_THEM, wanted)
        streams = [FEW_STREAMS if self.level == "standard" else self._sequences(one) for one in self.replicas]
        how = f"{' and '.join(map(str, streams))} requests at once"
        self._say(f"the engines generate, {how}, {seconds:.0f} s")
        tokens = self._generate(seconds, streams)
        return passed(f"the engines, {seconds:.0f} s, {how}: {len(tokens)} answers, {sum(tokens):,} tokens", wanted)

    def _generate(self, seconds: float, streams: Sequence[int]) -> list[int]:
        """Have every engine answer so many requests at once, so that its cards work; the tokens of each answer."""
        ends = time.monotonic() + seconds
        # Each prompt is another one, or the prefix cache would take the work away.
        seeds = itertools.count(self.seed)
        errors: list[str] = []
        done: list[int] = []

        def one(replica: dict[str, Any]) -> None:
            length = min(2048, max(64, self._window(replica) // 4))
            try:
                server = self._server(replica)
                while time.monotonic() < ends and not errors:
                    body = {"prompt": answers.token_prompt(length, next(seeds)), "max_tokens": 64, "ignore_eos": True}
                    answer = server.stream(body, STREAM_S)
                    done.append(answer.prompt_tokens + answer.completion_tokens)
            except CheckError as error:
                errors.append(f"replica {replica['index']} does not generate: {error}")

        work = [replica for replica, count in zip(self.replicas, streams, strict=True) for _ in range(count)]
        with ThreadPoolExecutor(len(work)) as pool:
            list(pool.map(one, work))
        if errors:
            raise CheckError(errors[0])
        return done

    def _look_at_load(self, title: dict[str, Title], samples: dict[str, list[Card]], load: Outcome) -> None:
        every = [samples[uuid] for uuid in self.uuids if samples.get(uuid)]
        book = self.book
        if load.verdict != PASS:
            # Idle cards lower the speed of their link, and are cool: nothing of that is an answer.
            for name in ("gpu_link", "gpu_throttle", "gpu_temperature", "gpu_power"):
                book.add(title[name], "cards", not_run(f"there was no load: {load.seen or load.why}", FREE_THEM))
            return
        book.run(title["gpu_link"], "cards", lambda: cards.each(every, cards.link))
        book.run(title["gpu_throttle"], "cards", lambda: cards.each(every, lambda one: cards.throttling(one, True)))
        book.run(title["gpu_temperature"], "cards", lambda: cards.each(every, cards.temperature))
        book.run(title["gpu_power"], "cards", lambda: cards.each(every, cards.power))

    def _between(self, title: dict[str, Title], taken: Sequence[str], mine: Sequence[Card]) -> None:
        groups = [[gpu["uuid"] for gpu in replica["gpus"]] for replica in self.replicas]
        # A person finds a card by its slot.
        address = {card.uuid: card.pci for card in mine}
        floors = [card.data for card in mine] or [cards.DATA["generic"]]
        if taken:
            why = f"processes have the cards: {', '.join(taken[:4])}"
            self.book.add(title["gpu_pairs"], "cards", not_run(why, FREE_THEM))
            for replica in self.replicas:
                self.book.add(title["gpu_all_reduce"], f"replica {replica['index']}", not_run(why, FREE_THEM))
            return
        limit = float(self.request["gpu_timeout"])
        count = len(self.uuids)
        floor = min(one["p2p_gb_s"] for one in floors)

        def pairs() -> Outcome:
            if count < 2:
                return not_here("there is one card only")
            arguments = ["pairs", "--limit", str(limit)]
            # Each way may pass its limit, and then a worker starts anew.
            whole = 200 + count * (count - 1) * 10 + 4 * (limit + 200)
            rows = node.gpu_load(self._image(), self.uuids, PROGRAM, arguments, whole)
            names = [address.get(uuid, uuid) for uuid in next(row["cards"] for row in rows if "cards" in row)]
            found = cards.named_ways(rows, names)
            self.data["pairs"] = found
            if len(found) != count * (count - 1):
                raise CheckError(f"{len(found)} of {count * (count - 1)} ways were looked at")
            return cards.pairs(found, [[address.get(uuid, uuid) for uuid in group] for group in groups], floor)

        self.book.run(title["gpu_pairs"], "cards", pairs)
        for replica, group in zip(self.replicas, groups, strict=True):
            target = f"replica {replica['index']}"
            self.book.run(title["gpu_all_reduce"], target, partial(self._sum, target, group, limit, floors))

    def _sum(self, target: str, group: Sequence[str], limit: float, floors: Sequence[dict[str, Any]]) -> Outcome:
        if len(group) < 2:
            return not_here("the replica has one card")
        rows = node.gpu_load(self._image(), group, PROGRAM, ["allreduce", "--limit", str(limit)], 400 + 6 * limit)
        found = cards.read_sums(rows)
        self.data.setdefault("all_reduce", {})[target] = found
        return cards.all_reduce(found, min(one["all_reduce_gb_s"] for one in floors))

    def _dcgm(self, title: Title, taken: Sequence[str]) -> None:
        level = 3 if self.level == "full" else 1
        if node.run(["dcgmi", "--version"], 30)[0] == 127:
            self.book.add(title, "cards", not_here("dcgmi is not installed on this node"))
        elif taken and level > 1:
            self.book.add(title, "cards", not_run(f"processes have the cards: {', '.join(taken[:4])}", FREE_THEM))
        else:
            self.book.run(
                title, "cards", lambda: cards.dcgm(*node.run(["dcgmi", "diag", "-r", str(level)], 2700), level)
            )

    # --- engines

    def _image(self) -> str:
        image = str((self._release(self.replicas[0]).get("image") or {}).get("ref") or "")
        if not image:
            raise CheckError("replica 0 has no release yet, so there is no image to load the cards from", remedy=SITE)
        return image

    @staticmethod
    def _release(replica: dict[str, Any]) -> dict[str, Any]:
        """What the replica's container is made of; {} before it was served once."""
        try:
            found = json.loads((RELEASES / str(replica["index"]) / "current" / "release.json").read_text("utf-8"))
        except (OSError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}

    def _server(self, replica: dict[str, Any]) -> Server:
        # After a rollback what runs may listen elsewhere, and have another name, than the plan of today says.
        asked = {"served_model_name": self.request["served_model_name"], **replica, **self._release(replica)}
        return Server(int(asked["port"]), read_key(ENGINE_ENV), str(asked["served_model_name"]))

    @staticmethod
    def _sequences(replica: dict[str, Any]) -> int:
        return int(replica["engine_args"].get("max-num-seqs") or 1)

    @staticmethod
    def _window(replica: dict[str, Any]) -> int:
        return int(replica["engine_args"].get("max-model-len") or 0)

    def _serving(self) -> None:
        if self.held:
            why = f"the node is held ({node.HELD}), its replicas are stopped"
            self.book.add(
                Title("serves", "Engine", "engines, answers and limits"), "replicas",
                not_run(why, "`gpu-node rollout ID` brings them up; then this again"),
            )  # fmt: skip
            return
        code, text = node.run(["gpu-node", "smoke", "--json"], 900)
        try:
            smoke_checks(self.book, json.loads(text.splitlines()[-1]))
        except (ValueError, IndexError, KeyError, TypeError):
            title = Title("serves", "Engine", "answers")
            self.book.add(title, "node", failed(f"exit {code}: {text.strip()[-200:]}", "an answer", "gpu-node status"))
        for replica in self.replicas:
            self._replica(replica)

    def _replica(self, replica: dict[str, Any]) -> None:
        target, expected = f"replica {replica['index']}", self.request["expected"]
        book = self.book

        def check(name: str, part: str, what: str, find: Callable[[], Outcome]) -> None:
            book.run(Title(name, part, what), target, find)

        server = self._server_or_none(replica)
        if server is None:
            return
        check("settings", "Engine", "what runs is what the settings say", lambda: self._settings(replica))
        check(
            "kv_tokens", "Engine", "size of the KV cache", lambda: engine_report.kv_tokens(expected, server.metrics())
        )
        check("key_kept", "Engine", "the engine's key is nowhere else", lambda: self._key_kept(replica))
        if self.level == "smoke":
            return
        self._report(replica, server, check)
        arguments = replica["engine_args"]
        times = 5 if self.level == "full" else 3
        tokens = int(self.request["determinism_tokens"])
        check(
            "determinism",
            "Answers",
            "the same answer each time",
            lambda: answers.ask_determinism(server, times, tokens),
        )
        check("drafts", "Answers", "accepted drafts", lambda: answers.ask_drafts(server, arguments))
        check("tool_call", "Answers", "tool calls", lambda: answers.ask_tool(server, arguments))
        check(
            "reasoning", "Answers", "thoughts apart from the answer", lambda: answers.ask_reasoning(server, arguments)
        )
        length = max(256, min(32768, self._window(replica) * 3 // 4))
        seed = self.seed + 1000 * int(replica["index"])
        check(
            "prefix_cache", "Answers", "prefix cache", lambda: answers.ask_prefix_cache(server, arguments, length, seed)
        )
        if self.level == "full":
            self._limits(replica, server, check)

    def _settings(self, replica: dict[str, Any]) -> Outcome:
        release = self._release(replica)
        if not release:
            return failed("no release", "a release", SITE)
        planned = {**replica, "served_model_name": self.request["served_model_name"]}
        return engine_report.settings(planned, release)

    def _key_kept(self, replica: dict[str, Any]) -> Outcome:
        unit = str(replica["unit"])
        log = [(f"the log of {unit}", node.unit_log(unit).encode())]
        texts = itertools.chain(log, secrecy.command_lines(), secrecy.cached_texts(int(replica["index"])))
        return secrecy.key_kept(read_key(ENGINE_ENV), texts)

    def _server_or_none(self, replica: dict[str, Any]) -> Server | None:
        try:
            return self._server(replica)
        except CheckError as error:
            title = Title("key", "Engine", "the engine's key")
            self.book.add(title, f"replica {replica['index']}", failed(str(error), "one key", error.remedy))
            return None

    def _report(self, replica: dict[str, Any], server: Server, check: Callable[..., None]) -> None:
        expected, arguments = self.request["expected"], replica["engine_args"]
        env = self._release(replica).get("env") or {}
        try:
            log = node.unit_log(str(replica["unit"]))
        except CheckError:
            log = ""
        try:
            metrics, engine = server.metrics(), server.version()
            self.versions[f"vLLM, replica {replica['index']}"] = engine
        except (CheckError, ValueError):
            metrics, engine = Metrics({}, {}), ""
        report = engine_report
        check("graph_sizes", "Engine", "CUDA graph sizes", lambda: report.graph_sizes(expected, log, engine))
        check("kv_offload", "Engine", "KV offload", lambda: report.kv_offload(expected, log, metrics, engine))
        check("attention", "Engine", "attention backend", lambda: report.attention_backend(arguments, log, engine))
        check("moe", "Engine", "MoE backend", lambda: report.moe_backend(arguments, log, engine))
        check(
            "all_reduce",
            "Engine",
            "all-reduce backends",
            lambda: report.all_reduce_backends(arguments, env, log, engine),
        )
        check(
            "memory", "Engine", "memory of the cards", lambda: report.memory_after_boot(expected, self._used(replica))
        )

    def _used(self, replica: dict[str, Any]) -> dict[str, int]:
        uuids = [gpu["uuid"] for gpu in replica["gpus"]]
        if not uuids:
            return {}
        return {card.uuid: card.used_mib for card in node.cards() if card.uuid in uuids and card.used_mib is not None}

    def _limits(self, replica: dict[str, Any], server: Server, check: Callable[..., None]) -> None:
        request, window, index = self.request, self._window(replica), int(replica["index"])
        timeout = float(request["limit_timeout"])
        seed = self.seed + 100000 * (index + 1)
        count = self._sequences(replica)
        tokens = int(request["concurrency_tokens"])
        check(
            "full_window", "Limits", "a prompt of the whole window",
            lambda: limits.ask_full_window(server, window, seed, timeout),
        )  # fmt: skip
        check(
            "concurrency", "Limits", f"{count} sequences at once",
            lambda: limits.ask_concurrency(server, count, tokens, seed + 10, timeout),
        )  # fmt: skip
        plan = {**request["expected"], "window": window}
        check(
            "offload_hit", "Limits", "KV offload is used",
            lambda: limits.ask_offload(server, plan, seed + 5000, timeout, self._say),
        )  # fmt: skip
        check("restart", "Limits", "restart with warm caches", lambda: self._restart(replica))

    def _restart(self, replica: dict[str, Any]) -> Outcome:
        index = int(replica["index"])
        row = next((row for row in self.status if row.get("index") == index), None)
        if row is None or row.get("state") != "active":
            return not_run("gpu-node status does not say that the replica is active", "gpu-node status")
        if "operator" in row.get("out", []):
            return not_run("an operator has drained it", f"gpu-node undrain {index}, then this again")
        self._say(f"replica {index}: restarts, drained first")
        limit = float(self.request["start_timeout"]) + float(self.request["stop_timeout"])
        took = limits.restart(str(replica["unit"]), index, node.run, limit)
        history = limits.read_history(node.run(["gpu-node", "history", "--json", "-n", "1000"], 60)[1])
        return limits.start_times(took, history, str(row.get("release")))


def report_of(acceptance: Acceptance, began: float, ended: float) -> dict[str, Any]:
    """The report as JSON."""
    request, checks = acceptance.request, acceptance.book.checks
    return {
        "schema": 1,
        "kind": "acceptance",
        "node": request["node"],
        "level": acceptance.level,
        "profile": request["profile"],
        "device": request["device"],
        "model": request["served_model_name"],
        "began": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(began)),
        "seconds": round(ended - began, 1),
        "result": result(checks),
        "counts": counts(checks),
        "releases": {str(row.get("index")): row.get("release") for row in acceptance.status},
        "versions": acceptance.versions,
        "data": acceptance.data,
        "checks": [check.as_row() for check in checks],
    }


def main(arguments: Sequence[str]) -> int:
    """Run the request and write the report; 0 when there is one, whatever it says."""
    if len(arguments) != 2:
        print("usage: python3 -m gpu_node_accept REQUEST REPORT", file=sys.stderr)
        return 2
    source, target = map(Path, arguments)
    request = json.loads(source.read_text(encoding="utf-8"))
    if request.get("level") not in LEVELS:
        print(f"level {request.get('level')!r} is none of {', '.join(LEVELS)}", file=sys.stderr)
        return 2
    began = time.time()
    # An old report must not be taken for this run's.
    target.unlink(missing_ok=True)
    acceptance = Acceptance(request, lambda text: print(text, flush=True))
    acceptance.run()
    fresh = target.with_suffix(".new")
    fresh.write_text(json.dumps(report_of(acceptance, began, time.time()), indent=1) + "\n", encoding="utf-8")
    os.replace(fresh, target)
    return 0
