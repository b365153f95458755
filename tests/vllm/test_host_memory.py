"""kvshm beside a connector that keeps blocks in the host's memory, with several groups: one of them
loads a prompt, in all groups, and neither writes what the other one reads or fills."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm.v1.request import RequestStatus

from .host_memory import HostEngine, Offloading, SimpleOffloading, with_tensors
from .scheduling import Make, full, imagined_cache, prompt, states, window
from .several_connectors import config_of
from .several_groups import PeerOf, blocks_to_fill, peer_of

__all__ = ["peer_of"]

GROUPS = {
    "one": [full()],
    "windows": [window(20), full(), window(70)],
    "states": [states(), full(), states()],
    "states and a window": [full(), window(40), states()],
}
WORKERS = {"offloading": Offloading, "simple": SimpleOffloading}

EITHER = pytest.mark.parametrize("worker", WORKERS.values(), ids=WORKERS)
KINDS = pytest.mark.parametrize("specs", GROUPS.values(), ids=GROUPS)
BOTH_ORDERS = pytest.mark.parametrize("ours_first", [True, False])

MakeHost = Callable[..., HostEngine]


@pytest.fixture
def host(model: Path, engine: Make, monkeypatch: pytest.MonkeyPatch) -> Iterator[MakeHost]:
    """Makes engines that end with the test; ``engine`` sets the run directory."""
    made: list[HostEngine] = []

    def make(
        worker: Any, specs: Any, ours_first: bool = True, longest: bool = True, blocks: int = 64
    ) -> HostEngine:
        monkeypatch.setenv("KVSHM_BESIDE", str(int(longest)))
        config = config_of(model, worker.connector, ours_first)
        cache = with_tensors(imagined_cache(blocks, specs))
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
@KINDS
@BOTH_ORDERS
@pytest.mark.parametrize(
    ("theirs", "ours", "longest", "chosen"),
    [
        (6, 3, True, "theirs"),
        (3, 6, True, "ours"),
        (6, 6, True, "ours"),
        (3, 6, False, None),
        (6, 3, False, None),
    ],
)
def test_one_connector_loads_all_groups(
    host: MakeHost, peer_of: Callable[..., PeerOf], worker: Any, specs: Any, ours_first: bool,
    theirs: int, ours: int, longest: bool, chosen: str | None,
) -> None:  # fmt: skip
    e = host(worker, specs, ours_first, longest)
    store(e, prompt(theirs))
    peer = peer_of(e)
    peer.hold_all(prompt(ours))
    e.add("a", prompt(8), max_tokens=3)
    sent = e.schedule()
    filled = e.loaded(sent)
    is_ours = chosen == "ours" or (chosen is None and ours_first)
    hashes = range(ours if is_ours else theirs)
    expected = blocks_to_fill(e, "a", hashes)
    assert sorted(filled[not is_ours]) == sorted(expected)
    assert not filled[is_ours]
    assert bool(peer.leased) == is_ours
    assert e.scheduler.requests["a"].num_computed_tokens == 16 * len(hashes)
    e.play(sent)
    assert ("a" in e.connector._scheduler.importer.imports) == is_ours
    e.play(e.schedule())
    assert bool(e.ready()) == is_ours
    e.finish()


@EITHER
@pytest.mark.parametrize(
    ("kind", "room"), [("one", 16), ("windows", 30), ("states", 20), ("states and a window", 25)]
)
@BOTH_ORDERS
def test_copies_to_the_host_end_before_an_import_overwrites_their_blocks(
    host: MakeHost, peer_of: Callable[..., PeerOf], worker: Any, kind: str, room: int,
    ours_first: bool,
) -> None:  # fmt: skip
    """Of requests that have ended, vLLM's OffloadingConnector copies blocks that are free again.
    ``play`` looks."""
    e = host(worker, GROUPS[kind], ours_first)
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


@EITHER
@KINDS
def test_nothing_on_top_of_the_others_load_is_shown(
    host: MakeHost, peer_of: Callable[..., PeerOf], worker: Any, specs: Any
) -> None:
    """Neither by the request itself, nor when it goes on after a preemption, nor by others that hit
    its blocks.  ``play`` looks."""
    e = host(worker, specs)
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


@EITHER
@KINDS
@BOTH_ORDERS
def test_random_lives(
    host: MakeHost, peer_of: Callable[..., PeerOf], worker: Any, specs: Any, ours_first: bool
) -> None:
    e = host(worker, specs, ours_first, blocks=20 * len(specs))
    peer = peer_of(e)
    peer.hold_all(prompt(5))
    peer.hold_all(prompt(4, first=700))
    loaded = [random_life(e, peer, random.Random(seed)) for seed in range(4)]
    assert all(map(sum, zip(*loaded, strict=True)))
    pool = e.scheduler.kv_cache_manager.block_pool
    assert pool.get_num_free_blocks() == len(pool.blocks) - 1
