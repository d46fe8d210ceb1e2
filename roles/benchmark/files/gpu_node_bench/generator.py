"""Load at several levels of concurrency: `vllm bench serve` of the serving image, and what its result says."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import subprocess
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpu_node_bench import prompts
from gpu_node_bench.arithmetic import median
from gpu_node_bench.errors import NoFigureError
from gpu_node_bench.levels import MARK

_LEVELS_PY = Path(__file__).with_name("levels.py")
_TAIL = 12
_DATA = "/bench"


@dataclass(frozen=True)
class Load:
    """What the generator sends. requests: for each concurrent stream."""

    levels: tuple[int, ...]
    tokens: int
    requests: int
    workload: str
    ignore_eos: bool
    more: dict[str, Any]
    start_s: float
    limit_s: float


@dataclass(frozen=True)
class Generator:
    """The image that has `vllm bench serve`, and the folder of the model, for its tokenizer."""

    image: str
    model_folder: str
    tokenizer_mode: str = ""


@dataclass(frozen=True)
class Level:
    """A level's result. own_*: what the endpoint's counters have to say of it, warm-up included."""

    streams: int
    tokens_per_s: float
    first_p50_s: float
    first_p99_s: float
    between_p50_s: float
    seconds: float
    own_requests: int
    own_tokens: int
    own_prompt_tokens: int


def arguments(load: Load, streams: int, url: str, model: str, generator: Generator) -> list[str]:
    """The command line after `vllm` of one level."""
    argv = [
        *("bench", "serve", "--backend", "openai-chat", "--base-url", url, "--endpoint", "/v1/chat/completions"),
        *("--model", model, "--served-model-name", model, "--tokenizer", "/model"),
        # The one data set of our own texts that it reads without pandas.
        *("--dataset-name", "sharegpt", "--dataset-path", f"{_DATA}/prompts-{streams}.json", "--disable-shuffle"),
        *("--sharegpt-output-len", str(load.tokens), "--num-prompts", str(load.requests * streams)),
        *("--max-concurrency", str(streams), "--num-warmups", str(streams), "--temperature", "0", "--disable-tqdm"),
        *(
            "--percentile-metrics",
            "ttft,tpot,itl,e2el",
            "--metric-percentiles",
            "50,99",
            "--extra-body",
            json.dumps(load.more),
        ),
        *("--save-result", "--save-detailed", "--result-dir", _DATA, "--result-filename", f"level-{streams}.json"),
    ]
    argv += ["--ignore-eos"] if load.ignore_eos else []
    return argv + (["--tokenizer-mode", generator.tokenizer_mode] if generator.tokenizer_mode else [])


def data_set(load: Load, streams: int) -> list[dict[str, Any]]:
    """The prompts of a level in ShareGPT's form; no two levels share one."""
    first = sum(load.requests * other for other in load.levels if other < streams)
    return [
        {
            "conversations": [
                {"from": "human", "value": prompts.of_workload(load.workload, number)},
                {"from": "gpt", "value": "-"},
            ]
        }
        for number in range(first, first + load.requests * streams)
    ]


def _number(result: dict[str, Any], name: str) -> float:
    value = result.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not value >= 0:
        raise NoFigureError(f"the generator's result has no number for {name}")
    return float(value)


def _numbers(result: dict[str, Any], name: str) -> list[float]:
    values = result.get(name)
    if not isinstance(values, list) or not all(isinstance(value, int | float) for value in values):
        raise NoFigureError(f"the generator's result has no numbers for {name}: was it run with --save-detailed?")
    return [float(value) for value in values]


