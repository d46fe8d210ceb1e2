# Copyright: the gpu_node authors
# MIT License (see LICENSE)
"""What must be right before anything is changed on a node, as one report.

Pure functions only: ``host_state`` and ``gpu_topology`` read the node. ``preflight_facts.py`` says what is a failure
and what a warning.
"""

from __future__ import annotations

import difflib
import textwrap
from typing import Any

from ansible_collections.serving.gpu_node.plugins.module_utils.image_inputs import input_problems
from ansible_collections.serving.gpu_node.plugins.module_utils.preflight_facts import (
    EMPTY_DRIVER,
    EMPTY_HOST,
    EMPTY_NVIDIA,
    FAILURE,
    GIB,
    MIB,
    OK,
    WARNING,
    Check,
    Facts,
    complete,
    finding,
    split_remedy,
)
from ansible_collections.serving.gpu_node.plugins.module_utils.preflight_gpu import GPU_CHECKS
from ansible_collections.serving.gpu_node.plugins.module_utils.preflight_host import HOST_CHECKS
from ansible_collections.serving.gpu_node.plugins.module_utils.settings import SettingsError, resolve_settings
from ansible_collections.serving.gpu_node.plugins.module_utils.sources import (
    check_source,
    lay_sources,
    recipe_problems,
)

_WIDTH = 132
_SIGNS = {OK: "ok", WARNING: "WARN", FAILURE: "FAIL"}
# Measured with the embedded default: an image of 3.2 GB, and as much again while it is built.
_CPU_IMAGE_BYTES = 8 * GIB
# Room for releases, caches of compiled kernels and logs.
_STATE_BYTES = 5 * GIB
_STATE = "/var/lib/gpu-node"
_MODELS = f"{_STATE}/artifacts"
# What an operator may accept; the inventory's and the plan's own problems are not among them.
CHECK_NAMES = (*HOST_CHECKS, *GPU_CHECKS)


def check_host(
    host: dict[str, Any], topology: dict[str, Any], plan: dict[str, Any], wanted: dict[str, Any]
) -> list[Check]:
    """Return every check of a node, good ones too; nothing stops at the first.

    :param host: what ``host_state`` returned; missing or null parts count as unknown.
    :param topology: what ``gpu_topology`` returned.
    :param plan: the intent plan; empty when it was refused.
    :param wanted: what the roles' variables ask for, see ``wanted_of``.
    :returns: each ``{"check", "level", "seen", "wanted", "remedy"}``; level is ``ok``, ``warning`` or ``failure``, the
        remedy empty with ``ok``.
    """
    whole = complete(EMPTY_HOST, host)
    facts = Facts(
        host=whole,
        nvidia=complete(EMPTY_NVIDIA, whole.get("nvidia")),
        topology=topology,
        plan=plan,
        wanted=wanted,
        driver=complete(EMPTY_DRIVER, wanted.get("driver")),
        toolkit=complete({"version": "", "known": []}, wanted.get("toolkit")),
    )
    checks = {**HOST_CHECKS, **GPU_CHECKS} if wanted.get("device") == "cuda" else HOST_CHECKS
    return [found for check in checks.values() for found in check(facts)]


# --- the plan and the inventory


def check_plan(problems: list[str], others: list[Check]) -> list[Check]:
    """Return a check for each reason that the plan was refused, but for those that another check names as well."""
    said = {f"{check['seen']}; {check['remedy']}" for check in others}
    new = [problem for problem in problems if problem not in said]
    wanted = "a plan that can work"
    return [finding("plan", FAILURE, *split_remedy(problem, wanted)) for problem in new] or (
        [] if problems else [finding("plan", OK, wanted, wanted)]
    )


