"""What kvshm adds to transformers' continuous batching in an engine without peers.

    PYTHONPATH=. .venv/bin/python benchmarks/bench_transformers.py [--rounds 5] [--steps 200]

Two managers of transformers, one that shares and one that does not, take the same steps in turns:
scheduling and the paged cache's ledger are transformers' own, the model is played, so that only
bookkeeping is timed.  Each round asks both the same new prompts, of which nobody else has a block.

prefill_ms   all steps until each request has its first token
again_ms     the same prompts once more, which each manager finds in its own cache
decode_ms    one step of all requests; one in 16 completes a block and publishes it
ratio        shared over plain, in the same round
"""

from __future__ import annotations

import argparse
import gc
import os
import shutil
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch
from measurement import percentiles, report
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.generation.continuous_batching.requests import RequestState

from kvshm import Config
from kvshm.coordinator import in_process
from kvshm.hooks.transformers import node_of, share
from tests.transformers.managers import PAGE_SIZE, manager_of, random_prompt

SIZES = ((16, 8192), (4, 32768))
"""Requests, and tokens of each prompt."""
MODEL = LlamaConfig(
    vocab_size=640,
    hidden_size=16,
    intermediate_size=16,
    num_hidden_layers=1,
    num_attention_heads=1,
    num_key_value_heads=1,
)
PATIENCE_SECONDS = 30.0


class Played:
    """A manager whose model is played: each request has the same next token."""

    def __init__(self, config: Config | None, requests: int, tokens: int) -> None:
        """``config``: with it the manager shares."""
        blocks = requests * (tokens // PAGE_SIZE + 64)
        self.manager = manager_of(
            AutoModelForCausalLM.from_config(MODEL, dtype=torch.float32),
            num_blocks=blocks,
            max_batch_tokens=512,
            safety_margin=0.0,
        )
        if config is not None:
            share(self.manager, config=config)
        self.manager._generation_thread = threading.current_thread()
        self.processor = self.manager.batch_processor = self.manager._create_batch_processor()
        batch = self.batch = self.processor.inputs_and_outputs
        batch.prepare_batch_tensors = self._prepare
        batch.prepare_batch_update = self._update
        self.processor._generation_step = lambda _: None
        if config is not None:
            node = node_of(self.manager)
            assert node is not None, "it does not share"
            assert node.wait_joined(PATIENCE_SECONDS), node.refusal

    def _prepare(self, requests_in_batch: Any, **_: Any) -> None:
        self.batch.requests_in_batch = requests_in_batch
        for one in requests_in_batch:
            one.state.position_offset += one.query_length

    def _update(self) -> tuple[Any, list[int], None]:
        asked = self.batch.requests_in_batch
        return asked, [5] * sum(one.has_new_token for one in asked), None

    def step(self) -> float:
        """Take one step; return its milliseconds."""
        begun = time.perf_counter()
        assert self.processor.prepare_next_batch()
        self.processor.update_batch()
        return (time.perf_counter() - begun) * 1e3

    def answer(self, name: str, prompts: list[list[int]]) -> float:
        """Ask for all prompts, until each has its first token; return the milliseconds."""
        scheduler = self.processor.scheduler
        for number, prompt in enumerate(prompts):
            asked = RequestState(
                f"{name}{number}", initial_tokens=list(prompt), max_new_tokens=10**6
            )
            scheduler.add_waiting_request(asked)
        spent = 0.0
        while scheduler.waiting_requests or any(
            not one.generated_tokens for one in scheduler.active_requests.values()
        ):
            spent += self.step()
        return spent

    def finish(self) -> None:
        """Free the blocks of all requests."""
        for name in list(self.processor.scheduler.active_requests):
            self.processor.scheduler.finish_request(name)

    def close(self) -> None:
        if (node := node_of(self.manager)) is not None:
            self.processor.cache.prefixes.close()
            assert node.closed


def measure(config: Config, requests: int, tokens: int, steps: int, seed: int) -> dict[str, Any]:
    """One round: milliseconds of both managers, the plain one's first."""
    prompts = [random_prompt(seed + number, tokens) for number in range(requests)]
    both = [Played(None, requests, tokens), Played(config, requests, tokens)]
    gc.collect()
    gc.disable()
    try:
        prefill = [one.answer("first", prompts) for one in both]
        decode = [[one.step() for one in both] for _ in range(steps)]
        for one in both:
            one.finish()
        again = [one.answer("again", prompts) for one in both]
    finally:
        gc.enable()
        for one in both:
            one.close()
    return {"prefill": prefill, "decode": decode, "again": again}


def summary(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """The results of one size."""
    found: dict[str, Any] = {}
    for what in ("prefill", "again"):
        plain, shared = zip(*(one[what] for one in rounds), strict=True)
        ratios = [b / a for a, b in zip(plain, shared, strict=True)]
        found[what] = _row(plain, shared, ratios)
    plain, shared = zip(*(pair for one in rounds for pair in one["decode"]), strict=True)
    ratios = [sum(b for _, b in r["decode"]) / sum(a for a, _ in r["decode"]) for r in rounds]
    return found | {"decode": _row(plain, shared, ratios)}


def _row(plain: Any, shared: Any, ratios: list[float]) -> dict[str, Any]:
    return {
        "plain_ms": percentiles(plain),
        "with_kvshm_ms": percentiles(shared),
        "ratio": percentiles(ratios),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=200)
    asked = parser.parse_args()
    directory = Path(tempfile.mkdtemp(prefix="kvb-"))
    config = Config(enable=True, run_dir=str(directory), strict=True)
    try:
        with in_process.serve(config):
            for requests, tokens in SIZES:
                measured = [
                    measure(config, requests, tokens, asked.steps, 1000 * number)
                    for number in range(asked.rounds + 1)
                ]
                size = {"requests": requests, "tokens": tokens}
                report("transformers", **size, **summary(measured[1:]))  # the first one warms up
    finally:
        shutil.rmtree(directory)
    os._exit(0)  # transformers' threads of managers that never ran need no end


if __name__ == "__main__":
    main()