def parse(result: dict[str, Any], load: Load, streams: int) -> Level:
    """A level out of the generator's JSON. Raises NoFigureError unless every request had its tokens."""
    wanted = load.requests * streams
    errors = [str(error).strip().splitlines()[-1] for error in result.get("errors") or [] if str(error).strip()]
    completed = _number(result, "completed")
    if completed != wanted or _number(result, "failed") or errors:
        raise NoFigureError(
            f"{wanted - completed:g} of {wanted} requests failed{': ' + errors[0][:200] if errors else ''}"
        )
    lengths = _numbers(result, "output_lens")
    early = [length for length in lengths if length != load.tokens]
    if early or len(lengths) != wanted:
        raise NoFigureError(
            f"{len(early) or 'unknown'} of {wanted} requests ended early: not {load.tokens:,} tokens each"
        )
    first = _numbers(result, "ttfts")
    seconds = _number(result, "duration")
    speed = _number(result, "output_throughput")
    if seconds <= 0 or abs(speed * seconds - wanted * load.tokens) > 0.02 * wanted * load.tokens:
        raise NoFigureError(
            f"the generator's figures disagree: {speed:g} tok/s for {seconds:g} s are not {wanted * load.tokens} tokens"
        )
    prompt = _numbers(result, "input_lens")
    return Level(
        streams=streams,
        tokens_per_s=wanted * load.tokens / seconds,
        first_p50_s=median(first),
        first_p99_s=sorted(first)[max(0, -(-len(first) * 99 // 100) - 1)],
        between_p50_s=_number(result, "median_tpot_ms") / 1000,
        seconds=seconds,
        own_requests=wanted + streams,
        own_tokens=(wanted + streams) * load.tokens,
        # The warm-up repeats the first prompt.
        own_prompt_tokens=round(sum(prompt) + streams * prompt[0]),
    )


class Running:
    """The container with the generator: `begin` lets it do a level, `end` waits for it."""

    def __init__(self, process: subprocess.Popen[str], folder: Path, load: Load) -> None:
        self._process = process
        self._folder = folder
        self._load = load
        self._lines: queue.Queue[str | None] = queue.Queue()
        self._tail: list[str] = []
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        for line in self._process.stdout or ():
            self._lines.put(line.rstrip("\n"))
        self._lines.put(None)

    def _wait(self, word: str, number: int, limit_s: float) -> str:
        """What follows the marker. Raises NoFigureError when the container ends, or says nothing for too long."""
        wanted = f"{MARK} {word} {number}"
        while True:
            try:
                line = self._lines.get(timeout=limit_s)
            except queue.Empty:
                raise NoFigureError(
                    f"the generator said nothing for {limit_s:g} s; its last line: {self._last()}"
                ) from None
            if line is None:
                # For whoever asks again: nothing comes any more.
                self._lines.put(None)
                raise NoFigureError(f"the generator ended by itself: {self._last()}")
            if line.startswith(wanted):
                return line.removeprefix(wanted).strip()
            self._tail = [*self._tail, line][-_TAIL:]

    def _last(self) -> str:
        return next((line.strip() for line in reversed(self._tail) if line.strip()), "none")[:300]

    def begin(self, number: int) -> None:
        """Wait until it is loaded and idle."""
        self._wait("ready", number, self._load.start_s)

    def level(self, number: int) -> Level:
        """Do the level. Raises NoFigureError."""
        streams = self._load.levels[number]
        if self._process.stdin is None:
            raise NoFigureError("the generator cannot be told to begin")
        try:
            self._process.stdin.write("\n")
            self._process.stdin.flush()
        except OSError:
            raise NoFigureError(f"the generator ended by itself: {self._last()}") from None
        # It prints nothing while it works: the limit is for the whole level.
        status = self._wait("ended", number, self._load.limit_s)
        if status:
            raise NoFigureError(f"vllm bench serve failed: {status}")
        try:
            result = json.loads((self._folder / f"level-{streams}.json").read_text())
        except (OSError, ValueError):
            raise NoFigureError("vllm bench serve wrote no result") from None
        return parse(result, self._load, streams)


@contextlib.contextmanager
def start(load: Load, url: str, model: str, key: str | None, generator: Generator, folder: Path) -> Iterator[Running]:
    """The generator's container, and its end in every case. Raises NoFigureError."""
    folder.mkdir(parents=True, exist_ok=True)
    jobs = [arguments(load, streams, url, model, generator) for streams in load.levels]
    (folder / "jobs.json").write_text(json.dumps(jobs))
    for streams in load.levels:
        (folder / f"prompts-{streams}.json").write_text(json.dumps(data_set(load, streams)))
        (folder / f"level-{streams}.json").unlink(missing_ok=True)
    secret = folder / "key.env"
    with os.fdopen(os.open(secret, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        file.write(f"OPENAI_API_KEY={key or ''}\n")
    name = f"gpu-node-benchmark-{os.getpid()}"
    try:
        process = subprocess.Popen(
            podman(name, secret, folder, generator),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
    except OSError as error:
        secret.unlink()
        raise NoFigureError(f"podman does not start: {error.strerror}") from None
    try:
        yield Running(process, folder, load)
    finally:
        secret.unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            if process.stdin:
                process.stdin.close()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            subprocess.run(["podman", "rm", "-f", "-t", "0", name], capture_output=True, timeout=60, check=False)
            process.kill()
            process.wait()


def podman(name: str, secret: Path, folder: Path, generator: Generator) -> Sequence[str]:
    """The container: no rights, a root that it cannot write, the host's network to reach the endpoint."""
    return [
        *(
            "podman",
            "--events-backend=none",
            "run",
            "--rm",
            "--replace",
            "--name",
            name,
            "--interactive",
            "--pull=never",
        ),
        *("--network=host", "--log-driver=none", "--read-only", "--cap-drop=all", "--security-opt=no-new-privileges"),
        *("--env-file", str(secret), "--env=HOME=/tmp", "--env=HF_HUB_OFFLINE=1", "--env=VLLM_NO_USAGE_STATS=1"),
        *("--env=DO_NOT_TRACK=1", "--env=OMP_NUM_THREADS=1", "--env=NO_PROXY=*", "--env=no_proxy=*"),
        *("--volume", f"{folder}:{_DATA}", "--volume", f"{generator.model_folder}:/model:ro"),
        *("--volume", f"{_LEVELS_PY}:/levels.py:ro", "--entrypoint=python3", generator.image),
        *("-u", "/levels.py", f"{_DATA}/jobs.json"),
    ]
