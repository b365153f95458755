"""Fixtures of several unit tests: own names, served engines, a replica, peers."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvshm._base.ids import BlockHash, BlockId, Generation
from kvshm._node.peers import Peers
from kvshm._replica.index import Replica
from kvshm._shm.layout import BlockRecord, pack_records

from ..sessions import new_namespace
from . import dumps, replicas
from .cuda_ranks import Node
from .exporters import OWN_EPOCH, Clock, Exporter, Make
from .fd_serving import path, serve
from .served import AnyTable, ServedNode

__all__ = ["path", "serve"]


@pytest.fixture
def namespace() -> str:
    return new_namespace()


@pytest.fixture
def served(namespace: str) -> Iterator[ServedNode]:
    with tempfile.TemporaryDirectory(prefix="kv-") as directory:
        node = ServedNode(Path(directory), namespace)
        yield node
        node.close()


@pytest.fixture
def replica(namespace: str) -> Iterator[Replica]:
    replica = Replica.create(namespace, "b", replicas.OWN_EPOCH, 64)
    yield replica
    assert replicas.wrong_in(replica) == []
    replica.close()


@pytest.fixture
def row(replica: Replica) -> int:
    return replica.add_row(1, "a", 4096, 0)


@pytest.fixture
def held(table: AnyTable) -> bytes:
    record = BlockRecord(BlockHash(b"h" * 32), BlockId(0), Generation(0), 0)
    return table.publish(pack_records([record]), bytes(8))


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def peers(served: ServedNode, clock: Clock) -> Iterator[Peers]:
    peers = Peers(served.namespace, "me", OWN_EPOCH, served.segments, clock=clock)
    yield peers
    if not peers._closed:
        assert replicas.wrong_in(peers.replica) == []
    peers.close()


@pytest.fixture
def exporter(served: ServedNode) -> Make:
    epochs = count(1)

    def make(name: str = "a", **more: int) -> Exporter:
        return Exporter(served, next(epochs), name, **more)

    return make


@pytest.fixture
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    made = Node(tmp_path_factory.mktemp("k"))
    yield made
    for rank in made.ranks:
        rank.transport.close()


@pytest.fixture
def dumped(namespace: str) -> Iterator[dumps.Node]:
    with tempfile.TemporaryDirectory(prefix="kv-") as directory:
        node = dumps.Node(Path(directory), namespace)
        yield node
        node.close()


@pytest.fixture
def busy(dumped: dumps.Node) -> SimpleNamespace:
    return dumps.busy_node(dumped)
