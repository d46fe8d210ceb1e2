"""Which kernels' switches a resolved plan turns on: every reason for and against, and what a person reads of it."""

from __future__ import annotations

import json
from typing import Any

import pytest
import yaml
from ansible_collections.serving.gpu_node.plugins.module_utils.describe import describe_plan
from ansible_collections.serving.gpu_node.plugins.module_utils.qualification import choose_reports, record_key
from ansible_collections.serving.gpu_node.plugins.module_utils.release import ResolveError, resolve_plan

from tests.unit.plugins.playbooks import ROOT
from tests.unit.plugins.samples import DRAFTER, IMAGE, MODEL, intent, record, resolved

Plan = dict[str, Any]
OURS = {"DS41_IDX_CHUNK": "chunked_indexer", "DS41_ROWTOPK": "length_aware_topk", "DS41_CAND": "candidate_kernels"}
ABSENT = ("DS41_XMOE", "DS41_AR8", "DS41_ENGRAM_PACKED", "DS41_LMHEAD_REPL", "DS41_WKV_REPL_MIN_ROWS")
# A window that fits without the chunked indexer.
HALF = {"MAX_MODEL_LEN": 524288}
CARD = "NVIDIA RTX PRO 6000 Blackwell Server Edition with driver 590.48.01"


def served(plan: Plan) -> dict[str, str]:
    """The switches as the engine of replica 1 gets them."""
    lines = plan["replicas"][1]["files"]["engine.env"].splitlines()
    found = dict(line.split("=", 1) for line in lines)
    return {name: found[name] for name in (*OURS, *ABSENT)}


def on(plan: Plan) -> set[str]:
    return {name for name, value in served(plan).items() if value != "0"}


def verdict(correct: bool = True, speedups: dict[int, float] | None = None) -> dict[str, Any]:
    shapes = [{"rows": rows, "length": 2048, "speedup": value} for rows, value in (speedups or {1024: 2.0}).items()]
    return {
        "correct": correct,
        "failures": [] if correct else ["all_nan 3x150000: 3 of 3 rows differ"],
        "shapes": shapes,
    }


def test_with_a_good_report_ours_are_on_and_absent_ones_off() -> None:
    plan = resolved(name="8x")
    assert on(plan) == set(OURS)
    assert plan["warnings"] == []
    # What the plan says is what is served.
    assert {name: plan["settings"][name] for name in OURS.values()} == dict.fromkeys(OURS.values(), True)
    assert plan["settings"]["moe_kernel"] is False and plan["settings"]["replicated_wkv_min_rows"] == 0


def test_a_packs_own_image_keeps_every_switch_as_it_is_set() -> None:
    for records in ([], [record(correct=False)]):
        plan = resolved({"moe_kernel": False}, name="8x", image={**IMAGE, "recipe": "pack"}, records=records)
        assert on(plan) == {*OURS, *ABSENT} - {"DS41_XMOE"}
        assert plan["warnings"] == []


def test_a_kernel_that_is_wrong_is_named_and_its_switches_stay_off() -> None:
    plan = resolved(HALF, name="8x", records=[record(cand_topk=verdict(correct=False))])
    assert on(plan) == {"DS41_ROWTOPK"}
    wrong = f"cand_topk is not correct on {CARD} (all_nan 3x150000: 3 of 3 rows differ)"
    assert plan["warnings"] == [f"chunked_indexer: off: {wrong}", f"candidate_kernels: off: {wrong}"]


def test_chunks_that_are_wrong_keep_the_chunked_indexer_off_alone() -> None:
    plan = resolved(HALF, name="8x", records=[record(chunks=verdict(correct=False))])
    assert on(plan) == set(OURS) - {"DS41_IDX_CHUNK"}
    # A report of an older check, which did not look at chunks, allows nothing that needs them.
    older = record()
    del older["report"]["kernels"]["chunks"]
    plan = resolved(HALF, name="8x", records=[older])
    assert on(plan) == set(OURS) - {"DS41_IDX_CHUNK"}
    assert "chunks is not correct" in plan["warnings"][0] and "the report has no such check" in plan["warnings"][0]


