"""How often a request of an engine with several KV cache groups is looked up, and what is kept of
a lookup while the request waits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("vllm")

from kvshm._base.ids import Epoch
from kvshm._engine.groups import Part
from kvshm._shm.statistics import MISS_LEASE_LOST, MISS_TOO_LONG, MISS_TOO_SHORT
from kvshm.hooks.vllm.imports.importer import RequestImporter
from kvshm.hooks.vllm.imports.lookups import KEPT_SECONDS
from kvshm.hooks.vllm.imports.request_import import RequestImport

from ..unit.pulsing import pulsing
from .scheduling import BLOCK_SIZE, DrivenEngine, Make, full, prompt, window
from .several_groups import PEER, PeerOf, Played
from .several_groups import peer_of as peer_of

WINDOW = 40
WHOLE = 6 * BLOCK_SIZE
Observed = tuple[RequestImporter, list[float], list[Any]]


def observed(e: DrivenEngine, monkeypatch: pytest.MonkeyPatch) -> Observed:
    importer, now, asked = e.connector._scheduler.importer, [1000.0], list[Any]()
    monkeypatch.setattr(importer.lookups, "_clock", lambda: now[0])
    lookup = importer._cache.planner.lookup
    monkeypatch.setattr(
        importer._cache.planner, "lookup", lambda *a: (asked.append(a), lookup(*a))[1]
    )
    return importer, now, asked


@pytest.fixture
def e(engine: Make) -> DrivenEngine:
    e = engine(num_blocks=64, specs=[full(), window(WINDOW)])
    e.scheduler.kv_cache_manager.coordinator.retention_interval = 0
    return e


def test_what_was_looked_up_in_vain_is_not_looked_up_in_every_step(
    e: DrivenEngine, peer_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    peer = peer_of(e)
    importer, now, asked = observed(e, monkeypatch)
    request = e.add("a", prompt(10))
    peer.hold(request, Part(0, 0, 6))
    for seconds, times in ((0.0, 1), (0.09, 1), (0.11, 2)):
        now[0], request.shared_prefix_boundary = 1000 + seconds, 0  # as vLLM sets it each time
        assert importer.match(request, 0) == 0
        assert len(asked) == times
        assert request.shared_prefix_boundary == 6 * BLOCK_SIZE
    importer.request_finished("a")
    importer.match(request, 0)
    assert len(asked) == 3


def test_what_was_found_and_declined_is_not_looked_up_in_every_step(
    e: DrivenEngine, peer_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Because computing is faster.  The boundary is that of the lookup."""
    peer = peer_of(e)
    importer, now, asked = observed(e, monkeypatch)
    monkeypatch.setattr(importer._cache.planner, "worth", lambda *_: False)
    request = e.add("a", prompt(10))
    peer.hold(request, Part(0, 0, 6), Part(1, 0, 4))
    for seconds, times in ((0.0, 1), (0.09, 1), (0.11, 2)):
        now[0], request.shared_prefix_boundary = 1000 + seconds, 0
        assert importer.match(request, 0) == 0
        assert len(asked) == times
        assert request.shared_prefix_boundary == 4 * BLOCK_SIZE


