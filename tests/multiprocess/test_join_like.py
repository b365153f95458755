"""An engine that computes nothing joins as one that is there: it hears of blocks, loads single ones
without leases, and publishes them again."""

from __future__ import annotations

import dataclasses
import signal
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest

import kvshm
from kvshm import (
    BlockContent,
    BlockName,
    BlockNode,
    Config,
    EngineLayout,
    LoadState,
    MisuseError,
    Reader,
    Region,
)
from kvshm._api.halves_in_one import HalvesInOne

from .joined import BLOCK, TOKENS, Toy, Toys, content, ended
from .processes import PATIENCE_SECONDS, wait_until

pytestmark = pytest.mark.multiprocess

SOMEONE = kvshm.Identity(engine="e", model="m", weights="w")
GROUPS = (kvshm.Group(0, TOKENS), kvshm.Group(1, TOKENS, window=2 * TOKENS))


class Like:
    """Joined like an engine."""

    def __init__(self, toy: Toy, blocks: int = 8) -> None:
        place: Any = toy.table
        self.config = Config(run_dir=str(toy.config.run_dir), namespace=toy.config.namespace)
        with Reader(self.config) as reader:
            layout = reader.layout(place.epoch)
        assert layout is not None
        self.layout = layout
        self.stride = layout.stride
        self.memory = kvshm.allocate(blocks * self.stride, self.config)
        how: dict[str, Any] = {"memory": self.memory, "config": self.config, "wait": 0}
        self.node = kvshm.join_like(layout, num_blocks=blocks, name="like", **how)
        assert self.node.wait_joined(PATIENCE_SECONDS), self.node.refusal
        self.has: dict[tuple[int, int], BlockName] = {}

    def read(self, block: int) -> bytes:
        start = block * self.stride
        return bytes(self.memory.buffer[start : start + BLOCK])

    def hear(self) -> set[BlockName]:
        for news in self.node.news():
            if news.gone or not news.epoch:
                self.has = {k: v for k, v in self.has.items() if k[0] != news.epoch and news.epoch}
            for change in news.changes:
                self.has.pop((news.epoch, change.block_id), None)
                if change.name is not None:
                    self.has[news.epoch, change.block_id] = change.name
        return set(self.has.values())

    def close(self) -> None:
        self.node.close()
        self.memory.close()


@pytest.fixture
def engine(toys: Toys) -> Toy:
    return toys.join("a", groups=GROUPS)


@pytest.fixture
def like(engine: Toy) -> Iterator[Like]:
    with closing(Like(engine)) as like:
        yield like


def names(keys: list[bytes], group: int = 0) -> list[BlockName]:
    return [BlockName(key, group) for key in keys]


def wait_for(like: Like, wanted: set[BlockName]) -> None:
    wait_until(lambda: like.hear() == wanted, "it has heard")


def test_it_has_the_fingerprint_and_shows_that_it_computes_nothing(engine: Toy, like: Like) -> None:
    with Reader(like.config) as reader:
        shown = {view.name: view for view in reader.engines()}
        assert reader.layout(shown["like"].epoch) == like.layout
        assert reader.layout(1) is None
    assert shown["like"].fingerprint == shown["a"].fingerprint == like.layout.fingerprint
    assert (shown["like"].keeps, shown["a"].keeps) == (True, False)
    wait_until(lambda: engine.node.keepers() == {shown["like"].epoch}, "the engine knows it")
    assert like.node.keepers() == frozenset()


def test_single_blocks_come_whatever_lies_before_them(engine: Toy, like: Like) -> None:
    keys = engine.prompt()
    engine.compute(keys, range(6))
    engine.write(9, keys[4], b"window")
    engine.node.publish(keys[:5], [9], 4, group=1)
    window = names(keys, 1)[4]
    wait_for(like, {*names(keys), window})
    nothing = BlockName(bytes(32), 0)
    found = like.node.lookup_blocks([names(keys)[3], nothing, window, names(keys)[1]])
    assert [(c.name, c.depth, c.parent) for c in found.contents] == [
        (names(keys)[3], 3, keys[2][:8]),
        (window, 4, keys[3][:8]),
        (names(keys)[1], 1, keys[0][:8]),
    ]
    load = ended(like.node.load_blocks(found, [5, 6, 7]))
    assert (load.state, load.good, load.failed) == (LoadState.DONE, 3, ())
    assert [like.read(b) for b in (5, 6, 7)] == [
        content(keys[3]),
        content(keys[4], b"window"),
        content(keys[1]),
    ]
    stats = like.node.stats()
    assert (stats["imported_blocks"], stats["imported_tokens"], stats["lookups"]) == (3, 0, 0)
    assert stats["leases_taken"] == 0


