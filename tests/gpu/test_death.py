"""Who dies, sleeps, lies or reuses its blocks while others copy."""

from __future__ import annotations

import time

import msgspec
import pytest
from gpu_peer import PeerError

from kvshm.interfaces import MemoryDescriptor

from .conftest import Start

LARGE = {"layers": 32, "blocks": 256, "block_bytes": 65536}
LARGE_BYTES = 32 * 256 * 65536


def test_a_dead_exporters_memory(start: Start, capsys: pytest.CaptureFixture) -> None:
    """Whether a driver keeps a dead exporter's memory readable is not documented: what was
    found is printed, and belongs into docs/gpu.md.  Required is only that the importer lives."""
    exporter, importer = start(), start()
    exporter.call("make", seed=1, **LARGE)
    importer.call("make", seed=2, **LARGE)
    importer.call("attach", descriptor=exporter.call("export", epoch=5))
    blocks = list(range(256))
    importer.call("begin", source=blocks, target=blocks)
    exporter.kill()
    assert importer.call("finish") in ("done", "failed")
    assert importer.call("healthy")
    lists = {"source": blocks, "target": blocks}
    shared = {"own": 2, "peer": 1, "peer_blocks": 256, **lists}
    midway = importer.call("wrong", **shared)
    found = []
    for seconds in (0, 1, 5):
        time.sleep(seconds)
        importer.call("fill", seed=2)
        state = importer.call("copy", source=blocks, target=blocks)
        found.append((seconds, state, importer.call("wrong", **shared)))
        assert importer.call("healthy")
    with capsys.disabled():
        print(f"\nkilled mid-copy: {midway} wrong bytes in that copy; afterwards {found}")


def test_a_dead_exporters_memory_returns_when_its_last_importer_detaches(start: Start) -> None:
    exporter, importer = start(), start()
    importer.call("make", seed=2)
    before = importer.call("memory_used")
    exporter.call("make", seed=1, blocks=1 << 12)
    importer.call("attach", descriptor=exporter.call("export", epoch=5))
    assert importer.call("memory_used") - before >= 1 << 30
    exporter.kill()
    importer.call("detach")
    deadline = time.monotonic() + 30
    while importer.call("memory_used") - before > 1 << 28:
        assert time.monotonic() < deadline, "the dead exporter's memory is still in use"
        time.sleep(0.1)


def test_an_exporter_survives_its_importers_death(start: Start) -> None:
    exporter, importer, other = start(), start(), start()
    for seed, peer in enumerate((exporter, importer, other), 1):
        peer.call("make", seed=seed, **LARGE)
    descriptor = exporter.call("export", epoch=5)
    blocks = list(range(256))
    importer.call("attach", descriptor=descriptor)
    importer.call("begin", source=blocks, target=blocks)
    importer.kill()
    assert exporter.call("healthy")
    other.call("attach", descriptor=descriptor)
    assert other.call("copy", source=blocks, target=blocks) == "done"
    lists = {"source": blocks, "target": blocks}
    assert other.call("wrong", own=3, peer=1, peer_blocks=256, **lists) == 0


def test_a_thousand_cycles_of_attaching_leave_no_memory_behind(start: Start) -> None:
    exporter, importer = start(), start()
    exporter.call("make", seed=1)
    importer.call("make", seed=2)
    descriptor = exporter.call("export", epoch=5)
    importer.call("cycle", descriptor=descriptor, times=20)
    before = importer.call("memory_used")
    for _ in range(10):
        importer.call("cycle", descriptor=descriptor, times=98)
    assert importer.call("memory_used") - before < 16 << 20


def test_a_reused_block_is_never_delivered(start: Start) -> None:
    """The exporter retracts, frees and rewrites blocks while they are copied: what the
    re-check lets through is compared with what was published."""
    exporter, importers = start(), [start(), start()]
    shape = {"layers": 16, "blocks": 32, "block_bytes": 65536}
    exporter.call("make", seed=1, **shape)
    descriptor = exporter.call("export", epoch=5)
    exporter.call("serve", epoch=5)
    try:
        for seed, importer in enumerate(importers, 2):
            importer.call("make", seed=seed, **shape)
            importer.call("attach", descriptor=descriptor)
            importer.send("judge", epoch=5, seconds=20)
        seen = [importer.answer() for importer in importers]
    finally:
        exporter.call("rest")
    assert sum(s["wrong"] for s in seen) == 0, seen
    assert sum(s["failed"] for s in seen) == 0, seen
    assert all(s["delivered"] > 0 and s["discarded"] > 0 for s in seen), seen


def changed(descriptor: str, **details: object) -> str:
    found = msgspec.msgpack.decode(bytes.fromhex(descriptor), type=MemoryDescriptor)
    said = {**msgspec.msgpack.decode(found.details), **details}
    new = msgspec.structs.replace(found, details=msgspec.msgpack.encode(said))
    return msgspec.msgpack.encode(new).hex()


def test_lies_are_found_out_before_a_block_is_read(start: Start) -> None:
    exporter, importer = start(), start()
    exporter.call("make", seed=1)
    importer.call("make", seed=2)
    descriptor = exporter.call("export", epoch=5)
    with pytest.raises(PeerError, match="other bytes than its own"):
        importer.call("attach", descriptor=changed(descriptor, probe_checksum=1))
    exporter.call("export", epoch=6)
    with pytest.raises(PeerError, match="StaleAttachment"):
        importer.call("attach", descriptor=descriptor)
    assert importer.call("healthy")


def test_a_uuid_that_exists_nowhere_is_reached_by_trying_or_refused(start: Start) -> None:
    """The UUID only says which GPU; whether its memory can be opened is found out."""
    exporter, importer = start(), start()
    exporter.call("make", seed=1)
    importer.call("make", seed=2)
    lie = changed(exporter.call("export", epoch=5), device="00" * 16)
    try:
        importer.call("attach", descriptor=lie)
    except PeerError as exc:
        if "TransportError" not in str(exc) and "CudaError" not in str(exc):
            raise
    else:
        assert importer.call("copy", source=[1], target=[2]) == "done"
        lists = {"source": [1], "target": [2]}
        assert importer.call("wrong", own=2, peer=1, peer_blocks=64, **lists) == 0
    assert importer.call("healthy")
