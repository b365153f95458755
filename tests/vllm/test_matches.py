"""A match must never cost: the scheduler is vLLM's, the peer that holds the prefix is imagined."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm.v1.request import RequestStatus

from kvshm._base.ids import NO_LEASE_BIT, LoadId
from kvshm._engine.load_plan import NO_TICKET, LoadOrder, LoadReport, Plan
from kvshm._node.peer import PlannedRun
from kvshm._shm.layout import RECORD_BYTES
from kvshm._shm.statistics import MISS_FINGERPRINT, MISS_NO_PEER, MISS_NO_ROOM, Counter
from kvshm.hooks.vllm.messages import RankReport

from .scheduling import BLOCK_SIZE, DrivenEngine, Make, plan_of, prompt


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Let a peer hold the first ``blocks`` blocks of each prompt that begins like ``prompt``."""

    def hold(e: DrivenEngine, blocks: int, *, alike: list[int]) -> None:
        cache = e.connector._scheduler.cache
        wanted = e.add("imagined", alike, max_tokens=1).block_hashes[:blocks]
        e.scheduler.finish_requests("imagined", RequestStatus.FINISHED_ABORTED)

        def lookup(chain: list[bytes], start: int, stop: int) -> Plan | None:
            stop = min(stop, len(wanted))
            if start >= stop or chain[start:stop] != wanted[start:stop]:
                return None
            peer: Any = SimpleNamespace(info=SimpleNamespace(epoch=77, ranks=[]))
            runs = (PlannedRun(peer, bytes(RECORD_BYTES * (stop - start))),)
            return plan_of(e.table.epoch, start, runs)

        def begin_load(
            plan: Plan, load_id: LoadId, targets: tuple[int, ...], *, attached: bool
        ) -> LoadOrder:
            # With no pieces: so all that was promised stands in ``targets`` of the load.
            return LoadOrder(load_id, e.table.epoch, NO_TICKET, NO_LEASE_BIT, (), targets)

        monkeypatch.setattr(cache.planner, "has_peers", lambda: True)
        monkeypatch.setattr(cache.planner, "lookup", lookup)
        monkeypatch.setattr(cache.planner, "load", begin_load)

    return hold


def arrived(sent: Any) -> RankReport:
    report = RankReport(step=sent.metadata.step)
    for load in sent.metadata.loads:
        object.__setattr__(load, "lost", ())
        report.loads.append(LoadReport(load.load_id, ()))
    return report


def first_steps(e: DrivenEngine, *names: str) -> dict[str, int]:
    """In which step each request was first computed."""
    first: dict[str, int] = {}
    for number in range(1, 100):
        sent = e.schedule()
        for name in sent.output.num_scheduled_tokens:
            first.setdefault(name, number)
        e.run(sent, arrived(sent))
        if first.keys() >= set(names):
            return first
    raise AssertionError(f"not all of {names} were computed: {first}")


@pytest.mark.parametrize("estimated", [True, False])
def test_a_match_keeps_no_one_waiting_where_memory_is_short(
    engine: Make, held: Any, estimated: bool
) -> None:
    """vLLM admits an asynchronous load only beside all that prefills under way still need, and
    looks at no one behind it.  Also where kvshm does not see that coming, it costs one step."""

    def drive(blocks: int) -> dict[str, int]:
        e = engine(
            num_blocks=48, max_num_batched_tokens=160, long_prefill_token_threshold=4 * BLOCK_SIZE
        )
        held(e, blocks, alike=prompt(28, first=2000))
        if not estimated:
            e.connector._scheduler.importer.room.admits = lambda *_: True
        e.add("long", prompt(30), max_tokens=20)
        e.step()
        e.add("wants", prompt(28, first=2000), max_tokens=4)
        e.add("behind", prompt(1, first=9000), max_tokens=4)
        return first_steps(e, "wants", "behind")

    computed, matched = drive(0), drive(20)
    late = 0 if estimated else 1
    assert matched["wants"] <= computed["wants"] + late
    assert matched["behind"] <= computed["behind"] + late


