#!/usr/bin/env python3
"""What vLLM makes of a command line: `vllm serve` up to the point where it would start a server.

Runs inside a Python that has vLLM's dependencies, with vLLM's sources on PYTHONPATH; needs no GPU and no compiled part
of vLLM. Reads a JSON list of cases on stdin: `{"argv": [text]}`, the words after `vllm serve`, or `{"config": text}`,
what the file behind `--config` holds. Prints a JSON object: `version` of vLLM, `stand_ins`, the imports that are not
installed, and `results`, for each case either `{"values": {name: value}}`, every parsed value with defaults, or
`{"error": text}`.

It calls vLLM's own entry point, so the configuration file, the merging of dotted names and the checks after the parsing
are the real ones; only the function that would start the server is replaced. The parser itself builds the arguments
that are dataclasses. The others, which vLLM checks when it builds the engine's configuration, are checked here.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import importlib
import importlib.machinery
import io
import json
import math
import os
import sys
import tempfile
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

# Nothing in these takes part in reading arguments: the server imports them to answer requests.
NOT_NEEDED = ("orjson",)
# These make the engine look at the machine or the network while it reads its arguments.
UNWANTED_ENVIRONMENT = ("HF_HUB_OFFLINE", "VLLM_USE_RUST_FRONTEND", "VLLM_RUST_FRONTEND_PATH")


class StandIns:
    """Empty modules in place of the packages that are not installed and that no argument needs."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = names
        self.used: list[str] = []

    def find_spec(self, name: str, path: object = None, target: object = None) -> importlib.machinery.ModuleSpec | None:
        if name not in self.names:
            return None
        self.used.append(name)
        return importlib.machinery.ModuleSpec(name, self)  # type: ignore[arg-type]

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> None:
        """None: an ordinary empty module."""

    def exec_module(self, module: types.ModuleType) -> None:
        """Nothing to run; a use of the module fails with an AttributeError, loudly."""


class WrongArgumentError(Exception):
    """vLLM does not take the command line."""


