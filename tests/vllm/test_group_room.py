"""Room for the imports of engines with several KV cache groups: what vLLM would find."""

from __future__ import annotations

import random

import pytest

pytest.importorskip("vllm")

from vllm.v1.request import RequestStatus

from kvshm.hooks.vllm.imports import pool_room

from .scheduling import BLOCK_SIZE, DrivenEngine, Make, full, prompt, window
from .several_groups import ALL_KINDS


def test_blocks_that_are_kept_are_handed_out_last(engine: Make) -> None:
    e = engine(False, 32, [full(), window(40)])
    e.add("a", prompt(6), max_tokens=1)
    e.step()
    e.step()
    pool = e.scheduler.kv_cache_manager.block_pool
    order = [block.block_id for block in pool.free_block_queue.get_all_free_blocks()]
    users, free = [block.ref_cnt for block in pool.blocks], pool.get_num_free_blocks()
    kept = [block for block in order if pool.blocks[block].block_hash][3:7]
    e.connector._scheduler.importer.room.keep(kept)
    assert [block.ref_cnt for block in pool.blocks] == users
    assert pool.get_num_free_blocks() == free
    order = [block for block in order if block not in kept]
    assert [block.block_id for block in pool.get_new_blocks(free)] == order + kept


@pytest.mark.parametrize("kind", ALL_KINDS)
def test_room_for_an_import_is_what_vllm_would_find(
    engine: Make, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Beside what prefills under way still need, for the load and for the rest of its prompt."""
    monkeypatch.setattr(pool_room, "SPARE", 10**9)
    specs = ALL_KINDS[kind]
    e = engine(False, 8 + 16 * len(specs), specs, max_num_batched_tokens=48)
    rnd, said, scheduler = random.Random(kind), [], e.scheduler
    importer, manager = e.connector._scheduler.importer, scheduler.kv_cache_manager
    room, decoding = importer.room, 0
    for number in range(200):
        if rnd.random() < 0.3:
            tokens = prompt(rnd.randint(1, 14), first=100 * number)
            e.add(f"r{number}", tokens, max_tokens=rnd.randint(1, 40))
        e.step()
        reserved = scheduler._inflight_prefill_reserved_blocks()
        assert sum(map(room._missing, scheduler._inflight_prefills)) == reserved
        for request in set(scheduler.running) - scheduler._inflight_prefills:
            assert room._missing(request) <= len(specs), "nothing but the next token's blocks"
            decoding += 1
        wants = Wanted(e, prompt(rnd.randint(1, 20), first=10**5))
        hashes = (
            rnd.randint(0, len(wants.hashes))
            // importer.lookups.groups.step
            * importer.lookups.groups.step
        )
        if not hashes:
            continue
        needed = importer.lookups.groups.blocks_at(hashes)
        said.append(admits := room.admits(needed, wants.request))
        free = room.free()
        allocated = manager.allocate_slots(
            wants.request,
            0,
            num_external_computed_tokens=hashes * BLOCK_SIZE,
            delay_cache_blocks=True,
            full_sequence_must_fit=True,
            reserved_blocks=reserved,
        )
        assert allocated is not None or not admits
        if allocated is not None:
            assert free - room.free() == needed
            whole = scheduler._request_remaining_blocks
            manager.free(wants.request)
            assert admits or free - room_taken(e) < max(needed, whole(wants.request))
    assert {True, False} <= set(said)
    assert decoding > 50


class Wanted:
    """A request that vLLM does not know, as if it were waiting."""

    def __init__(self, e: DrivenEngine, tokens: list[int]) -> None:
        self.request = e.add("wanted", tokens, max_tokens=1)
        e.scheduler.finish_requests("wanted", RequestStatus.FINISHED_ABORTED)
        self.request.status = RequestStatus.WAITING
        self.hashes = self.request.block_hashes


def room_taken(e: DrivenEngine) -> int:
    room = e.connector._scheduler.importer.room
    return sum(map(room._missing, e.scheduler.requests.values()))