def check_inventory(
    profile: dict[str, Any], overrides: dict[str, Any], sources: dict[str, Any], image: dict[str, Any]
) -> list[Check]:
    """Return what is wrong with settings and sources, which takes no node to tell.

    :param profile: the profile's data.
    :param overrides: the operator's settings.
    :param sources: the operator's sources of artifacts.
    :param image: the variables of ``serving_image`` that say what the image is made of: ``recipe``, ``base``,
        ``prebuilt``, ``archive``, ``plugin_wheel``, ``allow_tag`` and ``registry``.
    """
    checks = []
    settings = profile["settings"]
    try:
        settings = resolve_settings(profile["settings"], overrides)
    except SettingsError as error:
        checks = [
            finding("settings", FAILURE, *split_remedy(text, "settings of the profile")) for text in error.problems
        ]
    laid, problems = lay_sources(profile["artifacts"], sources)
    missing = []
    for key, artifact in laid.items():
        drafter = profile.get("drafters", {}).get(settings.get("drafter", "none"), {}).get("artifact")
        # A drafter without a source is told with the plan, which knows both remedies; a pack need not be.
        if (key == "drafter" and not drafter) or (key in ("drafter", "pack") and not artifact["source"]):
            continue
        wrong, unfilled = check_source(key, artifact["source"])
        problems += wrong
        missing += unfilled
    wanted = "a source that cannot move"
    has_pack = bool(laid.get("pack", {}).get("source"))
    unmade = recipe_problems(image["recipe"], has_pack)
    checks += [finding("sources", FAILURE, *split_remedy(text, "a pack to make the image")) for text in unmade]
    checks += [finding("sources", FAILURE, *split_remedy(text, wanted)) for text in problems]
    checks += [
        finding("sources", FAILURE, f"{text} is empty", wanted, "fill it in (a revision is a commit's 40 hex digits)")
        for text in missing
    ]
    # The role itself says them again, but only when driver and weights are there.
    checks += [
        finding("image", FAILURE, *split_remedy(text, "an image that cannot change"))
        for text in _image_problems(profile, image, has_pack)
    ]
    return checks or [finding("inventory", OK, "settings and sources are whole", "settings and sources are whole")]


def _image_problems(profile: dict[str, Any], image: dict[str, Any], has_pack: bool) -> list[str]:
    recipe = image["recipe"]
    if recipe == "auto":
        recipe = "pack" if has_pack and not image["prebuilt"] else "own"
    return input_problems(
        profile["device"],
        image["base"] or profile["image"].get("base", ""),
        image["prebuilt"],
        image["archive"],
        image["plugin_wheel"],
        image["allow_tag"],
        image["registry"],
        recipe,
    )


def wanted_of(
    profile: dict[str, Any], overrides: dict[str, Any], sources: dict[str, Any], variables: dict[str, Any]
) -> dict[str, Any]:
    """Return what ``check_host`` measures a node against.

    :param profile: the profile's data.
    :param overrides: the operator's settings; wrong ones count as the profile's here, and have checks of their own.
    :param sources: the operator's sources of artifacts.
    :param variables: of the roles that follow: ``os`` (supported versions by id), ``podman`` (lowest version),
        ``runtime_manage``, ``toolkit`` (``version``, ``known``), ``driver`` (``manage``, ``version``, ``kernels``,
        ``signed``, ``reboot_allowed``, ``bad_allowed``, ``known``), ``kernel_parameters``, ``storage`` (folder of
        images), ``image_gib`` (what they take on a node with GPUs), ``serving`` (whether the node has releases) and
        ``space_gib`` (what the operator knows better, by ``model``, ``image`` and ``state``). Each ``known`` is the
        table of that role's ``vars``.
    """
    try:
        settings = resolve_settings(profile["settings"], overrides)
    except SettingsError:
        settings = profile["settings"]
    cuda = profile["device"] == "cuda"
    return {
        **variables,
        "device": profile["device"],
        "settings": settings,
        "gpus": settings["replicas"] * settings["tensor_parallel_size"] if cuda else 0,
        "named_gpus": settings["gpus"] if cuda else [],
        "cards": list(profile.get("cards", {})),
        "space": _space_needs(profile, settings, sources, variables),
    }


def _space_needs(
    profile: dict[str, Any], settings: dict[str, Any], sources: dict[str, Any], variables: dict[str, Any]
) -> list[dict[str, Any]]:
    """Return the room that artifacts take, as far as it is known before they are fetched.

    :returns: each ``{"folder", "bytes", "for", "measured"}``; what a measured folder holds already is taken off by the
        check.
    """
    cuda = profile["device"] == "cuda"
    given = {name: int(gib) * GIB for name, gib in variables["space_gib"].items() if gib is not None}
    needs = [
        {
            "folder": _STATE,
            "bytes": given.get("state", _STATE_BYTES),
            "for": "releases, caches and logs",
            "measured": False,
        }
    ]
    if not variables["serving"]:
        image = given.get("image", int(variables["image_gib"]) * GIB if cuda else _CPU_IMAGE_BYTES)
        needs.append({"folder": variables["storage"], "bytes": image, "for": "the engine's image", "measured": False})
    laid, _ = lay_sources(profile["artifacts"], sources)
    model = laid["model"]
    # An adopted folder is used where it lies.
    if cuda and model["source"].get("adopt") is not True:
        size = given.get("model", _model_bytes(profile, settings))
        needs.append({"folder": f"{_MODELS}/{model['name']}", "bytes": size, "for": "the model", "measured": True})
    return needs


