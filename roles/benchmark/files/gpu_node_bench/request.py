"""What is asked of a run: a JSON file, checked as a whole before anything is measured."""

from __future__ import annotations

import json
import stat
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from gpu_node_bench.errors import BenchError
from gpu_node_bench.generator import Generator
from gpu_node_bench.prompts import WORKLOADS

PARTS = ("decode", "first", "levels")
KINDS = ("replica", "balancer", "endpoint")


@dataclass(frozen=True)
class Options:
    """The method. Tokens and counts are whole numbers, times are seconds, limits are shares."""

    workloads: tuple[str, ...] = ("code", "prose", "math")
    runs: int = 3
    tokens_short: int = 64
    tokens_long: int = 896
    # The documents' runs end where the model ends; what comes after its end mark is text that nobody would ask for.
    ignore_eos: bool = False
    thinking_off: bool = True
    short_runs: int = 5
    prompt_lengths: tuple[int, ...] = (107_016, 211_722)
    # Prompt lengths are for this window; a smaller one has them in proportion.
    reference_window: int = 262_144
    # The model's window where the endpoint does not say; 0: it has to.
    window: int = 0
    long_runs: int = 2
    # For each engine behind the endpoint.
    levels: tuple[int, ...] = (1, 8, 32, 64, 128)
    level_tokens: int = 512
    level_requests: int = 2
    level_workload: str = "code"
    spread_limit: float = 0.15
    # Of what takes well below a second: a short prompt, or one that is cached.
    first_spread_limit: float = 0.5
    first_token_s: float = 900.0
    stall_s: float = 60.0
    level_limit_s: float = 3600.0
    generator_start_s: float = 600.0
    busy_wait_s: float = 60.0
    repeats: int = 2
    tokens_per_word_least: float = 0.8
    tokens_per_word_most: float = 3.0
    sample_interval_ms: int = 1000

    def more(self) -> dict[str, Any]:
        """The request fields that the method asks for."""
        fields_of_request: dict[str, Any] = {"ignore_eos": True} if self.ignore_eos else {}
        return fields_of_request | ({"chat_template_kwargs": {"thinking": False}} if self.thinking_off else {})


@dataclass(frozen=True)
class Target:
    """An endpoint to measure.

    metrics: base URLs of all the engines behind it, for their counters; neighbours: those of the node's other engines.
    proofs, neighbours_proofs: files in which the node's prober counts what it asks them while they are idle.
    replicas: how many engines share its streams. max_num_seqs: what each of them decodes at once, 0: not known.
    """

    name: str
    kind: str
    url: str
    model: str
    key_file: str
    metrics: tuple[str, ...]
    proofs: tuple[str, ...]
    neighbours: tuple[str, ...]
    neighbours_proofs: tuple[str, ...]
    replicas: int
    max_num_seqs: int
    parts: tuple[str, ...]
    gpus: tuple[str, ...]
    release: str


@dataclass(frozen=True)
class Request:
    """The whole of it. node: what the report shows of the machine, taken over as it is."""

    name: str
    profile: str
    release: str
    options: Options
    targets: tuple[Target, ...]
    generator: Generator | None
    node: dict[str, Any]


def _fail(where: str, wanted: str, found: Any) -> BenchError:
    text = json.dumps(found)
    return BenchError(f"{where}: expected {wanted}, found {text if len(text) <= 60 else text[:57] + '...'}")


_NAMES: dict[type[Any], str] = {
    str: "a text",
    int: "a whole number",
    list: "a list",
    dict: "an object",
    bool: "true or false",
}


def _take(value: dict[str, Any], name: str, kind: type[Any], where: str, default: Any = None) -> Any:
    found: Any = value.get(name, default)
    if type(found) is not kind:
        raise _fail(f"{where}.{name}", _NAMES[kind], found)
    return found


def _texts(value: dict[str, Any], name: str, where: str) -> tuple[str, ...]:
    found = _take(value, name, list, where, [])
    if not all(isinstance(item, str) for item in found):
        raise _fail(f"{where}.{name}", "a list of texts", found)
    return tuple(found)


def _count(value: dict[str, Any], name: str, where: str, least: int) -> int:
    found = _take(value, name, int, where, least)
    if found < least:
        raise _fail(f"{where}.{name}", f"a whole number, at least {least}", found)
    return int(found)


_AT_LEAST: dict[str, float] = {
    "runs": 2,
    "tokens_short": 1,
    "short_runs": 1,
    "long_runs": 1,
    "level_tokens": 1,
    "level_requests": 1,
    "reference_window": 1,
    "sample_interval_ms": 100,
    "first_token_s": 1,
    "stall_s": 1,
    "level_limit_s": 1,
    "generator_start_s": 1,
}


def _list(name: str, found: Any, where: str) -> tuple[Any, ...]:
    """Workloads in their order, or numbers in ascending order; each once."""

    def right(item: Any) -> bool:
        return item in WORKLOADS if name == "workloads" else type(item) is int and item >= 1

    if not isinstance(found, list) or not all(right(item) for item in found) or len(set(found)) != len(found):
        words = f"out of {', '.join(WORKLOADS)}" if name == "workloads" else "of whole numbers from 1"
        raise _fail(where, f"a list {words}, none twice", found)
    return tuple(found if name == "workloads" else sorted(found))


