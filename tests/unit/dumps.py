"""Served engines whose dumps are looked at, and what stands in for those that do not answer."""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

from kvshm import _native
from kvshm._base.ids import BlockHash, BlockId, Epoch, Generation, LeaseBit
from kvshm._base.rundir import engine_socket, tables_socket
from kvshm._node.segment_server import SegmentServer
from kvshm._replica.index import Replica
from kvshm._shm.descriptors import Request
from kvshm._shm.layout import BlockRecord, pack_records
from kvshm._shm.segment import Segment
from kvshm.errors import SegmentNotFound
from kvshm.tools import cli
from kvshm.tools.chains import tag_of
from kvshm.tools.report import Filters, build_report

from .served import AnyTable, Served, ServedNode

DEAD_PID = 2**22 + 7  # above every pid_max


def hash_of(name: str) -> BlockHash:
    return BlockHash(name.encode().ljust(32, b"\0"))


def chain_of(*names: str) -> tuple[list[BlockRecord], bytes]:
    records = [
        BlockRecord(hash_of(name), BlockId(ord(name[0]) - ord("a")), Generation(0), depth)
        for depth, name in enumerate(names)
    ]
    tags = [0] + [tag_of(hash_of(name)) for name in names[:-1]]
    return records, struct.pack(f"<{len(tags)}Q", *tags)


class Node(ServedNode):
    def engine(self, name: str, epoch: int, pid: int | None = None) -> Served:
        digest = bytes(range(32))
        return self.serve(name, epoch, num_ranks=2, fingerprint=digest, model="a-model", pid=pid)

    def report(self, **filters: object) -> dict:
        chosen = Filters(**filters)
        spaces = build_report(self.run_dir, self.namespace, chosen)["namespaces"]
        return spaces[0] if spaces else {}

    def run(self, *arguments: str) -> int:
        return cli.main(["dump", "--run-dir", str(self.run_dir), *arguments])


def put(mapped: AnyTable | Replica | Segment, offset: int, value: int) -> None:
    memory = mapped.buffer if isinstance(mapped, Segment) else mapped._segment.buffer
    _native.store(memory, offset, value)


def dies(table: AnyTable) -> None:
    """As the kernel has it when the process that made the table ends."""
    table.begin_pulse(None)
    table._pulse = None
    while not table.owner_died:  # a thread marks it
        time.sleep(0.001)


def busy_node(node: Node) -> SimpleNamespace:
    """An exporter of three chains, of whose blocks a living and a dead importer lease some."""
    exporter, served = node.engine("exporter", 0xA).table, node.engine("importer", 0xB)
    importer, replica = served.table, served.replica
    crashed = node.engine("crashed", 0xC, DEAD_PID).table
    dies(crashed)
    for table, bit in (exporter, 0), (importer, 3), (crashed, 27):
        table.set_lease_bit(LeaseBit(bit))
    for rank in range(2):
        exporter.set_life(rank)
    importer.set_life(1)
    first, parents = chain_of("a", "b", "c", "d")
    exporter.publish(pack_records(first), parents)
    branch, parents = chain_of("a", "b", "x")
    exporter.publish(pack_records(branch[2:]), parents[16:])
    orphan, parents = chain_of("k", "l", "m")
    exporter.publish(pack_records(orphan[1:]), parents[8:])
    exporter.lease(LeaseBit(3), pack_records(first[:2]))
    exporter.lease(LeaseBit(27), pack_records(first[1:2]))
    exporter.retract([first[1].block_id])
    exporter.counters.add(0, 7)
    exporter.log_error("the dog ate it")
    row = replica.add_row(Epoch(0xA), "exporter", 26, LeaseBit(0))
    replica.apply(row, pack_records(first))
    return SimpleNamespace(exporter=exporter, importer=importer, replica=replica)


def engine(report: dict, name: str) -> dict:
    return next(found for found in report["engines"] if found["engine"] == name)


@contextmanager
def coordinator_of(node: ServedNode, *tables: AnyTable) -> Iterator[None]:
    by_epoch = {table.epoch: table for table in tables}

    def find(wanted: Request) -> int:
        if wanted.epoch not in by_epoch:
            raise SegmentNotFound("no such engine is in the roster")
        return by_epoch[wanted.epoch].descriptor(wanted.writable)

    server = SegmentServer(tables_socket(node.run_dir, node.namespace), find)
    yield
    server.close()


@contextmanager
def silent_engine(node: ServedNode, epoch: int) -> Iterator[None]:
    """One that is stopped: the kernel accepts connections for it, no one answers."""
    path = engine_socket(node.run_dir, node.namespace, epoch)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(path))
        listener.listen()
        yield


@contextmanager
def handing_out(node: ServedNode, epoch: int, segment: Segment) -> Iterator[None]:
    """Whatever is asked for, this segment is given."""
    path = engine_socket(node.run_dir, node.namespace, epoch)
    server = SegmentServer(path, lambda wanted: segment.descriptor(wanted.writable))
    yield
    server.close()