def _model_bytes(profile: dict[str, Any], settings: dict[str, Any]) -> int:
    """Estimate the model's files from what was measured when it ran: they are no larger than what they take there.

    The document does not give their size. What the cards hold after boot less the KV cache has the engine's own
    buffers in it, so this is an upper bound; Engram tables are in host memory besides.
    """
    measured = profile.get("measured", {})
    cards = int(measured.get("tensor_parallel_size", settings.get("tensor_parallel_size", 1)))
    if "utilization" in measured:
        return int(measured["utilization"]["weights_mib"]) * MIB * cards
    after_boot = measured.get("after_boot", {"mib": 0, "kv_bytes": 0})
    on_cards = (int(after_boot["mib"]) * MIB - int(after_boot["kv_bytes"])) * cards
    return max(0, on_cards) + int(measured.get("engram", {}).get("gib", 0)) * GIB


# --- the report


def accept(checks: list[Check], accepted: list[str]) -> list[Check]:
    """Turn failures that the operator accepts into warnings; a name that is no check's is a failure itself."""
    laid = []
    for check in checks:
        if check["level"] == FAILURE and check["check"] in accepted and check["check"] in CHECK_NAMES:
            check = {**check, "level": WARNING, "remedy": f"accepted by preflight_accepted; {check['remedy']}"}
        laid.append(check)
    for name in accepted:
        if name not in CHECK_NAMES:
            near = difflib.get_close_matches(str(name), CHECK_NAMES, n=1, cutoff=0.0)[0]
            seen = f"preflight_accepted: '{name}' is no check that can be accepted"
            laid.append(finding("inventory", FAILURE, seen, "names of checks", f"the nearest one is '{near}'"))
    return laid


def make_report(checks: list[Check]) -> dict[str, Any]:
    """Return ``{"schema", "passed", "failures", "warnings", "checks"}``: what is written as JSON."""
    count = {level: sum(check["level"] == level for check in checks) for level in (WARNING, FAILURE)}
    return {
        "schema": 1,
        "passed": not count[FAILURE],
        "failures": count[FAILURE],
        "warnings": count[WARNING],
        "checks": checks,
    }


def describe_report(told: dict[str, Any]) -> list[str]:
    """Return the report as the lines of a table, with the remedy below what is not right."""
    name_width = max((len(check["check"]) for check in told["checks"]), default=5)
    seen_width = (_WIDTH - name_width - 10) * 3 // 5
    wanted_width = _WIDTH - name_width - 10 - seen_width

    def row(sign: str, name: str, seen: str, wanted: str) -> list[str]:
        left = textwrap.wrap(seen, seen_width) or [""]
        right = textwrap.wrap(wanted, wanted_width) or [""]
        lines = []
        for number in range(max(len(left), len(right))):
            parts = (left[number] if number < len(left) else "", right[number] if number < len(right) else "")
            head = (sign, name) if number == 0 else ("", "")
            lines.append(f"{head[0]:<4}  {head[1]:<{name_width}}  {parts[0]:<{seen_width}}  {parts[1]}".rstrip())
        return lines

    lines = row("", "check", "seen", "wanted")
    for check in told["checks"]:
        lines += row(_SIGNS[check["level"]], check["check"], check["seen"], check["wanted"])
        if check["remedy"]:
            indent = " " * (name_width + 8)
            lines += textwrap.wrap(
                f"-> {check['remedy']}", _WIDTH, initial_indent=indent, subsequent_indent=f"{indent}   "
            )
    lines.append(
        f"{len(told['checks'])} checks: {told['failures']} failed, {told['warnings']} with a warning, "
        f"{len(told['checks']) - told['failures'] - told['warnings']} good"
    )
    return lines


def failure_lines(told: dict[str, Any]) -> list[str]:
    """Return a line for each failed check, with its remedy."""
    return [
        f"{check['check']}: {check['seen']} (wanted: {check['wanted']}); {check['remedy']}".rstrip("; ")
        for check in told["checks"]
        if check["level"] == FAILURE
    ]
