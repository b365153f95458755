"""Who dies, sleeps, lies or reuses its blocks while others copy."""

from __future__ import annotations

import json
import time

import msgspec
import pytest
from gpu_peer import GpuPeer, PeerError
from gpu_sizes import sized

from kvshm.interfaces import MemoryDescriptor

from .conftest import Start

LARGE = {"layers": 32, "blocks": sized(256, 16), "block_bytes": 65536}
BLOCKS = list(range(LARGE["blocks"]))
ALL = {"source": BLOCKS, "target": BLOCKS}
OF_ALL = {"own": 2, "peer": 1, "peer_blocks": len(BLOCKS), **ALL}


@pytest.mark.parametrize("kind", ["caching", "fd"])
def test_a_dead_exporters_memory(start: Start, kind: str, capsys: pytest.CaptureFixture) -> None:
    """Whether a driver keeps a dead exporter's memory readable is not documented: what was
    found is printed, and belongs into docs/gpu.md.  Required is only that the importer lives."""
    exporter, importer = start(), start()
    exporter.call("make", seed=1, kind=kind, **LARGE)
    importer.call("make", seed=2, **LARGE)
    importer.call("attach", descriptor=exporter.call("export", epoch=5))
    for _ in range(sized(50, 2)):  # one alone would be over before the kill
        importer.call("begin", **ALL)
    exporter.kill()
    died = time.monotonic()
    midway = {"state": tried(importer, "finish")}
    looks = []
    for seconds in (0, 1, 6):
        time.sleep(max(0.0, died + seconds - time.monotonic()))
        looks.append(look(importer, died))
    nbytes = len(BLOCKS) * LARGE["layers"] * LARGE["block_bytes"]
    found = {"kind": kind, "bytes": nbytes, "killed_mid_copy": midway, "afterwards": looks}
    with capsys.disabled():
        print(f"\n{json.dumps({'benchmark': 'gpu dead exporter', **found})}")
    assert midway["state"] in ("done", "failed")
    assert [one["healthy"] for one in looks] == [True] * 3


def tried(called: GpuPeer, method: str, **arguments: object) -> object:
    """What a call returns, or what it raises there: both are results."""
    try:
        return called.call(method, **arguments)
    except PeerError as exc:
        return str(exc)


def look(importer: GpuPeer, died: float) -> dict[str, object]:
    after = round(time.monotonic() - died, 2)
    blank = tried(importer, "blank")
    state = tried(importer, "copy", **ALL)
    found: dict[str, object] = {"after_s": after, "blank": blank, "state": state}
    return {**found, "wrong_bytes": tried(importer, "wrong", **OF_ALL),
            "healthy": tried(importer, "healthy")}  # fmt: skip


@pytest.mark.skipif(sized(False, True), reason="a rehearsal has no GPU memory that is used or free")
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
    importer.call("attach", descriptor=descriptor)
    importer.call("begin", **ALL)
    importer.kill()
    assert exporter.call("healthy")
    other.call("attach", descriptor=descriptor)
    assert other.call("copy", **ALL) == "done"
    assert other.call("wrong", **{**OF_ALL, "own": 3}) == 0


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