def test_what_it_publishes_outlives_the_engine_and_another_imports_it(
    engine: Toy, like: Like, toys: Toys
) -> None:
    keys = engine.prompt()
    engine.compute(keys, range(6))
    engine.write(9, keys[5], b"window")
    engine.node.publish(keys, [9], 5, group=1)
    engine.write(10, keys[4], b"window")
    engine.node.publish(keys[:5], [10], 4, group=1)
    wanted = [*names(keys), *names(keys, 1)[4:]]
    wait_for(like, set(wanted))
    found = like.node.lookup_blocks(wanted)
    assert ended(like.node.load_blocks(found, range(8))).state is LoadState.DONE
    assert like.node.publish_blocks(found.contents, range(8)) == 8
    with pytest.raises(MisuseError, match="retract it first"):
        like.node.publish_blocks(found.contents[:1], [0])
    engine.node.close()
    wait_for(like, set())
    b = toys.join("b", groups=GROUPS)
    again = b.node.wait_for(keys, PATIENCE_SECONDS)
    assert [owner.name for owner in again.owners] == ["like"] * 2
    load = ended(b.node.load(again, range(20, 28)))
    assert load.state is LoadState.DONE
    assert b.holds(range(20, 26), keys) == [True] * 6
    assert [b.read(26), b.read(27)] == [content(k, b"window") for k in keys[4:6]]


def test_a_block_that_is_reused_in_the_copy_fails_alone_and_no_one_waits(
    engine: Toy, like: Like
) -> None:
    keys = engine.prompt()
    engine.compute(keys, range(6))
    wait_for(like, set(names(keys)))
    gone, reused = like.node.lookup_blocks(names(keys)[:2]), like.node.lookup_blocks(names(keys))
    transport: Any = halves_of(like.node).ranks.halves[0].transport
    with Toy.held_up(transport):
        load = like.node.load_blocks(reused, range(6))
        wait_until(lambda: bool(transport.copier._waiting), "the copy begins")
        assert not engine.leases()
        engine.node.retract([0, 3])
        assert engine.node.stats()["drain_wait_us"] < 1000
        for block in (0, 3):
            engine.write(block, b"others")
    assert (ended(load).state, load.good, load.failed) == (LoadState.FAILED, 4, (0, 3))
    assert [like.read(b) == content(keys[b]) for b in (1, 2, 4, 5)] == [True] * 4
    late = ended(like.node.load_blocks(gone, [6, 7]))
    assert (late.good, late.failed) == (1, (6,))
    assert like.read(7) == content(keys[1])
    with pytest.raises(MisuseError, match="loaded already"):
        like.node.load_blocks(gone, [0, 1])


def test_an_engine_with_several_groups_may_load_single_blocks_too(
    engine: Toy, like: Like, toys: Toys
) -> None:
    """Of a prefix all blocks would be good or none."""
    keys = engine.prompt()
    engine.compute(keys, range(6))
    b = toys.join("b", groups=GROUPS)
    wait_until(lambda: len(b.node.lookup_blocks(names(keys)).contents) == 6, "it knows them")
    found = b.node.lookup_blocks(names(keys))
    engine.node.retract([2])
    load = ended(b.node.load_blocks(found, range(20, 26)))
    assert (load.good, load.failed) == (5, (22,))
    assert b.holds([20, 21, 23], [keys[0], keys[1], keys[3]]) == [True] * 3
    assert b.node.news() == []


def halves_of(node: BlockNode) -> HalvesInOne:
    assert node._halves is not None
    return node._halves


def test_an_engine_of_two_ranks_gives_each_rank_its_part(engine: Toy, like: Like) -> None:
    """No engine of one process has two, but an engine that joins like another."""
    fields = {**like.layout.fields, "parallel": "tp 2"}
    layout = like.layout._replace(fields=fields, block_bytes=((128,), (64, 64)))
    with closing(TwoRanks(layout, like.config)) as one, closing(TwoRanks(layout, like.config)) as b:
        keys = engine.prompt(3)
        contents = [BlockContent(k, bytes(8), i, 0) for i, k in enumerate(keys)]
        for block, key in enumerate(keys):
            one.write(block, key)
        one.node.publish_blocks(contents, range(3))
        wait_until(lambda: len(b.node.lookup_blocks(names(keys)).contents) == 3, "it knows them")
        found = b.node.lookup_blocks(names(keys))
        second: Any = halves_of(b.node).ranks.halves[1].transport
        with Toy.held_up(second):
            load = b.node.load_blocks(found, [3, 2, 1])
            wait_until(lambda: bool(second.copier._waiting), "the second rank's copy begins")
            assert load.poll() is LoadState.PENDING
            one.node.retract([1])
            one.write(1, b"others")
        assert (ended(load).good, load.failed) == (2, (2,))
        assert [b.read(3), b.read(1)] == [one.read(0), one.read(2)]


