"""Call orders that CUDA users run and the CPU build cannot, against vLLM's real schedulers.

With asynchronous scheduling a step is dispatched before the last one's output is there; with
speculative decoding the drafter of a step writes KV after that step's output was handed over.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from kvshm.hooks.vllm import scheduler_side as scheduler_side_module
from kvshm.hooks.vllm.messages import RankReport

from .scheduling import BLOCK_SIZE, DrivenEngine, vllm_config

NGRAM = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 3}


@pytest.fixture
def configured(model: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Makes one engine's configuration; shuts the engine down that was put into it."""
    run_dir = Path(tempfile.mkdtemp(prefix="kv-"))
    monkeypatch.setenv("KVSHM_RUN_DIR", str(run_dir))
    monkeypatch.setenv("KVSHM_NAMESPACE", run_dir.name.lower())
    monkeypatch.setenv("KVSHM_STRICT", "1")
    made: list[DrivenEngine] = []

    def start(asynchronous: bool, **arguments: Any) -> DrivenEngine:
        config = vllm_config(model, **arguments)
        config.scheduler_config.async_scheduling = asynchronous
        made.append(DrivenEngine(config, 32, asynchronous))
        return made[-1]

    yield start
    for engine in made:
        engine.close()
    shutil.rmtree(run_dir)


def prompt(blocks: int) -> list[int]:
    return list(range(1, blocks * BLOCK_SIZE + BLOCK_SIZE // 2 + 1))


def test_with_speculation_a_block_is_published_one_step_later(configured: Any) -> None:
    e = configured(False, speculative_config=NGRAM)
    e.add("r", prompt(3), max_tokens=20)
    e.step()
    assert e.ready() == set()  # the drafter of that step may still write
    e.step()
    assert e.ready() == set(e.blocks_of("r")[:3])


@pytest.mark.parametrize("asynchronous", [False, True])
def test_what_an_engine_computed_last_is_published_though_no_request_follows(
    configured: Any, asynchronous: bool
) -> None:
    draft = {**NGRAM, "method": "ngram_gpu"} if asynchronous else NGRAM
    e = configured(asynchronous, speculative_config=draft)
    e.add("r", prompt(3), max_tokens=1)
    sent = e.schedule()
    blocks = e.blocks_of("r")[:3]
    e.run(sent)
    assert e.ready() == set()
    assert e.scheduler.has_requests()
    late = e.schedule()
    assert late.metadata.fence
    e.run(late, RankReport(step=0))  # the GPU is not through with it
    assert e.ready() == set()
    assert e.scheduler.has_requests()
    e.step()
    assert e.ready() == set(blocks)
    assert not e.scheduler.has_requests()  # it rests


def test_an_engine_with_a_rank_that_is_stuck_comes_to_rest(
    configured: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduler_side_module, "FENCE_SECONDS", 0.05)
    e = configured(False, speculative_config=NGRAM)
    e.add("r", prompt(3), max_tokens=1)
    e.step()
    steps = 0
    while e.scheduler.has_requests():
        e.step(RankReport(step=0))
        steps += 1
    assert steps > 1
    e.add("s", prompt(2), max_tokens=2)
    e.step()
    e.step()
    assert len(e.ready()) == 3


def test_without_speculation_it_is_not_held_back(configured: Any) -> None:
    e = configured(False)
    e.add("r", prompt(3), max_tokens=20)
    e.step()
    assert e.ready() == set(e.blocks_of("r")[:3])


def test_a_step_dispatched_ahead_publishes_nothing_of_the_one_before(configured: Any) -> None:
    """The in-process executor with asynchronous scheduling: schedule, schedule, output, output."""
    e = configured(True)
    e.add("r", prompt(2), max_tokens=20)
    first, second = e.schedule(), e.schedule()
    assert e.ready() == set()
    e.run(first)
    computed = set(e.blocks_of("r")[:2])
    assert e.ready() == computed
    third = e.schedule()
    e.run(second)
    assert computed <= e.ready()
    e.run(third)
    assert computed <= e.ready()


def test_blocks_of_a_request_aborted_with_a_step_under_way_stay_sound(configured: Any) -> None:
    """A finished request's last step may still run: what it writes is not shown, and what is
    reused by another request is withdrawn before that one's step is dispatched."""
    from vllm.v1.request import RequestStatus

    e = configured(True)
    e.add("a", prompt(3), max_tokens=40)
    first, ahead = e.schedule(), e.schedule()
    e.run(first)
    shown = e.ready()
    e.scheduler.finish_requests(["a"], RequestStatus.FINISHED_ABORTED)
    e.add("b", [500 + i for i in range(24 * BLOCK_SIZE)][:250], max_tokens=2)
    following = e.schedule()
    assert not set(e.blocks_of("b")) & e.ready()
    e.run(ahead)
    assert e.ready() <= shown
    e.run(following)
    assert set(e.blocks_of("b")[: 250 // BLOCK_SIZE]) <= e.ready()
