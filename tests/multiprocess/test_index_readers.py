"""A replica read by a second process through a read-only mapping of its own, while its owner
writes, grows and dies.  The reader is this process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvshm._node.segment_server import SegmentClient
from kvshm._replica.index_reader import ReplicaReader
from kvshm._shm.layout import BlockRecord, unpack_records
from kvshm.errors import SegmentNotFound

from .index_writer import CHURNED, EPOCH, NUM_BLOCKS, content_hash
from .processes import Managed, Node

pytestmark = pytest.mark.multiprocess

WRITER = Path(__file__).with_name("index_writer.py")
HASHES = [content_hash(content) for content in range(NUM_BLOCKS)]
STAYING = 40
"""Contents that the churning writer never touches; with the churned ones they fill an index
of 128 entries so far that its chains are long."""
BUSY_LOOKUPS = 5_000
BUSY_GENERATIONS = 20


class Writer:
    def __init__(self, node: Node) -> None:
        self.process: Managed = node.processes.start(
            "writer", str(WRITER), str(node.run_dir), node.namespace
        )
        self.name = self.process.wait_out(bool)

    def order(self, line: str) -> str:
        since = len(self.process.out)
        self.process.say(line)
        return self.process.wait_out(bool, since)

    def die(self) -> None:
        self.process.say("die")
        assert self.process.wait() == -9


@pytest.fixture
def writer(node: Node) -> Writer:
    return Writer(node)


@pytest.fixture
def reader(node: Node, writer: Writer) -> Iterator[ReplicaReader]:
    reader = ask(node)
    yield reader
    reader.close()


def ask(node: Node) -> ReplicaReader:
    return SegmentClient(node.run_dir, node.namespace).replica(EPOCH)


def found(reader: ReplicaReader, start: int, stop: int) -> list[BlockRecord]:
    runs = reader.lookup(HASHES, start, stop)
    return [record for _, records in runs for record in unpack_records(records)]


def holds(reader: ReplicaReader, count: int) -> bool:
    records = found(reader, 0, NUM_BLOCKS)
    assert all(r.block_id == n == r.depth for n, r in enumerate(records))
    return len(records) == count


def test_a_reader_beside_a_busy_writer_sees_next_to_no_torn_records(
    node: Node, writer: Writer
) -> None:
    """A lookup that the writer overtakes again and again may end early or name the wrong
    block, which the lease then refuses; nearly all must be right."""
    writer.order(f"grow {STAYING}")
    writer.order("churn")
    reader = ask(node)
    lookups = seen = torn = short = 0
    generations: set[int] = set()  # a writer that gets no core for a while is not busy
    while lookups < BUSY_LOOKUPS or len(generations) < BUSY_GENERATIONS:
        lookups += 1
        short += len(found(reader, 0, STAYING)) < STAYING
        for record in found(reader, CHURNED.start, CHURNED.stop):
            seen += 1
            generations.add(record.generation)
            torn += HASHES[record.block_id] != record.block_hash
    assert int(writer.order("grow 0") or 0) > 0
    assert seen > 0
    assert torn < seen / 20
    assert short < lookups / 20
    print(f"{seen} records, {torn} torn; {short} of {lookups} lookups short")
    assert holds(reader, STAYING)
    reader.close()


def test_readers_outlive_a_writer_that_is_killed_at_work(node: Node, writer: Writer) -> None:
    writer.order(f"grow {STAYING}")
    writer.order("churn")
    reader = ask(node)
    assert len(found(reader, 0, STAYING)) <= STAYING
    writer.process.kill()
    assert holds(reader, STAYING)
    reader.close()
    with pytest.raises(SegmentNotFound, match="has died"):
        ask(node)


def test_readers_outlive_a_writer_that_dies_as_it_grows(
    writer: Writer, reader: ReplicaReader
) -> None:
    writer.order(f"grow {STAYING}")
    assert holds(reader, STAYING)
    writer.die()
    known = found(reader, 0, NUM_BLOCKS)
    assert [r.block_id for r in known] == list(range(len(known)))
    assert len(known) >= STAYING
