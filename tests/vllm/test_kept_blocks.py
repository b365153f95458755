"""Leased and held blocks are handed out last, while vLLM's pool has others."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

pytest.importorskip("vllm")

from vllm.v1.core.kv_cache_utils import make_block_hash_with_group_id
from vllm.v1.request import RequestStatus

from kvshm._base.ids import LeaseBit, Rank
from kvshm._shm.layout import pack_records, unpack_records
from kvshm._shm.own_slot_table import OwnSlotTable
from kvshm._shm.statistics import FORCED, KEPT

from .scheduling import DrivenEngine, Make, Sent, described, prompt, vllm_config
from .several_groups import ALL_KINDS

BIT = LeaseBit(9)
OTHERS = 10_000


def compute(e: DrivenEngine, tokens: list[int], name: str = "first") -> None:
    e.add(name, tokens, max_tokens=1)
    while name in e.scheduler.requests:
        e.step()


def records_of(e: DrivenEngine, blocks: set[int]) -> bytes:
    return pack_records(r for r in unpack_records(e.table.scan()) if r.block_id in blocks)


def storm(e: DrivenEngine, blocks: int, rounds: int = 4) -> set[int]:
    """Prompts of this many blocks come and go; returns what vLLM handed out."""
    pool = e.scheduler.kv_cache_manager.block_pool
    handed_out, hand_out = set[int](), pool.get_new_blocks

    def watched(*args: Any) -> Any:
        given = hand_out(*args)
        handed_out.update(block.block_id for block in given)
        return given

    pool.get_new_blocks = watched
    for number in range(rounds):
        compute(e, prompt(blocks, tail=0, first=OTHERS * (2 + number)), f"storm {number}")
    pool.get_new_blocks = hand_out
    return handed_out


def keep(e: DrivenEngine, how: str, blocks: set[int]) -> None:
    """What another engine does with its mapping of the table."""
    peer, records = e.table.as_peer(), records_of(e, blocks)
    if how == "held":
        assert peer.hold(records, 60) == len(blocks)
    else:
        assert peer.lease(BIT, records)[0] == len(blocks)


@pytest.mark.parametrize("how", ["held", "leased"])
def test_kept_blocks_survive_a_storm_and_go_when_nothing_else_is_left(
    engine: Make, how: str
) -> None:
    e = engine(num_blocks=32)
    compute(e, prompt(6))
    first = e.ready()
    records = records_of(e, first)
    keep(e, how, first)
    assert storm(e, 20) == set(range(1, 32)) - first
    assert all(e.table.recheck(Rank(0), records))
    assert e.table.counters.read(KEPT) == 3 * 6, "each time at the queue's head"
    e.add("large", prompt(28, first=OTHERS))
    for _ in range(3):
        e.step()
    assert len(first & set(e.blocks_of("large"))) == 4
    assert sum(e.table.recheck(Rank(0), records)) == 2
    if how == "leased":  # as it was with all blocks before
        assert e.table.counters.read(FORCED) == 4


def test_other_blocks_are_reused_in_vllms_order(engine: Make) -> None:
    e = engine(num_blocks=32)
    compute(e, prompt(12))
    pool = e.scheduler.kv_cache_manager.block_pool
    order = [block.block_id for block in pool.free_block_queue.get_all_free_blocks()]
    chance = random.Random(4)
    kept = set(chance.sample(sorted(e.ready()), 5))
    keep(e, "held", kept)
    given = [block.block_id for number in (20, 6) for block in pool.get_new_blocks(number)]
    assert given == [block for block in order if block not in kept]
    assert kept != set(order[26:]), "they were not the last anyway"
    assert {block.block_id for block in pool.get_new_blocks(5)} == kept


def test_what_is_held_is_hit_afterwards(engine: Make) -> None:
    e = engine(num_blocks=32)
    compute(e, prompt(6))
    keep(e, "held", first := e.ready())
    storm(e, 20)
    e.add("again", prompt(6), max_tokens=1)
    e.schedule()
    assert set(e.blocks_of("again")) > first


def test_a_hold_that_has_ended_keeps_nothing(engine: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    e = engine(num_blocks=32)
    compute(e, prompt(6))
    first = e.ready()
    e.table.hold(records_of(e, first), 60)
    monkeypatch.setattr(e.table, "_clock", lambda: time.time_ns() + 61 * 10**9)
    assert storm(e, 20) >= first
    assert not e.table.kept_until


def test_a_lease_that_was_given_back_keeps_nothing(engine: Make) -> None:
    e = engine(num_blocks=32)
    compute(e, prompt(6))
    first = e.ready()
    records = records_of(e, first)
    keep(e, "leased", first)
    e.table.as_peer().release(BIT, records)
    assert storm(e, 20) >= first


def test_a_reset_ends_all_holds(engine: Make) -> None:
    e = engine(num_blocks=32)
    compute(e, prompt(6))
    keep(e, "held", e.ready())
    before = e.table
    assert e.scheduler.reset_prefix_cache()
    e.add("next", prompt(2), max_tokens=9)
    sent = e.schedule()
    e.run(sent, described(sent))
    while e.connector._scheduler.cache.table in (None, before):
        time.sleep(0.01)
    e.wait_for_epoch()
    assert not e.table.kept_until
    while "next" in e.scheduler.requests:
        e.step()
    assert storm(e, 20) == set(range(1, 32))


def test_preempted_requests_take_kept_blocks_and_end(engine: Make) -> None:
    """Nothing that vLLM counts changes: a pool that is too small without the kept ones works on."""
    e = engine(num_blocks=20)
    compute(e, prompt(10))
    keep(e, "held", e.ready())
    requests = [e.add(f"r{n}", prompt(4, first=OTHERS * (n + 1)), max_tokens=80) for n in range(4)]
    for _ in range(600):
        e.step()
        e.table.hold(e.table.scan(), 60)  # whatever is published
        if not e.scheduler.requests:
            break
    assert [request.status for request in requests] == [RequestStatus.FINISHED_LENGTH_CAPPED] * 4
    assert sum(request.num_preemptions for request in requests)
    pool = e.scheduler.kv_cache_manager.block_pool
    assert len(pool.free_block_queue.get_all_free_blocks()) == pool.get_num_free_blocks() == 19


@pytest.mark.parametrize("kind", ALL_KINDS)
def test_blocks_of_all_groups_are_kept(engine: Make, kind: str) -> None:
    e = engine(False, 80, ALL_KINDS[kind])
    compute(e, prompt(8))
    first = e.ready()
    assert {r.group for r in unpack_records(e.table.scan())} == set(range(len(ALL_KINDS[kind])))
    keep(e, "held", first)
    assert storm(e, 12, rounds=16) == set(range(1, 80)) - first
    assert first <= e.ready()


# -- what it costs others


class Step(NamedTuple):
    """What an engine has made of a step."""

    scheduled: dict[str, int]
    preemptions: dict[str, int]
    tables: dict[str, list[list[int]]]


def lives(engines: list[DrivenEngine], seed: int, hits: bool = True) -> Iterator[list[Step]]:
    """Random requests; yields what each engine has made of every step.  With asynchronous
    scheduling the last step's output is taken in behind it.  ``hits``: whether requests read
    vLLM's cache."""
    chance = random.Random(seed)
    under_way: list[list[Sent]] = [[] for _ in engines]
    for step in range(250):
        if chance.random() < 0.25:
            family = OTHERS * chance.randint(1, 6)
            tokens = prompt(chance.randint(1, 9), chance.randint(0, 15), family)
            longest = chance.randint(1, 60)
            for e in engines:
                request = e.add(f"r{step}", tokens, max_tokens=longest)
                request.skip_reading_prefix_cache = not hits
        made = []
        for e, sent in zip(engines, under_way, strict=True):
            sent.append(e.schedule())
            requests = e.scheduler.requests
            preemptions = {name: request.num_preemptions for name, request in requests.items()}
            tables = {name: e.tables_of(name) for name in requests}
            made.append(Step(sent[-1].output.num_scheduled_tokens, preemptions, tables))
            while len(sent) > e.asynchronous:
                first = sent.pop(0)
                e.answer(first, None) if e.connector is None else e.run(first)
        yield made


