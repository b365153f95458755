"""Imports of engines with several KV cache groups: vLLM's real schedulers, real slot tables of a
peer, and ranks that are played."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm.v1.core import kv_cache_manager
from vllm.v1.request import RequestStatus

from kvshm._base.ids import Epoch, Rank
from kvshm._engine.groups import Part
from kvshm._engine.load_plan import LoadReport
from kvshm._shm.layout import block_ids
from kvshm._shm.statistics import IMPORTED_BLOCKS, LEASES_TAKEN, LOADS_FAILED
from kvshm.hooks.vllm.messages import QuietReport

from .scheduling import BLOCK_SIZE, DrivenEngine, Make, Sent, full, prompt, states, window
from .several_groups import (
    ALL_KINDS,
    KINDS,
    PEER,
    WITH_STATES,
    PeerOf,
    Played,
    blocks_to_fill,
    first_step,
    peer_of,
    read_by,
)

__all__ = ["peer_of"]


# -- the engine's own blocks


def with_own_blocks(e: DrivenEngine, peer: PeerOf) -> list[int]:
    """The engine has a prompt's full blocks but has lost its windowed ones, which the peer has.
    Returns the full ones."""
    first = e.add("first", prompt(6), max_tokens=30)
    e.step()
    own, windowed = e.tables_of("first")
    e.step()
    e.scheduler.finish_requests("first", RequestStatus.FINISHED_ABORTED)
    e.step()
    e.scheduler.kv_cache_manager.evict_blocks(set(windowed))
    assert set(own[:6]) <= e.ready()
    assert e.ready().isdisjoint(windowed)
    peer.hold(first, Part(1, 3, 3))
    return own[:6]


@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_own_blocks_complete_what_a_peer_holds(
    engine: Make, peer_of: Any, asynchronous: bool, at_once: bool
) -> None:
    """They are copied: vLLM allocates new blocks for them.  No one leases them."""
    e = engine(asynchronous, 48, [full(), window(40)])
    peer, rank = peer_of(e), Played(e)
    own = with_own_blocks(e, peer)
    if at_once:
        epochs = {Epoch(PEER), Epoch(e.table.epoch)}
        e.connector._scheduler.importer.peers.attached[0] = frozenset(epochs)
    rank.compute(prompt(3, first=700))  # its blocks are now those that were used last
    e.add("second", prompt(6), max_tokens=9)
    sent = e.schedule()
    (load,) = sent.metadata.at_once if at_once else sent.metadata.loads
    from_own, from_peer = load.pieces
    tables = e.tables_of("second")
    assert (from_own.peer_epoch, from_peer.peer_epoch) == (e.table.epoch, PEER)
    assert block_ids(from_own.records) == own
    assert from_own.targets == tuple(tables[0][:6])
    assert from_peer.targets == tuple(tables[1][3:6])
    assert tables[1][:3] == [0, 0, 0]
    assert not set(load.targets) & set(own)
    assert (any(from_own.taken), all(from_peer.taken), peer.leased) == (False, True, 3)
    assert not any(slot.leases for slot in e.table.slots())
    free = e.scheduler.kv_cache_manager.block_pool.free_block_queue.get_all_free_blocks()
    assert [block.block_id for block in free[-6:]] == own, "handed out last"
    assert e.table.as_peer().recheck(Rank(0), from_own.records) == [True] * 6
    rank.run(sent, LoadReport(load.load_id, ()))
    for _ in range(2 + asynchronous):
        rank.run(e.schedule())
    assert read_by(e, "second") <= e.ready()
    assert set(own) <= e.ready()
    assert rank.finish() == []
    assert rank.is_clean()


def test_an_own_block_that_is_reused_before_its_copy_fails_the_whole_load(
    engine: Make, peer_of: Any
) -> None:
    """The rank's re-check sees it, as with a peer's."""
    e = engine(False, 48, [full(), window(40)])
    peer, rank = peer_of(e), Played(e)
    with_own_blocks(e, peer)
    e.add("second", prompt(6), max_tokens=9)
    sent = e.schedule()
    (load,) = sent.metadata.loads
    pool = e.scheduler.kv_cache_manager.block_pool
    pool.free_blocks(pool.get_new_blocks(pool.get_num_free_blocks()))
    good = e.table.as_peer().recheck(Rank(0), load.pieces[0].records)
    assert good == [False] * 6
    rank.run(sent, LoadReport(load.load_id, load.pieces[0].targets))
    assert not set(load.targets) & e.ready()
    assert rank.finish() == []
    assert rank.is_clean()


def changing_before_the_lease(
    e: DrivenEngine, monkeypatch: pytest.MonkeyPatch, change: Callable[[], object]
) -> Sent:
    """Schedule a step in which something changes between the match and the lease."""
    importer = e.connector._scheduler.importer
    allocated = importer.allocated
    with monkeypatch.context() as patched:
        patched.setattr(importer, "allocated", lambda *args: (change(), allocated(*args)))
        return e.schedule()


def test_an_own_block_that_is_reused_before_its_load_begins_is_lost(
    engine: Make, peer_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM allocates between the match and the load, perhaps the very block."""
    e = engine(False, 48, [full(), window(40)])
    peer, rank = peer_of(e), Played(e)
    own = with_own_blocks(e, peer)
    e.add("second", prompt(6), max_tokens=9)
    sent = changing_before_the_lease(
        e, monkeypatch, lambda: e.connector._scheduler.tracker.blocks_change([own[2]])
    )
    (load,) = sent.metadata.loads
    assert (load.pieces, load.lost) == ((), blocks_to_fill(e, "second", range(6)))
    rank.run(sent, LoadReport(load.load_id, load.lost))
    assert not set(load.lost) & e.ready()
    assert rank.finish() == []
    assert rank.is_clean()


