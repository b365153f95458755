"""A drafter on a GPU writes KV behind the model: before its step's report in vLLM 0.32, after it
from 0.33 on (Model Runner V2)."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm.v1.worker.gpu.kv_connector import ActiveKVConnector
from vllm.v1.worker.gpu.model_runner import GPUModelRunner

from kvshm._shm.statistics import IMPORTED_BLOCKS, MISMATCHED, VERIFIED

from .test_cuda_runner import InProcessEngine, imports_what_was_computed, pair
from .test_private_facts import in_order

__all__ = ["pair"]

DRAFTS = {"method": "ngram_gpu", "num_speculative_tokens": 2, "prompt_lookup_max": 3}
REPORTS_FIRST = "defer_finalize" in inspect.signature(ActiveKVConnector.post_forward).parameters


class DraftingEngine(InProcessEngine):
    """The last layer is the drafter's: it is written when the model's forward pass was launched."""

    def report(self, output: Any) -> Any:
        if not REPORTS_FIRST:
            self.draft(output)
            return super().report(output)
        said = self.runner.post_forward(output.finished_req_ids, defer_finalize=True)
        self.draft(output)
        self.runner.finalize_step()
        return said

    def launch_forward(self, output: Any) -> None:
        self.writes: list[tuple[int, int]] = []
        super().launch_forward(output)

    def _write(self, block: int, value: int) -> None:
        self.writes.append((block, value))
        self.write_into("layer.0", block, value)

    def draft(self, output: Any) -> None:
        for block, value in self.writes:
            self.write_into("layer.1", block, value)


@pytest.fixture(autouse=True)
def checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVSHM_VERIFY", "1")


def test_the_order_of_report_and_drafter_is_one_of_two_that_are_known() -> None:
    first, then = "self.kv_connector.post_forward(", "self.speculator.propose("
    if REPORTS_FIRST:
        in_order(GPUModelRunner.sample_tokens, first, then, "self.kv_connector.finalize_step()")
    else:
        in_order(GPUModelRunner.sample_tokens, then, first)


@pytest.mark.parametrize("pair", [(DraftingEngine, {"speculative_config": DRAFTS})], indirect=True)
def test_what_a_drafter_has_written_is_imported_and_verified(
    pair: list[DraftingEngine],
) -> None:
    """Checksums are of what the drafter has written, and no one reads a block before."""
    a, b = pair
    imports_what_was_computed(a, b)
    counted = b.cache.table.counters
    assert [counted.read(c) for c in (IMPORTED_BLOCKS, VERIFIED, MISMATCHED)] == [5, 5, 0]