@pytest.fixture(params=[False, True], ids=["sync", "async"])
def beside_vllm(
    request: pytest.FixtureRequest, engine: Make, model: Path
) -> tuple[DrivenEngine, DrivenEngine]:
    """An engine that exports, and vLLM alone; with asynchronous scheduling no prompt is cut, as
    the played ranks sample a token in each of its steps."""
    asynchronous: bool = request.param
    whole = {"max_num_batched_tokens": 4096} if asynchronous else {}
    config = vllm_config(model, **whole)
    config.scheduler_config.async_scheduling = asynchronous
    config.kv_transfer_config = None
    plain = DrivenEngine(config, 40, asynchronous, shares=False)
    ours = engine(asynchronous, 40, **whole)
    # What vLLM does for whatever connector imports (tests/vllm/test_private_facts.py).
    plain.scheduler.defer_block_free = ours.scheduler.defer_block_free
    return ours, plain


@pytest.mark.parametrize("seed", range(3))
def test_without_holds_and_leases_vllm_hands_out_the_blocks_that_it_would(
    beside_vllm: tuple[DrivenEngine, DrivenEngine], seed: int
) -> None:
    """In as many steps, with the same preemptions."""
    e, preempted = beside_vllm[0], 0
    for ours, plains in lives([*beside_vllm], seed):
        assert ours == plains
        preempted += sum(plains.preemptions.values())
    assert preempted, "the pool was full"
    assert not e.table.counters.read(KEPT)