class TwoRanks:
    def __init__(self, layout: EngineLayout, config: Config) -> None:
        self.stride = layout.stride
        self.memory = kvshm.allocate(4 * self.stride, config)
        how: dict[str, Any] = {"memory": self.memory, "config": config, "wait": 0}
        self.node = kvshm.join_like(layout, num_blocks=4, **how)
        assert self.node.wait_joined(PATIENCE_SECONDS), self.node.refusal

    def write(self, block: int, key: bytes) -> None:
        start = block * self.stride
        self.memory.buffer[start : start + BLOCK] = content(key)

    def read(self, block: int) -> bytes:
        start = block * self.stride
        return bytes(self.memory.buffer[start : start + BLOCK])

    def close(self) -> None:
        self.node.close()
        self.memory.close()


def test_only_nodes_that_joined_like_others_may_have_the_same_memory(
    engine: Toy, like: Like
) -> None:
    how: dict[str, Any] = {"memory": like.memory, "config": like.config, "wait": 0}
    with kvshm.join_like(like.layout, num_blocks=3, **how) as other:
        assert other.wait_joined(PATIENCE_SECONDS)
    regions = [Region(0, like.stride, BLOCK, 8)]
    with pytest.raises(MisuseError, match="has these blocks already"):
        kvshm.join(SOMEONE, regions=regions, block_size=TOKENS, **how)
    how["memory"] = engine.memory
    with pytest.raises(MisuseError, match="has these blocks already"):
        kvshm.join_like(like.layout, num_blocks=1, **how)


def test_what_is_no_layout_of_such_memory_is_refused(like: Like) -> None:
    how: dict[str, Any] = {"memory": like.memory, "config": like.config, "wait": 0}
    with pytest.raises(MisuseError, match="give fewer blocks"):
        kvshm.join_like(like.layout, num_blocks=9, **how)
    on_gpu = like.layout._replace(transport="cuda_ipc")
    chosen = {**how, "config": dataclasses.replace(like.config, transport="posix_shm")}
    with pytest.raises(MisuseError, match="this one by posix_shm"):
        kvshm.join_like(on_gpu, num_blocks=1, **chosen)
    with pytest.raises(MisuseError, match="loopback takes no host memory"):
        kvshm.join_like(like.layout._replace(transport="loopback"), num_blocks=1, **how)
    with pytest.raises(MisuseError, match="give what Reader"):
        kvshm.join_like(like.node, num_blocks=1, **how)  # type: ignore[arg-type]  # a mistake


def test_what_gives_way_is_counted_with_its_age(engine: Toy, like: Like) -> None:
    keys = engine.prompt(1)
    engine.compute(keys, [0])
    wait_for(like, {*names(keys)})
    found = like.node.lookup_blocks(names(keys))
    assert found.sources == (engine.node.epoch,)
    ended(like.node.load_blocks(found, [5]))
    like.node.publish_blocks(found.contents, [5])
    for seconds in (-1, float("inf"), float("nan"), "long"):
        with pytest.raises(MisuseError, match="seconds is"):
            like.node.evict(5, seconds)  # type: ignore[arg-type]  # a mistake
    with pytest.raises(MisuseError):
        like.node.evict(8, 1)
    assert like.node.stats()["evicted"] == 0
    like.node.evict(5, 1.5)
    assert (like.node.stats()["evicted"], like.node.stats()["evicted_us"]) == (1, 1_500_000)
    with Reader(like.config) as reader:
        assert not list(reader.list(like.node.epoch))


def test_what_an_engine_withdraws_is_known_and_what_it_leaves_is_not(
    engine: Toy, like: Like, toys: Toys
) -> None:
    other = toys.join("b", groups=GROUPS)
    before = engine.node.epoch
    engine.node.reset()
    wait_until(lambda: before in like.node.withdrawn(), "it is withdrawn")
    left = other.node.epoch
    other.compute(other.prompt(1), [0])
    wait_for(like, {*names(other.prompt(1))})
    other.node.close()
    wait_for(like, set())
    assert like.node.withdrawn() == {before}
    assert left != before


def test_a_dead_engine_is_heard_of(like: Like, engine: Toy) -> None:
    """In another process, which is killed."""
    program = (
        "import sys, kvshm\n"
        "c = kvshm.Config(run_dir=sys.argv[1], namespace=sys.argv[2])\n"
        "m = kvshm.allocate(8192, c)\n"
        "i = kvshm.Identity(engine='toy 1', model='m', weights=sys.argv[3])\n"
        "g = [kvshm.Group(0, 4), kvshm.Group(1, 4, window=8)]\n"
        "n = kvshm.join(i, memory=m, regions=[kvshm.Region(0, 256, 256, 32)], block_size=4,\n"
        "               config=c, groups=g)\n"
        "print(n.publish(n.keys(range(8)), [0, 1]), flush=True)\n"
        "input()\n"
    )
    config = like.config
    other = engine.place.processes.python(
        "other", "-c", program, str(config.run_dir), config.namespace, engine.kind
    )
    other.wait_out(lambda line: line == "2")
    keys = engine.prompt(2)
    wait_for(like, set(names(keys)))
    other.signal(signal.SIGKILL)
    wait_for(like, set())
    assert not like.node.lookup_blocks(names(keys))