def test_a_kernel_that_is_slower_is_off_without_a_warning() -> None:
    plan = resolved(name="8x", records=[record(rowtopk=verdict(speedups={64: 2.0, 1024: 0.93}))])
    assert on(plan) == {"DS41_IDX_CHUNK", "DS41_CAND"}
    assert plan["warnings"] == []
    line = next(line for line in describe_plan(plan, {}) if line.startswith("length_aware_topk"))
    wanted = f"rowtopk is slower than what it replaces on {CARD}: 0.93 times its speed with 1024 rows of 2,048"
    assert line == f"length_aware_topk (DS41_ROWTOPK): wanted on; {wanted}; off"


@pytest.mark.parametrize(
    ("sequences", "draft_tokens", "faster"),
    # 1,024 rows and more are judged by 1,024; 256 and 200 by 256; 8 by 64, the fewest that were timed
    [(128, 7, True), (144, 7, True), (32, 7, False), (25, 7, False), (1, 7, True)],
)
def test_faster_means_at_the_rows_that_are_in_use(sequences: int, draft_tokens: int, faster: bool) -> None:
    good = record(rowtopk=verdict(speedups={64: 1.0, 256: 0.99, 1024: 1.1}))
    plan = resolved({"max_num_seqs": sequences, "SPEC_K": draft_tokens}, name="8x", records=[good])
    assert ("DS41_ROWTOPK" in on(plan)) is faster


def test_nothing_timed_is_not_faster() -> None:
    plan = resolved(name="8x", records=[record(rowtopk={"correct": True, "shapes": []})])
    assert "DS41_ROWTOPK" not in on(plan)


def test_every_model_of_card_needs_its_report() -> None:
    other = {**record(), "gpu": "Max-Q", "report": {}, "why": "all its GPUs are busy"}
    plan = resolved(HALF, name="8x", records=[record(), other])
    assert on(plan) == set()
    assert plan["warnings"] == [f"{name}: off: not qualified: all its GPUs are busy" for name in OURS.values()]


def test_only_a_check_that_a_free_gpu_would_allow_is_waited_for() -> None:
    """Else a node would be drained for a plan that cannot be completed then either."""
    busy = {**record(), "report": {}, "why": "replica 0 runs on it", "busy": True}
    wrong = record(chunks=verdict(correct=False))
    refused: dict[str, tuple[bool, list[Plan], dict[str, int]]] = {
        "a GPU in use": (True, [busy], {}),
        "one model of GPU in use, the other good": (True, [busy, record()], {}),
        "one model of GPU in use, the other's kernels wrong": (False, [busy, wrong], {}),
        "no check allowed": (False, [{**busy, "busy": False}], {}),
        "kernels that are wrong": (False, [wrong], {}),
        "a head that drafts five": (False, [busy], {"drafter": 5}),
    }
    for what, (waits, records, tokens) in refused.items():
        with pytest.raises(ResolveError) as caught:
            resolved(name="8x", records=records, draft_tokens=tokens)
        assert caught.value.waits is waits, what


def test_a_whole_window_is_refused_without_a_report_and_says_what_to_do() -> None:
    with pytest.raises(ResolveError) as caught:
        resolved(name="8x", records=[{**record(), "report": {}, "why": "replica 0 runs on it"}])
    (problem,) = caught.value.problems
    assert problem == (
        "max_model_len: 1,024 rows x 1,048,576 tokens exceed the 536,870,912 that fit without the chunked indexer, and "
        "that is off: not qualified: replica 0 runs on it. Set MAX_MODEL_LEN=524288 until there is a report, or force "
        "it with chunked_indexer: true in serving_plan_overrides"
    )
    with pytest.raises(ResolveError):
        resolved({"MAX_MODEL_LEN": 524289}, name="8x", records=[])
    assert on(resolved(HALF, name="8x", records=[])) == set()