def options(value: dict[str, Any], where: str = "options") -> Options:
    """The checked options. Raises BenchError."""
    known = {field.name: field for field in fields(Options)}
    if unknown := sorted(set(value) - set(known)):
        raise BenchError(f"{where}: there is no option {unknown[0]!r}; the known ones are {', '.join(known)}")
    taken: dict[str, Any] = {}
    for name, found in value.items():
        default = known[name].default
        if isinstance(default, tuple):
            taken[name] = _list(name, found, f"{where}.{name}")
        elif isinstance(default, bool):
            taken[name] = _take(value, name, bool, where)
        elif isinstance(default, str):
            if found not in WORKLOADS:
                raise _fail(f"{where}.{name}", f"one of {', '.join(WORKLOADS)}", found)
            taken[name] = found
        else:
            whole, least = isinstance(default, int), _AT_LEAST.get(name, 0)
            if type(found) not in ((int,) if whole else (int, float)) or found < least:
                raise _fail(f"{where}.{name}", f"a {'whole ' if whole else ''}number, at least {least:g}", found)
            taken[name] = found if whole else float(found)
    made = Options(**taken)
    if made.tokens_long <= made.tokens_short:
        raise BenchError(
            f"{where}: tokens_long ({made.tokens_long}) must be larger than tokens_short ({made.tokens_short}): "
            "the speed is of what is between"
        )
    if made.tokens_per_word_most < made.tokens_per_word_least:
        raise BenchError(f"{where}: tokens_per_word_most is below tokens_per_word_least")
    return made


def _target(value: Any, where: str) -> Target:
    if not isinstance(value, dict):
        raise _fail(where, "an object", value)
    kind = _take(value, "kind", str, where, "endpoint")
    if kind not in KINDS:
        raise _fail(f"{where}.kind", f"one of {', '.join(KINDS)}", kind)
    url = _take(value, "url", str, where)
    parts = _texts(value, "parts", where) if "parts" in value else PARTS
    if wrong := [part for part in parts if part not in PARTS]:
        raise _fail(f"{where}.parts", f"parts out of {', '.join(PARTS)}", wrong[0])
    metrics = _texts(value, "metrics", where) if "metrics" in value else (url.rstrip("/").removesuffix("/v1"),)
    if kind != "endpoint" and not metrics:
        raise _fail(f"{where}.metrics", f"the engines' URLs, without which a {kind} is not measured", [])
    return Target(
        name=_take(value, "name", str, where, "endpoint"),
        kind=kind,
        url=url,
        model=_take(value, "model", str, where),
        key_file=_take(value, "key_file", str, where, ""),
        metrics=metrics,
        proofs=_texts(value, "proofs", where),
        neighbours=_texts(value, "neighbours", where),
        neighbours_proofs=_texts(value, "neighbours_proofs", where),
        replicas=_count(value, "replicas", where, 1),
        max_num_seqs=_count(value, "max_num_seqs", where, 0),
        parts=parts,
        gpus=_texts(value, "gpus", where),
        release=_take(value, "release", str, where, ""),
    )


def parse(value: Any) -> Request:
    """The checked request. Raises BenchError, naming the field, what it must be and what it is."""
    if not isinstance(value, dict):
        raise _fail("request", "an object", value)
    targets = tuple(_target(item, f"targets[{at}]") for at, item in enumerate(_take(value, "targets", list, "request")))
    names = [target.name for target in targets]
    if not targets or len(set(names)) != len(names):
        raise BenchError("request.targets: at least one target, each with a name of its own")
    generator = value.get("generator")
    if generator is not None:
        if not isinstance(generator, dict):
            raise _fail("request.generator", "an object or null", generator)
        generator = Generator(
            _take(generator, "image", str, "generator"),
            _take(generator, "model_folder", str, "generator"),
            _take(generator, "tokenizer_mode", str, "generator", ""),
        )
    return Request(
        name=_take(value, "name", str, "request", "endpoint"),
        profile=_take(value, "profile", str, "request", ""),
        release=_take(value, "release", str, "request", ""),
        options=options(_take(value, "options", dict, "request", {})),
        targets=targets,
        generator=generator,
        node=_take(value, "node", dict, "request", {}),
    )


def load(path: Path) -> Request:
    """The request in a file. Raises BenchError."""
    try:
        return parse(json.loads(path.read_text(encoding="utf-8")))
    except OSError as error:
        raise BenchError(f"{path}: {error.strerror}") from None
    except ValueError as error:
        raise BenchError(f"{path} is not JSON: {error}") from None


def key(path: str) -> str | None:
    """The key in a file: alone, as NAME=KEY, or the first one of a list of clients. None without a file or a client.

    Raises BenchError, which never carries a key, when others than its owner can read the file.
    """
    if not path:
        return None
    try:
        mode = Path(path).stat().st_mode
        text = Path(path).read_text(encoding="utf-8").strip()
    except OSError as error:
        raise BenchError(f"{path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise BenchError(f"{path} holds no key: it is not text") from None
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise BenchError(f"{path} can be read by others (mode {stat.S_IMODE(mode):04o}): chmod 0600 it")
    if text.startswith("["):
        try:
            clients = json.loads(text)
            text = str(clients[0]["key"]) if clients else ""
        except (ValueError, TypeError, KeyError):
            raise BenchError(f"{path} is no list of clients with their keys") from None
        return text or None
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    if len(lines) != 1:
        raise BenchError(f"{path} must hold one line, the key or NAME=KEY; it has {len(lines)}")
    name, equals, value = lines[0].partition("=")
    found = value if equals and name.isidentifier() and name.isupper() else lines[0]
    if not found.isascii() or not found.isprintable() or " " in found:
        raise BenchError(f"{path} holds no key: a key is printable ASCII without spaces")
    return found
