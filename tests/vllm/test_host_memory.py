"""kvshm beside a connector that keeps blocks in the host's memory, with several groups: one of them
loads a prompt, in all groups, and neither writes what the other one reads or fills."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm.v1.request import RequestStatus

from .host_memory import (
    HostEngine,
    Offloading,
    Remembering,
    SimpleOffloading,
    WithinSteps,
    with_tensors,
)
from .scheduling import BLOCK_SIZE, Make, full, imagined_cache, prompt, states, window
from .several_connectors import config_of
from .several_groups import PeerOf, blocks_to_fill, peer_of

__all__ = ["peer_of"]

GROUPS = {
    "one": [full()],
    "windows": [window(20), full(), window(70)],
    "states": [states(), full(), states()],
    "states and a window": [full(), window(40), states()],
}
EITHER = pytest.mark.parametrize("worker", [Offloading, SimpleOffloading])
KINDS = ("windows", "states and a window")
EACH_KIND = pytest.mark.parametrize("kind", KINDS)
BOTH_ORDERS = pytest.mark.parametrize("ours_first", [True, False])

MakeHost = Callable[..., HostEngine]


@pytest.fixture
def host(model: Path, engine: Make, monkeypatch: pytest.MonkeyPatch) -> Iterator[MakeHost]:
    """Makes engines that end with the test; ``engine`` sets the run directory."""
    made: list[HostEngine] = []

    def make(
        worker: Any, kind: str, ours_first: bool = True, longest: bool = True, blocks: int = 64
    ) -> HostEngine:
        monkeypatch.setenv("KVSHM_BESIDE", str(int(longest)))
        config = config_of(model, worker.connector, ours_first)
        cache = with_tensors(imagined_cache(blocks, GROUPS[kind]))
        made.append(HostEngine(config, blocks, cache=cache, worker=worker))
        return made[-1]

    yield make
    for one in made:
        one.close()


def store(e: HostEngine, tokens: list[int]) -> None:
    """The other connector has this prompt, and the engine no longer."""
    e.add("stored", tokens, max_tokens=2)
    e.finish()
    e.evict()


@EITHER
@EACH_KIND
@BOTH_ORDERS
@pytest.mark.parametrize("longest", [True, False])
def test_one_connector_loads_all_groups(
    host: MakeHost,
    peer_of: Callable[..., PeerOf],
    worker: Any,
    kind: str,
    ours_first: bool,
    longest: bool,
) -> None:
    """A match in vain leaves no lease, no import and nothing to show.  ``play`` looks for blocks in
    two loads."""
    e = host(worker, kind, ours_first, longest)
    peer = peer_of(e)
    peer.attached()
    for first, theirs, ours in ((1, 6, 3), (501, 3, 6), (1001, 5, 5)):
        store(e, prompt(theirs, first=first))
        peer.hold_all(prompt(ours, first=first))
        leased, shown = peer.leased, e.ready()
        e.add("a", prompt(8, first=first), max_tokens=3)
        sent = e.schedule()
        filled = e.loaded(sent)
        is_ours = ours >= theirs if longest else ours_first
        hashes = range(ours if is_ours else theirs)
        assert sorted(filled[not is_ours]) == sorted(blocks_to_fill(e, "a", hashes))
        assert not filled[is_ours]
        assert (peer.leased > leased) == is_ours
        assert ("a" in e.connector._scheduler.importer.imports) == is_ours
        assert e.scheduler.requests["a"].num_computed_tokens == BLOCK_SIZE * len(hashes)
        e.play(sent)
        e.play(e.schedule())
        assert bool(e.ready() - shown) == is_ours
        e.finish()
        e.evict()
    assert not e.connector._scheduler.importer.imports


@EITHER
@pytest.mark.parametrize(("kind", "room"), [("one", 16), ("windows", 30), ("states", 20)])
def test_copies_to_the_host_end_before_an_import_overwrites_their_blocks(
    host: MakeHost, peer_of: Callable[..., PeerOf], worker: Any, kind: str, room: int
) -> None:
    """Of requests that have ended, vLLM's OffloadingConnector copies blocks that are free again.
    ``play`` looks."""
    e = host(worker, kind)
    peer = peer_of(e)
    peer.hold_all(prompt(6, first=500))
    e.add("a", prompt(14), max_tokens=1)
    e.play(e.schedule(), stored=False)
    e.play(e.schedule(), stored=False)
    read = set().union(*e.reading.values())
    pool = e.scheduler.kv_cache_manager.block_pool
    taken = pool.get_new_blocks(pool.get_num_free_blocks() - room)
    e.add("b", prompt(6, first=500), max_tokens=1)
    sent = e.schedule()
    ours, _ = e.loaded(sent)
    assert ours
    assert bool(read & set(ours)) == (worker is Offloading), "it keeps none that others may take"
    e.play(sent, stored=False)
    pool.free_blocks(taken)
    e.finish()


@EACH_KIND
@BOTH_ORDERS
def test_a_store_hears_of_the_blocks_of_all_groups_when_they_are_full(
    host: MakeHost, peer_of: Callable[..., PeerOf], kind: str, ours_first: bool
) -> None:
    """It remembers none that an import has lost: vLLM has given them back, in every group."""
    e = host(Remembering, kind, ours_first)
    peer = peer_of(e)
    for first, bad in ((1, ["a"]), (501, [])):
        peer.hold_all(prompt(4, first=first))
        e.add("a", prompt(5, first=first), max_tokens=1)
        sent = e.schedule()
        assert e.loaded(sent)[0]
        assert "a" not in e.other.blocks
        e.play(sent, bad=bad)
        sent = e.schedule()
        assert e.other.blocks["a"] == e.tables_of("a")
        assert e.scheduler.requests["a"].num_computed_tokens > 4 * BLOCK_SIZE
        e.play(sent)
        e.finish()


@pytest.mark.parametrize("worker", [Offloading, SimpleOffloading, WithinSteps])
@EACH_KIND
def test_nothing_on_top_of_the_others_load_is_shown(
    host: MakeHost, peer_of: Callable[..., PeerOf], worker: Any, kind: str
) -> None:
    """Neither by the request itself, nor when it goes on after a preemption, nor by others that hit
    its blocks.  ``play`` looks."""
    e = host(worker, kind)
    store(e, prompt(5))
    e.add("a", prompt(7), max_tokens=40)
    e.play(e.schedule())
    for _ in range(3):
        e.play(e.schedule())
    assert e.foreign
    assert not e.ready()
    e.add("b", prompt(7, tail=9), max_tokens=2)
    e.play(e.schedule())
    e.play(e.preempt("a"))
    e.finish()
    e.add("c", prompt(3, first=900), max_tokens=2)
    e.play(e.schedule())
    assert e.ready()


def random_life(e: HostEngine, peer: PeerOf, chance: random.Random, steps: int = 60) -> list[int]:
    """Requests with common prefixes come, go, are preempted and lose loads; returns how many
    tokens each connector has loaded."""
    loaded = [0, 0]
    for number in range(steps):
        if chance.random() < 0.5 and len(e.scheduler.requests) < 5:
            first = chance.choice([1, 1, 700])
            tokens = prompt(chance.randrange(1, 9), chance.randrange(1, 16), first)
            e.add(f"r{number}", tokens, max_tokens=chance.choice([1, 3, 25]))
        if chance.random() < 0.06 and e.scheduler.requests:
            name = chance.choice([*e.scheduler.requests])
            e.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)
        if chance.random() < 0.1:
            e.evict()
        if chance.random() < 0.1 and e.scheduler.running:
            sent = e.preempt(chance.choice(e.scheduler.running).request_id)
        else:
            sent = e.schedule()
        for i, blocks in enumerate(e.loaded(sent)):
            loaded[i] += len(blocks)
        ours = [load.load_id for load in e.parts(sent)[0].loads]
        bad = [name for name in ours if chance.random() < 0.2]
        e.play(sent, ends=chance.random() < 0.6, stored=chance.random() < 0.5, bad=bad)
    e.finish()
    return loaded


@pytest.mark.parametrize(
    ("worker", "kind"), [*product([Offloading, SimpleOffloading], KINDS), (WithinSteps, "windows")]
)
def test_random_lives(
    host: MakeHost, peer_of: Callable[..., PeerOf], worker: Any, kind: str
) -> None:
    """With states, loads within steps end vLLM: it counts blocks for them that it does not have."""
    e = host(worker, kind, ours_first=worker is Offloading, blocks=36)
    peer = peer_of(e)
    peer.hold_all(prompt(5))
    peer.hold_all(prompt(4, first=700))
    loaded = [random_life(e, peer, random.Random(seed)) for seed in range(3)]
    assert all(map(sum, zip(*loaded, strict=True)))
    pool = e.scheduler.kv_cache_manager.block_pool
    assert pool.get_num_free_blocks() == len(pool.blocks) - 1
