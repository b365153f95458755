"""The connector under vLLM's real schedulers: what is readable by others after which call."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("vllm")

from kvshm.hooks.messages import RankReport
from kvshm.plans import LoadReport
from kvshm.records import SlotState

from .scheduling import BLOCK_SIZE, Make, prompt


def test_a_block_is_readable_only_after_the_output_of_the_step_that_computed_it(
    engine: Make,
) -> None:
    e = engine()
    e.add("r", prompt(3))
    sent = e.schedule()
    hashed = [b for b in e.scheduler.kv_cache_manager.get_blocks("r").blocks[0] if b.block_hash]
    assert len(hashed) == 3  # vLLM hashes at schedule time, before a byte is written
    assert e.ready() == set()
    e.run(sent)
    assert e.ready() == set(e.blocks_of("r")[:3])


def test_chunked_prefill_publishes_chunk_by_chunk(engine: Make) -> None:
    e = engine(max_num_batched_tokens=40, max_num_seqs=4)
    e.add("r", prompt(5))
    seen = []
    for _ in range(3):
        e.step()
        seen.append(len(e.ready()))
    assert seen == [2, 5, 5]


def test_decoded_blocks_are_published(engine: Make) -> None:
    e = engine()
    e.add("r", prompt(1, tail=12), max_tokens=30)
    for _ in range(6):
        e.step()
    blocks = e.blocks_of("r")
    assert set(blocks[:2]) == e.ready()


@pytest.mark.parametrize("ahead", [1, 2])
def test_asynchronous_scheduling_publishes_no_block_ahead_of_its_output(
    engine: Make, ahead: int
) -> None:
    """Steps are scheduled ``ahead`` of the outputs, as with a batch queue."""
    e = engine(asynchronous=True)
    e.add("r", prompt(2, tail=10), max_tokens=60)
    under_way = [e.schedule() for _ in range(ahead)]
    assert e.ready() == set()
    for outputs in range(1, 41):
        under_way.append(e.schedule())
        e.run(under_way.pop(0))
        # the first output computed 42 tokens, each further one a single token more
        computed = 2 * BLOCK_SIZE + 10 + outputs - 1
        blocks = e.blocks_of("r")
        assert e.ready() <= set(blocks[: computed // BLOCK_SIZE])
    assert len(e.ready()) >= 4


def test_a_reused_block_is_withdrawn_before_its_step_is_dispatched(engine: Make) -> None:
    e = engine(num_blocks=9)
    e.add("a", prompt(5), max_tokens=1)
    e.step()
    first = e.ready()
    assert len(first) == 5
    e.add("b", prompt(6, first=500), max_tokens=1)
    e.schedule()
    reused = set(e.blocks_of("b"))
    assert reused & first
    assert not reused & e.ready()


def test_eviction_by_block_id_withdraws(engine: Make) -> None:
    e = engine()
    e.add("a", prompt(3))
    e.step()
    victim = e.blocks_of("a")[1]
    e.scheduler.kv_cache_manager.evict_blocks({victim})
    assert victim not in e.ready()
    assert len(e.ready()) == 2


def test_a_preempted_request_publishes_what_was_computed(engine: Make) -> None:
    e = engine(num_blocks=10)
    e.add("a", prompt(3, tail=14), max_tokens=60)
    e.add("b", prompt(3, tail=14, first=700), max_tokens=60)
    for _ in range(20):
        e.step()
        for index, slot in enumerate(e.table.slots()):
            if slot.state is SlotState.READY:
                block = e.scheduler.kv_cache_manager.block_pool.blocks[index]
                assert bytes(block.block_hash)[:-4] == slot.block_hash
    assert any(r.num_preemptions for r in e.scheduler.requests.values())


def test_a_failed_rank_ends_sharing_and_costs_nothing_from_then_on(engine: Make) -> None:
    e = engine()
    e.add("a", prompt(3), max_tokens=30)
    e.step()
    sent = e.schedule()
    e.run(sent, RankReport(step=sent.metadata.step, failed=True))
    assert e.table.retired
    e.add("b", prompt(3, first=400), max_tokens=2)
    assert not e.step().metadata.describe
    assert e.connector._scheduler.exporter._computed == {}


def test_priority_scheduling_imports_only(engine: Make) -> None:
    e = engine(scheduling_policy="priority")
    e.add("a", prompt(3))
    e.step()
    assert e.ready() == set()


@pytest.mark.parametrize("said", [{"share": False}, {"share": "no"}, {"share": None}, "nonsense"])
def test_a_request_that_does_not_want_to_share_publishes_nothing(engine: Make, said: Any) -> None:
    e = engine()
    e.add("a", prompt(3)).kv_transfer_params = {"kvshm": said}
    e.add("b", prompt(2, first=900)).kv_transfer_params = {"kvshm": {}}
    e.step()
    assert e.ready() == set(e.blocks_of("b")[:2])


def test_a_block_rewritten_in_place_is_withdrawn(engine: Make) -> None:
    """vLLM recomputes in place after a failed load of a running request: hashes stay."""
    e = engine()
    e.add("a", prompt(3), max_tokens=20)
    e.step()
    request = e.scheduler.requests["a"]
    blocks = e.blocks_of("a")
    assert set(blocks[:3]) == e.ready()
    request.num_computed_tokens = BLOCK_SIZE
    sent = e.schedule()
    assert e.ready() == {blocks[0]}
    e.run(sent)
    assert e.ready() == set(blocks[:3])


@pytest.mark.parametrize("ahead", [0, 1])
def test_what_was_computed_from_anothers_failed_load_is_not_readable(
    engine: Make, monkeypatch: pytest.MonkeyPatch, ahead: int
) -> None:
    """In a MultiConnector another one may load into a request that runs already; vLLM hears
    with the step's output that a block did not come, and computes again in place."""
    e = engine(asynchronous=bool(ahead))
    found = (2 * BLOCK_SIZE, False)
    monkeypatch.setattr(e.connector, "get_num_new_matched_tokens", lambda *_: found)
    monkeypatch.setattr(e.connector, "update_state_after_alloc", lambda *_: None)
    e.add("a", prompt(5, tail=14), max_tokens=40)
    under_way = [e.schedule() for _ in range(1 + ahead)]
    blocks = e.blocks_of("a")
    e.run(under_way.pop(0), invalid_block_ids={blocks[1]})
    assert e.ready() == set()
    if under_way:
        e.run(under_way.pop(0))
        assert e.ready() == set()
    for _ in range(20):
        e.step()
    assert e.ready() == set()
    e.add("b", prompt(3, first=300), max_tokens=4)
    monkeypatch.undo()
    e.step()
    assert e.ready() == set(e.blocks_of("b")[:3])


def test_a_lost_load_is_recomputed_and_not_tried_again(
    engine: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A match whose blocks cannot be leased any more: vLLM computes, the request finishes."""
    e = engine()
    importer = e.connector._scheduler.importer
    monkeypatch.setattr(importer, "match", lambda request, local: 2 * BLOCK_SIZE)
    e.add("a", prompt(3), max_tokens=1)
    sent = e.schedule()
    (load,) = sent.metadata.loads
    assert load.pieces == ()
    assert len(load.lost) == 2
    report = RankReport(step=0, loads=[LoadReport("a", load.lost)])
    e.run(sent, report, invalid_block_ids=set(load.lost))
    monkeypatch.undo()
    assert "a" in importer._failed
    e.step()
    assert len(e.ready()) == 3
