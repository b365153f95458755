"""The connector under vLLM's real schedulers: what is readable by others after which call."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import RequestStatus

from kvshm._base.ids import BlockId, LeaseBit
from kvshm._engine.load_plan import LoadReport
from kvshm._shm.layout import BlockRecord, SlotState, pack_records, unpack_records
from kvshm._shm.own_slot_table import OwnSlotTable
from kvshm._shm.slot_table import PeerSlotTable
from kvshm.hooks.vllm.messages import QuietStep, RankReport

from .scheduling import BLOCK_SIZE, DrivenEngine, Make, prompt


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


def test_what_a_decode_shows_is_reported_with_its_output(
    engine: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be the last step before the engine falls idle."""
    e = engine()
    e.add("a", prompt(1), max_tokens=40)
    e.step()
    reported: list[set[int]] = []
    publisher = e.connector._scheduler.cache.publisher
    monkeypatch.setattr(publisher, "_send", lambda _: reported.append(e.ready()))
    while len(e.ready()) < 2:
        assert isinstance(e.step().metadata, QuietStep)
    assert reported[-1] == e.ready()


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


def lease_all(e: DrivenEngine) -> set[int]:
    """Lease every block that is shown, as another engine would; returns them."""
    records = []
    for block in sorted(e.ready()):
        slot = e.table.slot(BlockId(block))
        records.append(BlockRecord(slot.block_hash, BlockId(block), slot.generation, slot.depth))
    importer = PeerSlotTable.from_fd(e.table.name, e.table.descriptor(True))
    assert importer.lease(LeaseBit(0), pack_records(records))[0] == len(records)
    return {record.block_id for record in records}


def draining(e: DrivenEngine, blocks: set[int]) -> list[int]:
    return [b for b in blocks if e.table.slot(BlockId(b)).state is SlotState.DRAINING]


def test_a_decode_waits_for_leases_on_the_block_that_it_reuses(engine: Make) -> None:
    """However little else its step has to tell of."""
    e = engine(num_blocks=10)
    e.add("old", prompt(4), max_tokens=1)
    e.step()
    leased = lease_all(e)
    assert len(leased) == 4
    e.add("new", prompt(2, first=700), max_tokens=120)
    e.step()
    while leased <= e.ready():
        sent = e.schedule()
        assert not draining(e, leased)
        e.run(sent)
    assert isinstance(sent.metadata, QuietStep)


def test_a_quiet_step_waits_for_leases_on_blocks_that_were_evicted(engine: Make) -> None:
    e = engine()
    e.add("old", prompt(4), max_tokens=1)
    e.step()
    leased = lease_all(e)
    silent = e.add("new", prompt(2, tail=1, first=700), max_tokens=20)
    silent.kv_transfer_params = {"kvshm": {"share": False}}
    e.step()
    e.step()
    e.scheduler.kv_cache_manager.evict_blocks(leased)
    assert set(draining(e, leased)) == leased
    assert isinstance(e.step().metadata, QuietStep)
    assert not draining(e, leased)


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
    assert e.connector._scheduler.tracker is None


def test_a_block_that_priority_preemption_left_uncomputed_is_not_built_upon(
    engine: Make,
) -> None:
    """With priorities a request may lose its place in the schedule() that has hashed blocks for
    it.  No one computes them then, but others hit them."""
    e = engine(
        num_blocks=9,
        max_num_batched_tokens=3 * BLOCK_SIZE,
        scheduling_policy="priority",
        long_prefill_token_threshold=2 * BLOCK_SIZE,
        scheduler_reserve_full_isl=False,
    )
    e.add("low", prompt(12), priority=5)
    e.step()
    e.add("high", prompt(1, tail=15, first=500), max_tokens=1, priority=0)
    e.step()
    computed = e.blocks_of("low")
    sent = e.schedule()
    assert "low" in sent.output.preempted_req_ids
    e.scheduler.finish_requests("low", RequestStatus.FINISHED_ABORTED)
    e.run(sent)
    e.add("c", prompt(7), max_tokens=1)
    (new,) = e.step().output.scheduled_new_reqs
    assert new.num_computed_tokens == (len(computed) + 1) * BLOCK_SIZE  # one never computed
    e.step()
    assert {b for b in e.ready() if e.table.slot(b).depth} == set(computed[1:])


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


def test_a_session_that_goes_on_never_shows_the_token_it_dropped(
    engine: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A streaming-input session drops its stop token, which a step under way has computed, and
    its next input fills the block anew: vLLM hashes it in the schedule() that rewrites it."""
    e = engine(asynchronous=True)
    e.tokens = iter([5001, 7777, 9999, 5002])
    request = e.add("s", list(range(1, 15)), max_tokens=200, resumable=True)
    request.sampling_params.stop_token_ids = [7777]
    under_way = [e.schedule(), e.schedule()]
    e.run(under_way.pop(0))
    under_way.append(e.schedule())  # completes the block with the token of the step before
    e.run(under_way.pop(0))  # which is the stop token
    e.run(under_way.pop(0))
    (block, *_) = e.blocks_of("s")
    e.continue_session("s", [4242, 1, 2, 3])
    publish, shown = OwnSlotTable.publish, []

    def published(table: OwnSlotTable, *args: Any) -> bytes:
        records = publish(table, *args)
        shown.extend(record.block_id for record in unpack_records(records))
        return records

    monkeypatch.setattr(OwnSlotTable, "publish", published)
    sent = e.schedule()
    assert block not in shown
    e.run(sent)
    assert block in e.ready()


def test_what_is_computed_on_anothers_blocks_is_not_readable(
    engine: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a MultiConnector another one loads blocks of which this engine knows nothing: perhaps of
    a lossy codec.  Nothing on top of them is shown, not even what other requests compute there."""
    e = engine()
    found = (2 * BLOCK_SIZE, False)
    monkeypatch.setattr(e.connector, "get_num_new_matched_tokens", lambda *_: found)
    monkeypatch.setattr(e.connector, "update_state_after_alloc", lambda *_: None)
    e.add("a", prompt(5), max_tokens=40)
    e.step()
    monkeypatch.undo()
    e.add("b", prompt(7), max_tokens=1)
    for _ in range(20):
        e.step()
    assert e.ready() == set()
    e.add("c", prompt(3, first=300), max_tokens=40)
    e.step()
    assert e.ready() == set(e.blocks_of("c")[:3])


def test_a_block_of_which_another_filled_all_but_a_token_is_not_readable(
    engine: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where another connector has all of a prompt, vLLM computes its last token anew."""
    e = engine()
    found = (3 * BLOCK_SIZE, True)
    monkeypatch.setattr(e.connector, "get_num_new_matched_tokens", lambda *_: found)
    monkeypatch.setattr(e.connector, "update_state_after_alloc", lambda *_: None)
    e.add("a", prompt(3, tail=0), max_tokens=20)
    e.answer(e.schedule(), KVConnectorOutput(finished_recving={"a"}))
    monkeypatch.undo()
    for _ in range(20):
        e.step()
    assert e.ready() == set()


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
    assert not importer.imports["a"].may_import
    e.step()
    assert len(e.ready()) == 3