@pytest.mark.parametrize("name", ["DS41_IDX_CHUNK", "chunked_indexer"])
def test_what_the_operator_wrote_is_on_with_a_warning(name: str) -> None:
    plan = resolved({name: True}, name="8x", records=[])
    assert on(plan) == {"DS41_IDX_CHUNK"}
    assert plan["warnings"][0] == (
        "chunked_indexer: on because serving_plan_overrides says so, and it has no report that allows it: "
        "not qualified: nothing was checked on a GPU"
    )
    # With a report there is nothing to warn of.
    assert resolved({name: True}, name="8x")["warnings"] == []


def test_a_kernel_that_is_not_in_the_image_is_forced_on_with_a_warning() -> None:
    plan = resolved({"DS41_XMOE": 1}, name="8x")
    assert on(plan) == {*OURS, "DS41_XMOE"}
    (warning,) = plan["warnings"]
    assert "moe_kernel" in warning and "has no effect with this image: not in this image" in warning


def test_what_the_operator_turned_off_stays_off() -> None:
    plan = resolved({"length_aware_topk": False, "DS41_CAND": 0}, name="8x")
    assert on(plan) == {"DS41_IDX_CHUNK"}
    lines = [line for line in describe_plan(plan, {}) if "wanted off" in line]
    assert lines == ["length_aware_topk (DS41_ROWTOPK): wanted off", "candidate_kernels (DS41_CAND): wanted off"]


def test_the_plan_shows_each_switch() -> None:
    lines = describe_plan(resolved(name="8x"), {})
    begin = lines.index("--- kernels, by what was found on this node's GPUs ---")
    assert lines[begin + 1 : begin + 9] == [
        "chunked_indexer (DS41_IDX_CHUNK): wanted on; correct; on",
        "length_aware_topk (DS41_ROWTOPK): wanted on; correct and faster; on",
        "candidate_kernels (DS41_CAND): wanted on; correct and faster; on",
        "moe_kernel (DS41_XMOE): wanted on; not in this image; off",
        "all_reduce_8bit (DS41_AR8): wanted on; not in this image; off",
        "packed_engram_gather (DS41_ENGRAM_PACKED): wanted on; not in this image; off",
        "gathered_lm_head (DS41_LMHEAD_REPL): wanted on; not in this image; off",
        "replicated_wkv_min_rows (DS41_WKV_REPL_MIN_ROWS): wanted 1024; not in this image; 0",
    ]
    # Nothing is decided in an intent plan, so nothing is said.
    assert not [line for line in describe_plan(intent(name="8x"), {}) if "wanted on" in line]


def test_a_plan_that_is_resolved_again_takes_the_new_report() -> None:
    once = resolved(HALF, name="8x", records=[])
    digests = {"model": MODEL, "drafter": DRAFTER}
    again = resolve_plan(once, digests, IMAGE, once["topology"]["gpus"], [record()], {})
    assert on(again) == set(OURS)


def test_the_intent_plan_of_a_node_that_serves_announces_no_switch_for_decided_settings() -> None:
    now = resolved(name="8x")
    running = {str(one["index"]): json.loads(one["files"]["release.json"]) for one in now["replicas"]}
    lines = [line for line in describe_plan(intent(name="8x"), running) if line.startswith("replica 0: release")]
    assert lines == [f"replica 0: release {now['replicas'][0]['release']} stays unless image or model change"]


@pytest.mark.parametrize("name", ["cpu", "2x"])
def test_profiles_without_such_switches_are_not_concerned(name: str) -> None:
    plan = resolved(name=name, records=[])
    assert plan["kernels"] == {} and plan["warnings"] == []
    assert plan == resolved(name=name)
    assert "kernels" not in " ".join(line for line in describe_plan(plan, {}) if line.startswith("---"))


