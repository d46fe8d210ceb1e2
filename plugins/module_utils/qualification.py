# Copyright: the gpu_node authors
# MIT License (see LICENSE)
"""Which of the kernels' switches are on: what a profile wants, against what the check on this node's GPUs found.

Pure functions. A *record* is ``{"gpu": model, "driver": version, "report": what ds41k.qualify wrote or {}, "why": a
sentence when there is no report}``; there is one for each model of GPU that replicas run on.
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
NAMES = (*(switch.setting for switch in SWITCHES), *ABSENT)


@dataclass
class Decisions:
    """``settings`` as they are served with; ``switches`` a line of data for each switch; sentences."""

    settings: dict[str, Any]
    switches: list[dict[str, Any]] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

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


def decide(plan: dict[str, Any], records: list[dict[str, Any]], recipe: str) -> Decisions:
    """Return the settings to serve with.

    :param plan: an intent plan, with ``kernels`` as :func:`wanted_kernels` gives it.
    :param records: one for each model of GPU that replicas run on.
    :param recipe: what made the image: ``pack``, or nothing for an image of our own.
    """
    kernels = plan.get("kernels", {})
    if not kernels:
        return Decisions(plan["settings"])
    made = Decisions({**plan["settings"], **kernels["wanted"]})
    reasons = {switch.setting: _doubt(switch, records, kernels["rows"]) for switch in SWITCHES}
    for name, value in kernels["wanted"].items():
        _decide_one(made, name, value, reasons, name in kernels["given"], recipe)
    _check_window(made, kernels, reasons["chunked_indexer"])
    return made


def _decide_one(made: Decisions, name: str, wanted: Any, reasons: dict[str, str], forced: bool, recipe: str) -> None:
    ours = name in reasons
    doubt = reasons[name] if ours else "not in this image"
    if recipe == PACK:
        doubt = ""
    report = "the pack's own image" if recipe == PACK else doubt or _praise(name)
    keep = not wanted or not doubt or forced
    made.settings[name] = wanted if keep else type(wanted)(0)
    if wanted and doubt and forced:
        done = "has no report that allows it" if ours else "has no effect with this image"
        made.warnings.append(f"{name}: on because serving_plan_overrides says so, and it {done}: {doubt}")
    elif not keep and ours and "slower" not in doubt:
        made.warnings.append(f"{name}: off: {doubt}")
    made.switches.append(
        {
            "setting": name,
            "environment": SETTINGS[name].environment,
            "wanted": wanted,
            "report": report,
            "decision": made.settings[name],
        }
    )


def _praise(name: str) -> str:
    gain = next(switch.gain for switch in SWITCHES if switch.setting == name)
    return "correct and faster" if gain else "correct"


def _doubt(switch: Switch, records: Iterable[dict[str, Any]], rows: int) -> str:
    """Return why a switch may not be on; empty when every model of GPU has a report that allows it."""
    records = list(records)
    if not records:
        return "not qualified: nothing was checked on a GPU"
    for record in records:
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
                return f"{kernel} is slower than what it replaces {where}: {slow}"
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