def as_json(value: Any) -> Any:
    """Return a parsed value as something JSON has; what has no JSON form becomes its `repr`."""
    if isinstance(value, enum.Enum):
        return value.name
    if isinstance(value, float) and not math.isfinite(value):
        return repr(value)
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: as_json(getattr(value, field.name, None)) for field in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {str(key): as_json(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [as_json(inner) for inner in value]
    if isinstance(value, (set, frozenset)):
        return sorted((as_json(inner) for inner in value), key=repr)
    return f"{value.__module__}.{value.__qualname__}" if isinstance(value, type) else type(value).__qualname__


def check_fields(cls: Any, given: dict[str, Any]) -> None:
    """Raise for a key or a value that a configuration class does not take.

    For classes whose own construction needs the model's configuration.
    """
    adapter = importlib.import_module("pydantic").TypeAdapter
    fields = cls.__pydantic_fields__
    for name, value in given.items():
        if name not in fields:
            raise WrongArgumentError(f"{cls.__name__}: unexpected keyword {name!r}; it has {sorted(fields)}")
        info = fields[name]
        try:
            adapter(Annotated[info.annotation, info]).validate_python(value)
        except ValueError as error:
            raise WrongArgumentError(f"{cls.__name__}.{name}: {error}") from error


def shared(cls: Any, engine: Any) -> dict[str, Any]:
    """Return the fields of a configuration class that an argument of the same name sets."""
    values = {field.name: getattr(engine, field.name, None) for field in dataclasses.fields(cls)}
    return {name: value for name, value in values.items() if value is not None}


def check_engine(args: Any) -> None:
    """Do what `vllm serve` does with its arguments next, as far as it needs neither a GPU nor the model's files.

    The engine's configuration is built part by part: as a whole it asks for the model's own configuration first.
    """
    # Imported by name, as the test tools' own Python has no vLLM for type checks to look into.
    config = importlib.import_module("vllm.config")
    engine = importlib.import_module("vllm.engine.arg_utils").AsyncEngineArgs.from_cli_args(args)
    engine.create_load_config()
    engine.create_observability_config()
    engine.create_watermark_config()
    # This puts --reasoning-parser where the check of the names of parsers looks for it.
    args.structured_outputs_config = engine.create_structured_outputs_config()
    importlib.import_module("vllm.entrypoints.common.cli_args").validate_api_server_args(args)
    config.CacheConfig(**shared(config.CacheConfig, engine), cache_dtype=engine.kv_cache_dtype)
    config.ParallelConfig(**shared(config.ParallelConfig, engine))
    # The model's own window is not known here, and any window is long enough for the other checks.
    window = engine.max_model_len if engine.max_model_len and engine.max_model_len > 0 else 2**20
    known = {**shared(config.SchedulerConfig, engine), "max_model_len": window, "is_encoder_decoder": False}
    config.SchedulerConfig(**known)
    if engine.attention_backend is not None:
        config.AttentionConfig(backend=engine.attention_backend)
    if engine.tokenizer_mode != "auto":
        registry = importlib.import_module("vllm.tokenizers.registry").TokenizerRegistry
        registry.load_tokenizer_cls(engine.tokenizer_mode)
    if engine.speculative_config is not None:
        given = {key.replace("-", "_"): value for key, value in engine.speculative_config.items()}
        check_fields(config.SpeculativeConfig, given)


def parse(argv: Sequence[str]) -> dict[str, Any]:
    """Return every value that `vllm serve ARGV` would start a server with.

    :raises WrongArgumentError: with what vLLM says.
    """
    main = importlib.import_module("vllm.entrypoints.cli.main")
    serve = importlib.import_module("vllm.entrypoints.cli.serve")
    values: dict[str, Any] = {}

    def capture(args: Any) -> None:
        # Copied before the checks, which complete some of the values.
        values.update({name: as_json(value) for name, value in vars(args).items()})
        check_engine(args)

    async def capture_later(args: Any) -> None:
        capture(args)

    serve.run_server = capture_later  # type: ignore[attr-defined]
    for start in ("run_multi_api_server", "run_headless", "run_dp_supervisor"):
        setattr(serve, start, capture)
    said = io.StringIO()
    sys.argv = ["vllm", "serve", *argv]
    try:
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
            main.main()
    except SystemExit as stop:
        raise WrongArgumentError(said.getvalue().strip() or f"exit {stop.code}") from stop
    except WrongArgumentError:
        raise
    except Exception as error:
        raise WrongArgumentError(f"{type(error).__name__}: {error}") from error
    if not values:
        raise WrongArgumentError(f"vLLM would not start a server: {said.getvalue().strip()}")
    # Not an argument: the function that the subcommand stands for.
    return {name: value for name, value in values.items() if name != "dispatch_function"}


def main() -> None:
    cases = json.load(sys.stdin)
    for name in UNWANTED_ENVIRONMENT:
        os.environ.pop(name, None)
    os.environ.setdefault("VLLM_TARGET_DEVICE", "cpu")
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")
    stand_ins = StandIns(NOT_NEEDED)
    # Last, so that an installed package is taken.
    sys.meta_path.append(stand_ins)
    results: list[dict[str, Any]] = []
    # Whatever vLLM prints is not part of the answer.
    with contextlib.redirect_stdout(sys.stderr), tempfile.TemporaryDirectory() as folder:
        version = importlib.import_module("vllm").__version__
        for case in cases:
            argv = case.get("argv", [])
            if "config" in case:
                config = Path(folder) / "engine.yaml"
                config.write_text(case["config"], encoding="utf-8")
                argv = ["--config", str(config), *argv]
            try:
                results.append({"values": parse(argv)})
            except WrongArgumentError as error:
                results.append({"error": str(error)})
    json.dump({"version": version, "stand_ins": stand_ins.used, "results": results}, sys.stdout)


if __name__ == "__main__":
    main()
