"""The check of calls in chunks, on kernels that stand in for ours on the CPU: good ones pass, others do not."""

from __future__ import annotations

from typing import Any

import pytest


class StandIns:
    """The references under the operators' names; ``fault`` makes a row depend on how many come with it."""

    def __init__(self, fault: str = "") -> None:
        self.fault = fault

    def _write(self, name: str, out: Any, found: Any) -> None:
        out.copy_(found)
        if name == self.fault and out.shape[0] > 1:
            out[0, 0] += 1

    def rowtopk(self, logits: Any, lens: Any, out: Any, k: int) -> None:
        from ds41k import reference

        self._write("rowtopk", out, reference.rowtopk(logits, lens, k))

    def cand_blocks(self, logits: Any, lens: Any, blocks: Any) -> None:
        from ds41k import reference

        self._write("cand_blocks", blocks, reference.cand_blocks(logits, lens, blocks.shape[1]))

    def cand_topk(self, logits: Any, lens: Any, blocks: Any, out: Any, k: int) -> None:
        from ds41k import reference

        self._write("cand_topk", out, reference.cand_topk(logits, lens, blocks, k))


@pytest.mark.parametrize("fault", ["", "rowtopk", "cand_blocks", "cand_topk"])
def test_a_row_that_depends_on_its_chunk_is_found(torch: Any, monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    from ds41k import cases, qualify

    monkeypatch.setattr(qualify, "library", StandIns(fault))
    generator = torch.Generator().manual_seed(0)
    rows, width = 10, 3000
    logits = cases.fill("few_levels", rows, width, generator)
    case = cases.Case("few_levels 10x3000", logits, cases.lengths_for(rows, width, generator))
    verdict = qualify.Verdict()
    qualify.check_chunks(case, verdict)
    assert verdict.checks == 6
    assert verdict.correct is (fault == "")
    if fault:
        assert f"{fault} few_levels 10x3000 in chunks of 3" in " ".join(verdict.failures)
    assert verdict.report()["shapes"] == []