def test_a_report_is_of_one_image_card_and_driver() -> None:
    base = ("b" * 64, "card", "590.48.01")
    keys = {record_key(*base), record_key("c" * 64, *base[1:]), record_key(base[0], "other", base[2])}
    keys |= {record_key(*base[:2], "600.1")}
    assert len(keys) == 4 and all(len(key) == 12 for key in keys)


def stored(image: str = "new", kernels: str = "k1", gpu: str = "card", driver: str = "590", **report: Any) -> Plan:
    found = report or {"kernels": {"rowtopk": {"correct": True}}}
    return {"image": image, "kernels": kernels, "gpu": gpu, "driver": driver, "report": found}


ABOUT = {"image": "new", "kernels": "k1", "driver": "590"}
WANTED = {"card": ["GPU-0", "GPU-1"]}
BUSY = {"GPU-0": "replica 0 runs on it", "GPU-1": "process 7"}


def chosen(*reports: Plan, busy: dict[str, str] | None = None, **about: str) -> tuple[Plan, list[dict[str, str]]]:
    (record_,), runs = choose_reports(list(reports), WANTED, {**ABOUT, **about}, busy or {})
    return record_, runs


def test_a_report_is_made_once_per_image_card_and_driver() -> None:
    found, runs = chosen(stored())
    assert (found["report"], found["pending"], runs) == (stored()["report"], False, [])
    # It holds on while the GPUs are in use.
    assert chosen(stored(), busy=BUSY)[0]["report"] == stored()["report"]
    for other in (stored(image="old"), stored(gpu="other"), stored(driver="580")):
        found, runs = chosen(other)
        assert (found["report"], found["pending"]) == ({}, True)
        assert runs == [{"key": record_key("new", "card", "590"), "gpu": "card", "driver": "590", "uuid": "GPU-0"}]


def test_a_free_gpu_is_taken() -> None:
    assert chosen(busy={"GPU-0": "replica 0 runs on it"})[1][0]["uuid"] == "GPU-1"


def test_what_a_dry_run_on_a_bare_node_takes_is_a_record_like_any() -> None:
    variables = yaml.safe_load((ROOT / "roles/kernels/vars/main.yml").read_text())
    unknown = variables["_kernels_unknown"]
    (usual,), _ = choose_reports([], WANTED, ABOUT, {})
    assert {name: type(value) for name, value in unknown.items()} == {
        name: type(value) for name, value in usual.items()
    }
    assert on(resolved(HALF, name="8x", records=[unknown])) == set()


def test_without_a_free_gpu_it_says_why_and_what_to_do() -> None:
    found, runs = chosen(busy=BUSY)
    assert runs == [] and found["report"] == {} and not found["pending"] and found["busy"]
    assert found["why"].startswith("every card is in use (replica 0 runs on it); a run while one is free checks it")
    assert "systemctl stop vllm-replica@N" in found["why"]


def test_while_no_gpu_is_free_the_same_kernels_of_another_image_will_do() -> None:
    older = stored(image="old")
    assert chosen(older, busy=BUSY)[0]["report"] == older["report"]
    assert chosen(stored(image="old", kernels="k0"), busy=BUSY)[0]["report"] == {}
    # Kernels that nobody knows are no kernels that are the same.
    assert chosen(stored(image="old", kernels=""), busy=BUSY, kernels="")[0]["report"] == {}


def test_a_check_that_found_nothing_out_is_made_again_and_decides_nothing() -> None:
    found, runs = chosen(stored(kernels_="", not_qualified="torch sees no CUDA GPU here"))
    assert len(runs) == 1
    assert (found["report"], found["why"], found["pending"]) == ({}, "torch sees no CUDA GPU here", False)


def test_a_dry_run_takes_a_check_that_is_still_to_come_for_good() -> None:
    plan = resolved(name="8x", records=[{**record(), "report": {}, "pending": True}])
    assert on(plan) == set(OURS) and plan["warnings"] == []
    assert "chunked_indexer (DS41_IDX_CHUNK): wanted on; to be checked first; on" in describe_plan(plan, {})