@pytest.mark.parametrize(("left", "fits"), [(16, True), (15, False)])
def test_own_blocks_are_not_copied_where_their_copies_would_take_their_place(
    engine: Make, peer_of: Any, left: int, fits: bool
) -> None:
    """Nine blocks are to be filled, six of them from free ones of the engine's own."""
    e = engine(False, 48, [full(), window(40)])
    own, importer = with_own_blocks(e, peer_of(e)), e.connector._scheduler.importer
    importer.peers.attached[0] = frozenset({Epoch(PEER), Epoch(e.table.epoch)})
    importer.room.keep(own)
    pool = e.scheduler.kv_cache_manager.block_pool
    pool.get_new_blocks(pool.get_num_free_blocks() - left)
    e.add("second", prompt(6), max_tokens=9)
    assert len(e.schedule().metadata.at_once) == fits


# -- loads that fail


def test_a_load_that_lacks_one_block_copies_nothing_and_holds_no_lease(
    engine: Make, peer_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A part of it would be of no use; the peer need not wait for leases on the other blocks."""
    e = engine(False, 48, [full(), window(40)])
    peer, rank = peer_of(e), Played(e)
    peer.hold_all(prompt(6))
    e.add("r", prompt(6), max_tokens=9)
    last = [peer.used]  # the last block of the last group
    sent = changing_before_the_lease(e, monkeypatch, lambda: peer.exporter.table.retract(last))
    (load,) = sent.metadata.loads
    assert (load.pieces, load.lost) == ((), blocks_to_fill(e, "r", range(6)))
    assert peer.leased == 0
    assert e.table.counters.read(LEASES_TAKEN) > 0
    rank.run(sent, LoadReport(load.load_id, load.lost))
    assert rank.finish() == []
    assert rank.is_clean()


@pytest.mark.parametrize("kind", ALL_KINDS)
@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("bad", [0, -1, None])
def test_an_asynchronous_load_counts_as_a_whole(
    engine: Make, peer_of: Any, kind: str, asynchronous: bool, bad: int | None
) -> None:
    """If it loses one block of one group, vLLM begins the request again, and nothing is imported
    for it a second time.  What follows is computed and shown either way."""
    e = engine(asynchronous, 64, ALL_KINDS[kind])
    peer, rank = peer_of(e), Played(e)
    peer.hold_all(prompt(6))
    request = e.add("r", prompt(8), max_tokens=9)
    sent = e.schedule()
    assert request.status is RequestStatus.WAITING_FOR_REMOTE_KVS
    (load,) = sent.metadata.loads
    assert load.targets == blocks_to_fill(e, "r", range(6))
    assert (load.lost, load.length, peer.leased) == ((), 6, len(load.targets))
    rank.run(sent, LoadReport(load.load_id, () if bad is None else (load.targets[bad],)))
    assert not set(load.targets) & e.ready()  # vLLM has given none of them a hash so far
    sent = e.schedule()
    begin = 96 * (bad is None)
    first = first_step(e, begin, request.num_prompt_tokens)
    assert sent.output.num_scheduled_tokens == {"r": first}
    assert not sent.metadata.loads
    rank.run(sent)
    assert bad is not None or set(load.targets) <= e.ready()
    counted = [e.table.counters.read(counter) for counter in (IMPORTED_BLOCKS, LOADS_FAILED)]
    assert counted == ([len(load.targets), 0] if bad is None else [0, 1])
    assert read_by(e, "r") <= e.ready()
    assert rank.finish() == []
    assert rank.is_clean()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("bad", [0, -1, None])
def test_a_load_at_once_counts_as_a_whole(
    engine: Make, peer_of: Any, kind: str, asynchronous: bool, bad: int | None
) -> None:
    e = engine(asynchronous, 64, KINDS[kind])
    peer, rank = peer_of(e), Played(e)
    peer.hold_all(prompt(6))
    peer.attached()
    request = e.add("r", prompt(8), max_tokens=9)
    under_way = [e.schedule()]
    (load,) = under_way[0].metadata.at_once
    assert load.targets == blocks_to_fill(e, "r", range(6))
    blocks = e.scheduler.kv_cache_manager.block_pool.blocks
    assert not any(blocks[block].block_hash for block in load.targets)
    if asynchronous:
        under_way.append(e.schedule())
    computed = {b for table in e.tables_of("r") for b in table if b}
    rank.run(
        under_way.pop(0), LoadReport(load.load_id, () if bad is None else (load.targets[bad],))
    )
    assert request.num_preemptions == (bad is not None)
    if bad is None:
        assert read_by(e, "r") <= e.ready()
        assert set(load.targets) <= e.ready()
    else:
        assert not computed & e.ready()
    for sent in under_way:
        rank.run(sent)
    assert rank.finish() == []
    assert rank.is_clean()


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("kind", ALL_KINDS)
@pytest.mark.parametrize("when", ["match", "load"])
def test_a_load_without_a_plan_fails_and_its_request_is_computed(
    engine: Make,
    peer_of: Any,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    asynchronous: bool,
    when: str,
) -> None:
    """A hook fails between the match and the allocation: vLLM waits for a report all the same."""
    e = engine(asynchronous, 64, ALL_KINDS[kind])
    peer, rank = peer_of(e), Played(e)
    peer.hold_all(prompt(6))
    monkeypatch.setattr(e.connector, "strict", False)
    side = e.connector._scheduler

    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("on purpose")

    what = (side.importer, "allocated") if when == "match" else (side.cache.planner, "load")
    monkeypatch.setattr(*what, fail)
    e.add("r", prompt(8), max_tokens=9)
    sent = e.schedule()
    monkeypatch.undo()
    (load,) = sent.metadata.loads
    assert load.targets == ()
    assert load.lost == blocks_to_fill(e, "r", range(6))
    rank.run(sent, LoadReport(load.load_id, load.lost))
    first = first_step(e, 0, len(prompt(8)))
    assert e.schedule().output.num_scheduled_tokens == {"r": first}


@pytest.mark.parametrize("kind", WITH_STATES)
def test_no_step_waits_for_a_load_with_states(engine: Make, peer_of: Any, kind: str) -> None:
    """vLLM's worker copies the state that a request goes on from before any load begins."""
    e = engine(False, 64, WITH_STATES[kind])
    peer = peer_of(e)
    peer.hold_all(prompt(6))
    peer.attached()
    request = e.add("r", prompt(8), max_tokens=9)
    sent = e.schedule()
    assert (len(sent.metadata.at_once), len(sent.metadata.loads)) == (0, 1)
    assert request.status is RequestStatus.WAITING_FOR_REMOTE_KVS


@pytest.mark.parametrize("local", [0, 2])
def test_an_import_with_states_brings_no_more_than_is_needed(
    engine: Make, peer_of: Any, local: int
) -> None:
    """One state of each group, and the attention behind the local hit, in one piece."""
    e = engine(False, 64, [states(), full(), states()])
    peer, rank = peer_of(e), Played(e)
    if local:
        alone = {"kv_transfer_params": {"kvshm": {"share": False}}}
        e.add("own", prompt(local), extra_args=alone, max_tokens=1)
        rank.finish()
    peer.hold_all(prompt(6))
    e.add("r", prompt(8), max_tokens=9)
    (load,) = e.schedule().metadata.loads
    (piece,) = load.pieces
    brought = [sum(b in piece.targets for b in table) for table in e.tables_of("r")]
    assert brought == [1, 6 - local, 1]
    assert len(load.targets) == sum(brought) == peer.leased


def test_null_blocks_stay_sound_whatever_is_computed_over_them(engine: Make) -> None:
    """They stand in a table for states that are not kept.  One request goes on from blocks of which
    nothing is known, so what it computes is not shown; another one goes on from known blocks."""
    e = engine(False, 64, [full(), states()])
    e.add("a", prompt(3), max_tokens=1)
    e.step()
    e.step()
    e.connector._scheduler.tracker.blocks_failed(e.ready())  # nothing is known of them any more
    e.add("c", prompt(4, first=2000), max_tokens=1)
    e.step()
    e.step()
    e.add("b", [*prompt(3, tail=0), *prompt(6, first=700)], max_tokens=1)
    assert e.step().output.num_scheduled_tokens["b"] == 6 * BLOCK_SIZE
    e.step()
    e.add("d", [*prompt(4, tail=0, first=2000), *prompt(3, first=3000)], max_tokens=9)
    assert e.step().output.num_scheduled_tokens["d"] == 3 * BLOCK_SIZE
    e.step()
    assert read_by(e, "d") <= e.ready()


# -- what happens meanwhile


@pytest.mark.parametrize("good", [False, True])
@pytest.mark.parametrize("kind", ALL_KINDS)
def test_a_request_that_is_aborted_keeps_its_blocks_until_its_load_has_ended(
    engine: Make, peer_of: Any, kind: str, good: bool
) -> None:
    e = engine(False, 64, ALL_KINDS[kind])
    peer, rank = peer_of(e), Played(e)
    peer.hold_all(prompt(6))
    e.add("r", prompt(8), max_tokens=9)
    sent = e.schedule()
    (load,) = sent.metadata.loads
    e.scheduler.finish_requests("r", RequestStatus.FINISHED_ABORTED)
    pool = e.scheduler.kv_cache_manager.block_pool
    assert pool.get_num_free_blocks() == len(pool.blocks) - 1 - len(load.targets)
    rank.run(sent, LoadReport(load.load_id, () if good else load.targets[:1]))
    assert rank.is_clean()
    assert not set(load.targets) & e.ready()


@pytest.mark.parametrize("kind", ALL_KINDS)
def test_a_request_that_is_preempted_behind_its_import_shows_what_it_computes_again(
    engine: Make, peer_of: Any, kind: str
) -> None:
    """With nulls before its window, and with what is left of its import as its local hit."""
    e = engine(False, 64, ALL_KINDS[kind])
    peer, rank = peer_of(e), Played(e)
    peer.hold_all(prompt(6))
    request = e.add("r", prompt(8), max_tokens=9)
    sent = e.schedule()
    rank.run(sent, LoadReport("r", ()))
    rank.run(e.schedule())
    e.scheduler.running.remove(request)
    e.scheduler._preempt_request(request, 0.0)
    sent = e.schedule()
    assert (len(sent.metadata.loads), request.num_preemptions) == (0, 1)
    assert sent.output.num_scheduled_tokens["r"] < BLOCK_SIZE * 3
    rank.run(sent)
    rank.run(e.schedule())
    assert read_by(e, "r") <= e.ready()
    assert rank.finish() == []
    assert rank.is_clean()


def split_at(e: DrivenEngine, name: str, token: int) -> tuple[set[int], set[int]]:
    """The blocks of a request, in all groups, that end before a token, and the others."""
    groups, tables = e.connector._scheduler.importer.lookups.groups.all, e.tables_of(name)
    before = {b for g in groups for b in tables[g.number][: token // g.block_size]}
    return before - {0}, {b for table in tables for b in table} - before - {0}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("number", [0, -1])
def test_a_block_that_turns_out_bad_takes_along_all_behind_it_in_all_groups(
    engine: Make, kind: str, number: int
) -> None:
    """Those before it stay.  What is computed on top of null blocks is shown as before."""
    e = engine(False, 64, KINDS[kind])
    side = e.connector._scheduler
    size = side.importer.lookups.groups.all[number].block_size
    request = e.add("a", prompt(7), max_tokens=60)
    for _ in range(8):
        e.step()
    table = e.tables_of("a")[number]
    complete = [i for i in range(request.num_computed_tokens // size) if table[i]]
    index = complete[(len(complete) - 1) // 2]
    before, behind = split_at(e, "a", index * size)
    assert read_by(e, "a") <= e.ready()
    sent = e.schedule()
    side.output(frozenset(), QuietReport(sent.metadata.step), {table[index]})
    assert not behind & e.ready()
    assert before & read_by(e, "a") <= e.ready()
    e.run(sent)
    for _ in range(40):
        e.step()
    assert not split_at(e, "a", index * size)[1] & e.ready()
    e.scheduler.finish_requests("a", RequestStatus.FINISHED_ABORTED)
    e.add("b", prompt(7, first=500), max_tokens=1)
    e.step()
    e.add("c", prompt(9, first=500), max_tokens=20)
    assert e.step().output.num_scheduled_tokens["c"] < 4 * BLOCK_SIZE
    e.step()
    assert read_by(e, "c") <= e.ready()


@pytest.fixture
def drafting(engine: Make, monkeypatch: pytest.MonkeyPatch) -> DrivenEngine:
    """An engine with EAGLE's layers in its one group."""
    create, eagle = kv_cache_manager.get_kv_cache_coordinator, {"use_eagle": True}
    monkeypatch.setattr(
        kv_cache_manager, "get_kv_cache_coordinator", lambda *a, **k: create(*a, **{**k, **eagle})
    )
    return engine(num_blocks=64)


@pytest.mark.parametrize("own", [0, 3])
def test_with_draft_layers_in_the_only_group_an_import_is_as_long_as_a_local_hit(
    drafting: DrivenEngine, peer_of: Any, own: int
) -> None:
    """vLLM does not use the last block of a hit: what a drafter has written there depends on the
    token behind it.  Nor does that block of a shorter own prefix keep the rest from being
    imported."""
    e, played, tokens = drafting, Played(drafting), prompt(6)
    peer_of(e).hold_all(tokens)
    if own:
        alone = {"kv_transfer_params": {"kvshm": {"share": False}}}
        e.add("own", tokens[: own * BLOCK_SIZE + 3], extra_args=alone, max_tokens=1)
        played.finish()
    e.add("wants", tokens, max_tokens=1)
    (load,) = played.finish()
    manager = e.scheduler.kv_cache_manager
    local = manager.get_computed_blocks(e.add("again", tokens))[1] // BLOCK_SIZE
    assert local == 5
    assert len(load.targets) == load.length == local - max(own - 1, 0)
