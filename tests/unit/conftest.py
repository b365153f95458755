"""Fixtures of several unit tests: own names in shared memory, a replica, peers."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

import pytest

from kvshm import segment as segments
from kvshm.index import Replica
from kvshm.peers import Peers

from ..sessions import new_namespace
from . import replicas
from .cuda_ranks import Node
from .exporters import OWN_EPOCH, Clock, Exporter, Make


@pytest.fixture
def namespace() -> Iterator[str]:
    """A namespace of the test's own, which it leaves empty."""
    name = new_namespace()
    yield name
    left = segments.list_segments(name)
    for leftover in left:
        segments.unlink(str(leftover))
    assert left == []


@pytest.fixture
def replica(namespace: str) -> Iterator[Replica]:
    """An index of 64 entries, sound when the test ends."""
    replica = Replica.create(namespace, "b", replicas.OWN_EPOCH, segments.identity_of(), 64)
    yield replica
    assert replica.check_integrity() == []
    replica.unlink()
    replica.close()


@pytest.fixture
def row(replica: Replica) -> int:
    return replica.add_row(1, "a", 4096, 0)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def peers(namespace: str, clock: Clock) -> Iterator[Peers]:
    """What an engine of epoch OWN_EPOCH knows, sound when the test ends."""
    peers = Peers(namespace, "me", OWN_EPOCH, clock=clock)
    yield peers
    if not peers._closed:
        assert peers._replica.check_integrity() == []
    peers.close()


@pytest.fixture
def exporter(namespace: str) -> Iterator[Make]:
    made: list[Exporter] = []
    epochs = count(1)

    def make(name: str = "a", **more: int) -> Exporter:
        made.append(Exporter(namespace, next(epochs), name, **more))
        return made[-1]

    yield make
    for one in made:
        one.end()


@pytest.fixture
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    """Fake GPUs in one machine; what was made on them is closed when the test ends."""
    made = Node(tmp_path_factory.mktemp("k"))
    yield made
    for rank in made.ranks:
        rank.transport.close()