def test_a_prompt_is_imported_as_soon_as_there_is_room(
    e: DrivenEngine, peer_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However soon after the lookup; what the lookup found is still known."""
    peer = peer_of(e)
    importer, _, asked = observed(e, monkeypatch)
    peer.hold_all(prompt(6))
    free = [18]
    monkeypatch.setattr(importer.room, "free", lambda: free[0])
    monkeypatch.setattr(importer.room, "admits", lambda blocks, request: blocks <= free[0] - 12)
    request = e.add("a", prompt(6))
    found = []
    for free[0] in (18, 18, 19, 32):
        found.append(importer.match(request, 0))
    assert found == [0, 0, 0, WHOLE]
    assert len(asked) == 1


@pytest.mark.parametrize("copied", ["the peer's", "own"])
def test_prompts_that_wait_for_their_turn_to_copy_are_looked_up_once(
    engine: Make, peer_of: Any, monkeypatch: pytest.MonkeyPatch, copied: str
) -> None:
    """One of them begins its copy in each step.  Only then its own blocks, which are copied beside
    the peer's windows, become the last that vLLM hands out."""
    e = engine(num_blocks=200, specs=[full(), window(WINDOW)])
    peer, rank = peer_of(e), Played(e)
    importer, _, asked = observed(e, monkeypatch)
    prompts = {f"r{number}": prompt(6, first=100 * number) for number in range(4)}
    for name, tokens in prompts.items():
        if copied == "own":
            rank.compute(tokens)
            lose_windows(e)
        request = e.add(name, tokens, max_tokens=1)
        e.scheduler.finish_requests(name, request.status.FINISHED_ABORTED)
        peer.hold(request, *(Part(g, 0, 6) for g in range(int(copied == "own"), 2)))
    asked.clear()
    monkeypatch.setattr(importer._cache.planner.costs, "load_seconds", lambda nbytes: 1.0)
    kept = []
    monkeypatch.setattr(importer.room, "keep", kept.append)
    for name, tokens in prompts.items():
        e.add(name, tokens, max_tokens=1)
    for number in range(1, 5):
        (load,) = e.schedule().metadata.loads
        assert load.load_id == f"r{number - 1}"
        assert len(kept) == (number if copied == "own" else 0)
        assert importer.imports[load.load_id].answer is None
    assert len(asked) == 4


def lose_windows(e: DrivenEngine) -> None:
    """vLLM needs the blocks of all windows for something else."""
    pool = e.scheduler.kv_cache_manager.block_pool
    hashed = [block for block in pool.blocks if block.block_hash]
    e.scheduler.kv_cache_manager.evict_blocks(
        {block.block_id for block in hashed if bytes(block.block_hash).endswith(b"\1")}
    )


def quarantine(e: DrivenEngine, peer: PeerOf) -> None:
    for _ in range(3):
        peer.side.cache.epoch_state.peers.load_failed(Epoch(PEER))


def leave(e: DrivenEngine, peer: PeerOf) -> None:
    peer.side.cache.epoch_state.peers.gone(Epoch(PEER))


def reset(e: DrivenEngine, peer: PeerOf) -> None:
    peer.side.cache.end_epoch()


def end(e: DrivenEngine, peer: PeerOf) -> None:
    peer.side.cache.leave()


def lose_rank(e: DrivenEngine, peer: PeerOf) -> None:
    assert not peer.side.cache.epoch_state.has_ended()
    e.table.end_life(None)


@pytest.mark.parametrize("happens", [quarantine, leave, reset, end, lose_rank])
def test_a_plan_that_cannot_succeed_any_more_is_not_kept(
    e: DrivenEngine,
    peer_of: Any,
    monkeypatch: pytest.MonkeyPatch,
    happens: Callable[[DrivenEngine, PeerOf], None],
) -> None:
    peer = peer_of(e)
    importer, _, asked = observed(e, monkeypatch)
    peer.hold_all(prompt(6))
    import_ = RequestImport(e.add("a", prompt(6)))
    assert importer.lookups.find(import_, 0, 6) is importer.lookups.find(import_, 0, 6) is not None
    assert len(asked) == 1
    happens(e, peer)
    assert importer.lookups.find(import_, 0, 6) is None


def test_a_plan_of_a_killed_peer_is_not_kept(e: DrivenEngine, peer_of: Any) -> None:
    """From the moment of its death, which the kernel marks: no coordinator has told."""
    peer = peer_of(e)
    peer.hold_all(prompt(6))
    lookups, import_ = e.connector._scheduler.importer.lookups, RequestImport(e.add("a", prompt(6)))
    with pulsing(peer.exporter.table) as process:
        assert lookups.find(import_, 0, 6) is lookups.find(import_, 0, 6) is not None
        process.kill()
        process.wait()
        assert lookups.find(import_, 0, 6) is None


def test_a_plan_is_kept_for_a_second_and_for_its_local_hit(
    e: DrivenEngine, peer_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    peer = peer_of(e)
    importer, now, asked = observed(e, monkeypatch)
    peer.hold_all(prompt(6))
    import_ = RequestImport(e.add("a", prompt(6)))
    for start, stop, seconds, searches in (
        (0, 6, 0.0, 1),
        (0, 6, KEPT_SECONDS - 0.01, 1),
        (0, 6, KEPT_SECONDS, 2),
        (2, 6, KEPT_SECONDS, 3),
        (2, 5, KEPT_SECONDS, 4),
    ):
        now[0] = 1000 + seconds
        plan = importer.lookups.find(import_, start, stop)
        assert plan is not None
        assert (plan.start, plan.start + plan.length) == (start, stop)
        assert len(asked) == searches


@pytest.mark.parametrize(
    ("setting", "value", "counted"),
    [
        ("MAX_IMPORT_BLOCKS", "3", MISS_TOO_LONG),
        ("MIN_PREFIX_TOKENS", "400", MISS_TOO_SHORT),
    ],
)
def test_windows_are_kept_where_a_setting_forbids_to_import(
    engine: Make,
    peer_of: Any,
    monkeypatch: pytest.MonkeyPatch,
    setting: str,
    value: str,
    counted: int,
) -> None:
    monkeypatch.setenv("KVSHM_" + setting, value)
    e = engine(num_blocks=64, specs=[full(), window(WINDOW)])
    e.scheduler.kv_cache_manager.coordinator.retention_interval = 0
    peer = peer_of(e)
    begin = prompt(6, tail=0)
    peer.hold_all(begin + prompt(3, first=500))
    request = e.add("a", begin + prompt(3, first=700))
    assert not e.schedule().metadata.loads
    assert request.shared_prefix_boundary == 6 * BLOCK_SIZE
    assert e.table.counters.read(counted) == 1


def test_a_plan_of_which_a_part_cannot_be_leased_is_a_miss(e: DrivenEngine, peer_of: Any) -> None:
    peer = peer_of(e)
    peer.hold_all(prompt(6))
    importer, request = e.connector._scheduler.importer, e.add("a", prompt(6))
    plan = importer.lookups.find(RequestImport(request), 0, 6)
    assert plan is not None
    peer.exporter.table.retract([peer.used])
    load = importer._cache.planner.load(plan, "a", range(plan.num_blocks))
    assert not load.pieces
    assert e.table.counters.read(MISS_LEASE_LOST) == 1
