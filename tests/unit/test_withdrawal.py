"""A rank's memory goes: no peer attaches it any more, and the rank sees when peers have unmapped
it, and that nothing of its own still writes to it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvshm._base.ids import Epoch
from kvshm._rank.rank_half import RankHalf
from kvshm.errors import MemoryInUse, StaleAttachment, TransportError
from kvshm.interfaces import CopyState, Region
from kvshm.transport.cuda import mappings
from kvshm.transport.memory import KVMemory
from kvshm.transport.posix_shm import PosixShmTransport

from ..waiting import until
from .cuda_ranks import EPOCH, Node, copied, wait_for_closer, wire
from .exporters import Clock, Make
from .played_transport import PlayedCopy, PlayedTransport
from .served import AnyTable
from .test_rank import cache, load_of, opened, own, piece_of, transport

__all__ = ["cache", "opened", "own", "transport"]

REGIONS = [Region(0, 64, 64, 8)]


@pytest.fixture
def on_cpu(tmp_path: Path) -> Iterator[list[PosixShmTransport]]:
    memories = [KVMemory.create(512) for _ in range(2)]
    made = [PosixShmTransport(m, REGIONS, 0, tmp_path / f"{i}") for i, m in enumerate(memories)]
    yield made
    for each in made:
        each.close()
    for memory in memories:
        memory.close()


def test_an_exporter_on_a_cpu_sees_when_its_memory_is_unmapped(
    on_cpu: list[PosixShmTransport],
) -> None:
    exporter, importer = on_cpu
    descriptor = exporter.export(EPOCH)
    attachment = importer.attach(descriptor)
    left = exporter.withdraw()
    with pytest.raises(StaleAttachment):
        importer.attach(descriptor)
    until(lambda: left() == 1)
    gate = threading.Event()
    importer.copier.submit(lambda: gate.wait(60) and None)
    attachment.close()
    assert attachment._connection is not None
    assert attachment._connection.fileno() >= 0, "the mapping waits for the copies before it"
    gate.set()
    until(lambda: left() == 0)
    importer.attach(exporter.export(Epoch(9))).close()


@pytest.mark.parametrize("kind", ["fd", "fabric"])
def test_an_exporter_on_a_gpu_sees_when_its_memory_is_unmapped(node: Node, kind: str) -> None:
    """That of vLLM's sleep mode, which is VMM memory."""
    one, two = node.rank(kind=kind), node.rank(kind=kind)
    descriptor = wire(one.transport.export(EPOCH))
    attachment = two.transport.attach(descriptor)
    left = one.transport.withdraw()
    until(lambda: left() == 2)  # the cache and the probe
    with pytest.raises(StaleAttachment):
        node.rank(kind=kind).transport.attach(descriptor)
    assert copied(attachment) is CopyState.DONE, "what is mapped stays readable"
    attachment.close()
    wait_for_closer(two.transport)
    until(lambda: left() == 0)
    one.transport.export(Epoch(0))  # what a rank does when its memory is there again
    again = two.transport.attach(wire(one.transport.export(Epoch(9))))
    assert copied(again) is CopyState.DONE
    again.close()


def test_no_descriptor_of_gpu_memory_stays_open(node: Node) -> None:
    """It would keep memory that sleeps from being given back."""
    one, two = node.rank(kind="fd"), node.rank(kind="fd")
    attachment = two.transport.attach(wire(one.transport.export(EPOCH)))
    assert one.transport._export._server is not None
    until(lambda: one.transport._export._server._sent == ())  # type: ignore[union-attr]
    attachment.close()


def test_memory_that_cannot_be_mapped_does_not_count(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = node.rank(kind="fd"), node.rank(kind="fd")
    descriptor = wire(one.transport.export(EPOCH))

    def fails(*_: Any) -> int:
        raise TransportError("no room")

    monkeypatch.setattr(two.driver, "vmm_map", fails)
    with pytest.raises(TransportError, match="no room"):
        two.transport.attach(descriptor)
    left = one.transport.withdraw()
    until(lambda: left() == 0)


def test_a_peer_of_an_older_version_does_not_listen_for_fabric_handles(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = node.rank(kind="fabric"), node.rank(kind="fabric")
    descriptor = wire(one.transport.export(EPOCH))
    monkeypatch.setattr(mappings, "sibling_socket", lambda *_: f"{node.run_dir}/nobody")
    attachment = two.transport.attach(descriptor)
    assert copied(attachment) is CopyState.DONE
    attachment.close()


# -- the rank's own loads


@pytest.fixture
def copying(opened: RankHalf, exporter: Make, transport: PlayedTransport) -> RankHalf:
    transport.state = CopyState.PENDING
    opened.begin_load(load_of(piece_of(exporter(), 2)))
    until(lambda: transport.copies)
    return opened


def test_memory_goes_when_the_last_copy_has_ended(
    copying: RankHalf, own: AnyTable, transport: PlayedTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    (copy,) = transport.copies
    withdrawn: list[bool] = []

    def withdraw() -> Callable[[], int]:
        withdrawn.append(copy.cancelled)
        return lambda: 0

    monkeypatch.setattr(transport, "withdraw", withdraw, raising=False)
    gone: list[int] = []
    thread = threading.Thread(target=lambda: gone.append(copying.release_memory(0.0)))
    thread.start()
    until(lambda: copy.cancelled)
    assert withdrawn == [False], "before anything is waited for"
    assert own.life(0) == 0
    assert gone == []
    copy.state = CopyState.FAILED
    thread.join(60)
    assert gone == [0]
    (report,) = copying.poll()
    assert report.bad == (12,)


def test_memory_stays_if_a_copy_cannot_be_stopped(
    copying: RankHalf, transport: PlayedTransport, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    def poll(copy: PlayedCopy) -> CopyState:
        clock.now += 1.0
        return copy.state

    monkeypatch.setattr(PlayedCopy, "poll", poll)
    with pytest.raises(MemoryInUse, match="may still write"):
        copying.release_memory(0.0)
    transport.copies[0].state = CopyState.FAILED


def test_peers_that_hang_are_not_waited_for_for_ever(
    opened: RankHalf, transport: PlayedTransport, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    def mapped() -> int:
        clock.now += 1.0
        return 3

    monkeypatch.setattr(transport, "withdraw", lambda: mapped, raising=False)
    begun = clock.now
    assert opened.release_memory(1.5) == 3
    assert clock.now - begun == 2.0


def test_memory_is_freed_where_a_transport_does_not_know_its_importers(
    opened: RankHalf,
) -> None:
    assert opened.release_memory(1.5) == 0
