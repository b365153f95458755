"""A ``NodeReader`` that looks often: what it reads at each look, what in turn, and whom it does not
wait for."""

from __future__ import annotations

import pytest

from kvshm._base.ids import BlockId, Epoch, Generation, LeaseBit
from kvshm._base.rundir import engine_socket
from kvshm._node.segment_server import SegmentClient
from kvshm._shm.layout import BlockRecord, pack_records
from kvshm._shm.statistics import PUBLISHED
from kvshm.errors import SegmentNotReady, TransportError
from kvshm.tools.node.mapped import ASK_AGAIN_SECONDS
from kvshm.tools.node.reader import NodeReader
from kvshm.tools.node.reading import NodeReading

from .replicas import HASHES
from .served import Served, ServedNode


@pytest.fixture
def node(served: ServedNode) -> ServedNode:
    for epoch in (1, 2):
        engine = served.serve(f"e{epoch}", epoch)
        engine.table.begin_pulse(None)
        engine.replica.add_row(Epoch(3 - epoch), f"e{3 - epoch}", 26, LeaseBit(0))
    return served


def publish(engine: Served, block: int) -> None:
    record = BlockRecord(HASHES[100 * engine.table.epoch + block], BlockId(block), Generation(0), 0)
    engine.table.publish(pack_records([record]), bytes(8))


def seen(reading: NodeReading) -> dict[str, tuple[int, int | None]]:
    return {e.name: (e.blocks.ready, e.peers[0].lacking) for e in reading.engines}


def test_slots_are_read_in_turn(node: ServedNode) -> None:
    """At the first look all are read, then in turn the tables and one replica."""
    one, other = node.engines
    publish(one, 0)
    with NodeReader(node.run_dir, in_turn=True) as reader:
        assert seen(reader.read()) == {"e1": (1, 0), "e2": (0, 1)}
        publish(one, 1)
        publish(other, 0)
        counts, counted = [], []
        for _ in range(4):
            one.table.counters.add(PUBLISHED)
            look = reader.read()
            counted += [e.counters["published"] for e in look.engines if e.name == "e1"]
            counts.append(seen(look))
        assert counted == [1, 2, 3, 4]
        assert [count["e1"][0] for count in counts] == [1, 2, 2, 2]
        replicas = [(count["e1"][1], count["e2"][1]) for count in counts]
        assert replicas[0] in [(1, 1), (0, 2)]
        assert replicas[3] == (1, 2)
        node.serve("e3", 3).table.begin_pulse(None)
        publish(node.engines[2], 0)
        assert [e.blocks.ready for e in reader.read().engines] == [2, 1, 1]


def test_all_slots_are_read_unless_asked_otherwise(node: ServedNode) -> None:
    with NodeReader(node.run_dir) as reader:
        reader.read()
        for block in range(3):
            publish(node.engines[0], block)
            assert seen(reader.read()) == {"e1": (block + 1, 0), "e2": (0, block + 1)}


def test_blocks_of_an_engine_that_has_ended_are_no_copies(node: ServedNode) -> None:
    """Also if it is the first one that has them."""
    one, other = node.engines
    records = pack_records([BlockRecord(HASHES[0], BlockId(0), Generation(0), 0)])
    for engine in (one, other):
        engine.table.publish(records, bytes(8))
    with NodeReader(node.run_dir) as reader:
        both = [e.blocks for e in reader.read().engines]
        assert sum(b.distinct for b in both) == 1
        assert [b.last_copies for b in both] == [0, 0]
        one.table.retire()
        ended, left = sorted(reader.read().engines, key=lambda e: e.name)
        assert not ended.is_readable
        assert (ended.blocks.ready, ended.blocks.distinct, ended.blocks.last_copies) == (0, 0, 0)
        assert (left.blocks.ready, left.blocks.distinct, left.blocks.last_copies) == (1, 1, 1)


def test_an_engine_that_keeps_looks_waiting_is_not_asked_each_time(
    node: ServedNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1000.0

    def no_answer(_self: SegmentClient, epoch: Epoch) -> None:
        nonlocal now
        asked.append(int(epoch))
        now += 2.0
        raise SegmentNotReady("no answer within 2.0 s") from TransportError("no answer")

    asked: list[int] = []
    monkeypatch.setattr(SegmentClient, "view", no_answer)
    with NodeReader(node.run_dir, clock=lambda: now) as reader:
        reader.read()
        reader.read()
        assert sorted(asked) == [1, 2]
        assert engine_socket(node.run_dir, node.namespace, Epoch(1)).exists()
        now += ASK_AGAIN_SECONDS
        reader.read()
        assert sorted(asked) == [1, 1, 2, 2]