def test_an_import_does_not_wait_for_blocks_that_others_take_while_it_lasts(
    engine: Make, held: Any
) -> None:
    """vLLM looks at no one behind a request whose load has ended and for whose rest there is no
    room, and preempts no one for it."""

    def drive(blocks: int) -> list[int]:
        e = engine(
            num_blocks=48, max_num_batched_tokens=256, long_prefill_token_threshold=4 * BLOCK_SIZE
        )
        held(e, blocks, alike=prompt(14, first=2000))
        e.add("long", prompt(19, tail=10, first=3500), max_tokens=60)
        e.add("longer", prompt(11, tail=10, first=5600), max_tokens=60)
        for _ in range(5):
            e.step()
        waiting = [e.add("wants", prompt(14, first=2000), max_tokens=4)]
        e.add("behind", prompt(1, first=9900), max_tokens=4)
        first: dict[str, int] = {}
        for number in range(60):
            if number == 1:
                waiting.append(e.add("third", prompt(1, tail=1, first=9000), max_tokens=4))
            sent = e.schedule()
            e.run(sent, arrived(sent))
            first = {r.request_id: number for r in waiting if r.num_output_tokens} | first
        return [first["wants"], first["third"]]

    computed, matched = drive(0), drive(10)
    assert all(late <= soon + 4 for late, soon in zip(matched, computed, strict=True))


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_an_import_keeps_no_session_waiting_for_blocks_that_it_holds_itself(
    engine: Make, held: Any, policy: str
) -> None:
    """A session's next input takes the blocks that were there for the rest of the request.  vLLM
    then looks at no one behind that request, not even at the session, and no one runs."""
    e = engine(num_blocks=40, scheduling_policy=policy)
    held(e, 6, alike=prompt(11, first=2000))
    session = e.add("session", prompt(20), max_tokens=1, resumable=True)
    while session.status is not RequestStatus.WAITING_FOR_STREAMING_REQ:
        e.step()
    request = e.add("wants", prompt(11, first=2000), max_tokens=1)
    loading = e.schedule()
    assert request.status is RequestStatus.WAITING_FOR_REMOTE_KVS
    e.continue_session("session", prompt(8, first=5000), max_tokens=1)
    e.step()
    e.run(loading, arrived(loading))
    assert session.status is RequestStatus.WAITING_FOR_STREAMING_REQ
    e.continue_session("session", prompt(1, first=7000), max_tokens=1)
    for _ in range(4):
        e.step()
    assert session.status is RequestStatus.WAITING_FOR_STREAMING_REQ
    assert e.table.counters.read(MISS_NO_ROOM) == 1
    e.scheduler.finish_requests("session", RequestStatus.FINISHED_ABORTED)
    for _ in range(4):
        e.step()
    assert not e.scheduler.requests
    assert e.scheduler.kv_cache_manager.block_pool.get_num_free_blocks() == 39


def test_what_fits_is_imported_all_the_same(engine: Make, held: Any) -> None:
    e = engine(num_blocks=48)
    held(e, 20, alike=prompt(28, first=2000))
    request = e.add("wants", prompt(28, first=2000), max_tokens=4)
    sent = e.schedule()
    (load,) = sent.metadata.loads
    assert len(load.lost) == 20
    assert request.status is RequestStatus.WAITING_FOR_REMOTE_KVS


def test_a_block_that_the_engine_has_itself_is_not_imported(engine: Make, held: Any) -> None:
    e = engine()
    e.add("first", prompt(5), max_tokens=1)
    e.step()
    held(e, 5, alike=prompt(5))
    importer = e.connector._scheduler.importer
    assert importer.match(e.add("other", prompt(5, first=1)), 0) == 0
    assert e.schedule().metadata.loads == []


def test_a_request_that_reads_no_cache_imports_nothing(engine: Make, held: Any) -> None:
    e = engine()
    held(e, 5, alike=prompt(5))
    request = e.add("logprobs", prompt(5))
    request.skip_reading_prefix_cache = True
    assert e.connector._scheduler.importer.match(request, 0) == 0


@pytest.mark.parametrize("ended", [False, True])
def test_a_failure_before_a_load_lands_leaves_nothing_behind(
    engine: Make, held: Any, monkeypatch: pytest.MonkeyPatch, ended: bool
) -> None:
    """Else each request of the same prefix would wait for an import that has long ended."""
    e = engine()
    held(e, 3, alike=prompt(3))
    side = e.connector._scheduler
    e.add("a", prompt(3), max_tokens=4)
    sent = e.schedule()
    assert sent.metadata.loads
    report = arrived(sent)
    if ended:
        e.scheduler.finish_requests("a", RequestStatus.FINISHED_ABORTED)

    def fail(*_: Any) -> None:
        raise RuntimeError("on purpose")

    monkeypatch.setattr(e.connector, "strict", False)
    monkeypatch.setattr(side.importer.running, "reported", fail)
    e.run(sent, report)
    monkeypatch.undo()
    assert (side.importer.running.by_id, side.importer.running._by_first_hash) == ({}, {})
    left = {name: each.may_import for name, each in side.importer.imports.items()}
    assert left == ({} if ended else {"a": False})
    e.add("b", prompt(3), max_tokens=4)
    assert "b" in e.schedule().output.num_scheduled_tokens


@pytest.mark.parametrize(("incompatible", "missed"), [(0, MISS_NO_PEER), (1, MISS_FINGERPRINT)])
def test_an_engine_without_peers_counts_a_match_and_looks_at_nothing(
    engine: Make, incompatible: int, missed: Counter
) -> None:
    e = engine()
    side = e.connector._scheduler
    side.importer.room = SimpleNamespace()  # vLLM's pool: whatever it is asked is an error
    side.cache.epoch_state.peers.num_incompatible = incompatible
    e.add("r", prompt(4), max_tokens=1)
    e.step()
    counted = e.table.counters.snapshot()
    looked = {k: n for k, n in counted.items() if n and k.startswith(("lookup", "miss"))}
    assert looked == {"lookups": 1, missed.label: 1}
