# Copyright: the gpu_node authors
# MIT License (see LICENSE)
"""Which of the kernels' switches are on: what a profile wants, against what the check on this node's GPUs found.

Pure functions. A *record* is ``{"gpu": model, "driver": version, "report": what ds41k.qualify wrote or {}, "why": a
sentence when there is no report, "pending": whether it is made before anything starts, "busy": whether it is missing
because every such GPU is in use}``; there is one for each model of GPU that replicas run on.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from ansible_collections.serving.gpu_node.plugins.module_utils import budgets
from ansible_collections.serving.gpu_node.plugins.module_utils.settings import SETTINGS, given_settings

# Part of the image that a pack's own recipe makes: it brings every kernel and was verified as a whole.
PACK = "pack"


@dataclass(frozen=True)
class Switch:
    """A setting that puts kernels of ours to use; ``gain`` says that speed is its only purpose."""

    setting: str
    kernels: tuple[str, ...]
    gain: bool = True


SWITCHES = (
    Switch("chunked_indexer", ("rowtopk", "cand_blocks", "cand_topk", "chunks"), gain=False),
    Switch("length_aware_topk", ("rowtopk",)),
    Switch("candidate_kernels", ("cand_blocks", "cand_topk")),
)
# Settings whose kernels only a pack's own image has.
ABSENT = ("moe_kernel", "all_reduce_8bit", "packed_engram_gather", "gathered_lm_head", "replicated_wkv_min_rows")
_NOT_HERE = "not in this image"
_SLOWER = "is slower than what it replaces"
NAMES = (*(switch.setting for switch in SWITCHES), *ABSENT)


@dataclass
class Decisions:
    """``settings`` as they are served with; ``switches`` a line of data for each switch; sentences."""

    settings: dict[str, Any]
    switches: list[dict[str, Any]] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    #: what is a problem would be none with a report, and one can be made once a GPU is free
    waits: bool = False

    @property
    def values(self) -> dict[str, Any]:
        """What was decided, by setting."""
        return {switch["setting"]: self.settings[switch["setting"]] for switch in self.switches}


def record_key(image_id: str, gpu: str, driver: str) -> str:
    """Return the name of a report: what it is about is in it, so another image, card or driver asks anew."""
    return hashlib.sha256("\n".join((image_id, gpu, driver)).encode()).hexdigest()[:12]


def wanted_kernels(profile: dict[str, Any], settings: dict[str, Any], overrides: dict[str, Any]) -> dict[str, Any]:
    """Return what a plan has to remember for :func:`decide`; empty for a profile without such switches.

    ``wanted`` the switches' values, ``given`` those that the operator wrote, ``rows`` of the largest decode step,
    ``indexer_limit`` the rows x window that fit without the chunked indexer.
    """
    wanted = {name: settings[name] for name in NAMES if name in settings}
    if not wanted:
        return {}
    drafts = 0 if settings["drafter"] == "none" else settings["speculative_tokens"]
    return {
        "wanted": wanted,
        "given": sorted(given_settings(overrides) & wanted.keys()),
        "rows": budgets.decode_rows(settings["max_num_seqs"], drafts),
        "indexer_limit": profile["measured"]["indexer_max_rows_x_window"],
    }


def choose_reports(
    stored: list[dict[str, Any]],
    wanted: dict[str, list[str]],
    about: dict[str, str],
    busy: dict[str, str],
    allowed: bool = True,
) -> tuple[list[dict[str, Any]], list[dict[str, str]]]:
    """Return a record for each model of GPU, and the checks that can be made now to get the missing ones.

    :param stored: what lies on the node: ``image``, ``kernels``, ``gpu``, ``driver``, ``report``.
    :param wanted: by model of GPU, the UUIDs of the plan's.
    :param about: ``image`` (its id), ``kernels`` (their key, empty when it is not known) and ``driver``.
    :param busy: by UUID why a GPU cannot be had; a GPU that is not in it is free.
    :param allowed: whether checks may be made at all.
    """
    records, runs = [], []
    for gpu, uuids in sorted(wanted.items()):
        same = [one for one in stored if one["gpu"] == gpu and one["driver"] == about["driver"]]
        exact = next((one for one in same if one["image"] == about["image"]), None)
        # While no GPU is free, another image's report will do when the kernels in it were the same.
        like = [one for one in same if about["kernels"] and one["kernels"] == about["kernels"]]
        record: dict[str, Any] = {"gpu": gpu, "driver": about["driver"], "report": {}, "why": ""}
        record |= {"pending": False, "busy": False}
        free = [uuid for uuid in uuids if uuid not in busy]
        usable = next((one for one in ([exact] if exact else []) + ([] if free else like) if _found(one)), None)
        if usable:
            record["report"] = usable["report"]
        elif not allowed:
            record["why"] = "there is no report, and kernels_manage is false; set it to true to have one made"
        elif free:
            key = record_key(about["image"], gpu, about["driver"])
            runs.append({"key": key, "gpu": gpu, "driver": about["driver"], "uuid": free[0]})
            record["why"] = exact["report"].get("not_qualified", "the report is empty") if exact else "not checked yet"
            record["pending"] = exact is None
        else:
            record["busy"] = True
            record["why"] = (
                f"every {gpu} is in use ({busy[uuids[0]]}); a run while one is free checks it: stop a replica "
                "(systemctl stop vllm-replica@N, which drains it first) and run site.yml again"
            )
        records.append(record)
    return records, runs


def _found(stored: dict[str, Any]) -> bool:
    return bool(stored["report"].get("kernels"))


def decide(plan: dict[str, Any], records: list[dict[str, Any]], recipe: str) -> Decisions:
    """Return the settings to serve with.

    :param plan: an intent plan, with ``kernels`` as :func:`wanted_kernels` gives it.
    :param records: one for each model of GPU that replicas run on.
    :param recipe: what made the image: ``pack``, or nothing for an image of our own.
    """
    kernels = plan["kernels"]
    if not kernels:
        return Decisions(plan["settings"])
    made = Decisions({**plan["settings"], **kernels["wanted"]})
    reasons = {switch.setting: _doubt(switch, records, kernels["rows"]) for switch in SWITCHES}
    for name, wanted in kernels["wanted"].items():
        doubt = "" if recipe == PACK else reasons.get(name, _NOT_HERE)
        forced = bool(wanted and doubt and name in kernels["given"])
        made.settings[name] = wanted if forced or not doubt else type(wanted)(0)
        if forced:
            why = "has no effect with this image" if doubt == _NOT_HERE else "has no report that allows it"
            made.warnings.append(f"{name}: on because serving_plan_overrides says so, and it {why}: {doubt}")
        elif wanted and doubt and doubt != _NOT_HERE and _SLOWER not in doubt:
            made.warnings.append(f"{name}: off: {doubt}")
        made.switches.append(
            {
                "setting": name,
                "environment": SETTINGS[name].environment,
                "wanted": wanted,
                "report": doubt or ("the pack's own image" if recipe == PACK else _praise(name, records)),
                "decision": made.settings[name],
            }
        )
    _check_window(made, kernels, reasons["chunked_indexer"])
    known = [record for record in records if not record["busy"]]
    indexer = next(switch for switch in SWITCHES if switch.setting == "chunked_indexer")
    refused = bool(known) and bool(_doubt(indexer, known, kernels["rows"]))
    made.waits = bool(made.problems) and len(known) < len(records) and not refused
    return made


def _praise(name: str, records: list[dict[str, Any]]) -> str:
    if any(record["pending"] for record in records):
        return "to be checked first"
    gain = next(switch.gain for switch in SWITCHES if switch.setting == name)
    return "correct and faster" if gain else "correct"


def _doubt(switch: Switch, records: Iterable[dict[str, Any]], rows: int) -> str:
    """Return why a switch may not be on; empty when every model of GPU has a report that allows it."""
    records = list(records)
    if not records:
        return "not qualified: nothing was checked on a GPU"
    for record in records:
        if record["pending"]:
            continue
        verdicts = record["report"].get("kernels", {})
        if not verdicts:
            return f"not qualified: {record['why'] or 'the report is empty'}"
        where = f"on {record['gpu']} with driver {record['driver']}"
        for kernel in switch.kernels:
            verdict = verdicts.get(kernel, {})
            if verdict.get("correct") is not True:
                failures = verdict.get("failures") or ["the report has no such check"]
                return f"{kernel} is not correct {where} ({failures[0]})"
        for kernel in switch.kernels if switch.gain else ():
            slow = _slower(verdicts[kernel], rows)
            if slow:
                return f"{kernel} {_SLOWER} {where}: {slow}"
    return ""


def _slower(verdict: dict[str, Any], rows: int) -> str:
    """Return a shape in use at which a kernel is slower; those are of the fewest rows timed that a step fits in."""
    counts = sorted({shape["rows"] for shape in verdict.get("shapes", [])})
    if not counts:
        return "nothing was timed"
    used = next((count for count in counts if count >= rows), counts[-1])
    for shape in verdict["shapes"]:
        if shape["rows"] == used and shape["speedup"] < 1:
            return f"{shape['speedup']} times its speed with {used} rows of {shape['length']:,}"
    return ""


def _check_window(made: Decisions, kernels: dict[str, Any], doubt: str) -> None:
    rows, limit, window = kernels["rows"], kernels["indexer_limit"], made.settings["max_model_len"]
    if made.settings["chunked_indexer"] or rows * window <= limit:
        return
    made.problems.append(
        f"max_model_len: {rows:,} rows x {window:,} tokens exceed the {limit:,} that fit without the chunked indexer, "
        f"and that is off: {doubt}. Set MAX_MODEL_LEN={limit // rows} until there is a report, or force it with "
        "chunked_indexer: true in serving_plan_overrides"
    )


def describe_switches(kernels: dict[str, Any]) -> list[str]:
    """Return a line for each switch: what is wanted, what the report says, what was decided."""
    lines = []
    for switch in kernels.get("switches", []):
        words = f"wanted {_word(switch['wanted'])}"
        if switch["wanted"]:
            words += f"; {switch['report']}; {_word(switch['decision'])}"
        lines.append(f"{switch['setting']} ({switch['environment']}): {words}")
    return lines


def _word(value: Any) -> str:
    return ("on" if value else "off") if isinstance(value, bool) else str(value)