@pytest.mark.parametrize("how", ["held", "leased"])
def test_if_all_blocks_are_kept_requests_take_the_steps_that_they_would(
    beside_vllm: tuple[DrivenEngine, DrivenEngine], how: str
) -> None:
    """No kept block keeps a request waiting, or costs a preemption: they are free blocks."""
    e, preempted = beside_vllm[0], 0
    for ours, plains in lives([*beside_vllm], seed=1, hits=False):
        assert (ours.scheduled, ours.preemptions) == (plains.scheduled, plains.preemptions)
        preempted += sum(plains.preemptions.values())
        keep(e, how, e.ready())
    assert preempted, "the pool was full"
    assert e.table.counters.read(KEPT)
    assert how == "held" or e.table.counters.read(FORCED), "reused in spite of their leases"


def test_nothing_is_looked_at_while_nothing_can_be_kept(
    engine: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    e = engine(num_blocks=32)
    looks = count_walks(monkeypatch)
    compute(e, prompt(6))
    storm(e, 20)
    assert not looks
    keep(e, "held", e.ready())
    storm(e, 20)
    assert looks


def test_an_engine_that_does_not_export_pays_nothing(engine: Make, model: Path) -> None:
    e = engine(num_blocks=32)
    pool = e.scheduler.kv_cache_manager.block_pool
    assert "get_new_blocks" in vars(pool)
    transfer = e.config.kv_transfer_config.__class__(
        kv_connector="KvshmConnector",
        kv_connector_module_path="kvshm.hooks.connector",
        kv_role="kv_consumer",
    )
    config = vllm_config(model, transfer)
    config.scheduler_config.async_scheduling = False
    importer = DrivenEngine(config, 32)
    assert importer.connector._scheduler.importer.room is not None
    assert "get_new_blocks" not in vars(importer.scheduler.kv_cache_manager.block_pool)
    importer.close()


def test_blocks_that_are_all_kept_are_looked_at_once_a_second(
    engine: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else each step would walk through the whole pool; until another block is free."""
    e = engine(num_blocks=32)
    compute(e, prompt(24))
    now = time.time_ns()
    monkeypatch.setattr(e.table, "_clock", lambda: now)
    keep(e, "held", e.ready())
    pool = e.scheduler.kv_cache_manager.block_pool
    pool.get_new_blocks(7)
    looks = count_walks(monkeypatch)
    passed_over = e.table.counters.read(KEPT)
    for _ in range(5):
        taken = pool.get_new_blocks(1)
    assert len(looks) == 1
    assert e.table.counters.read(KEPT) == passed_over, "nothing went before them"
    pool.blocks[taken[0].block_id].set_block_hash(make_block_hash_with_group_id(bytes(32), 0))
    pool.free_blocks(taken)
    assert pool.get_new_blocks(1) == taken, "it lay behind all others"
    pool.get_new_blocks(1)
    assert len(looks) == 2
    now += 10**9
    pool.get_new_blocks(1)
    pool.get_new_blocks(1)
    assert len(looks) == 3


def count_walks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Has one element for each walk along the queue, from now on."""
    looks: list[int] = []
    walk = OwnSlotTable.kept_runs

    def counted(table: OwnSlotTable, head: object, wanted: int, most: int) -> Any:
        looks.append(wanted)
        return walk(table, head, wanted, most)

    monkeypatch.setattr(OwnSlotTable, "kept_runs", counted)
    return looks
