"""Every byte of every shape of copy, between processes."""

from __future__ import annotations

import itertools
import random

import pytest
from gpu_peer import PeerError

from .conftest import Start

BLOCKS = 48
LISTS = {
    "one": ([3], [5]),
    "fragmented": ([0, 9, 3, 12, 1], [7, 0, 2, 15, 4]),
    "reversed": (list(range(40)), list(range(40))[::-1]),
    "one onto many": ([2, 2, 2], [0, 5, 9]),
    "all, shuffled": (random.Random(1).sample(range(BLOCKS), BLOCKS), list(range(BLOCKS))),
}
BLOCK_BYTES = {
    "16 tokens of 8 heads of 128 bf16": 16 * 8 * 128 * 2 * 2,
    "fp8": 16 * 8 * 128 * 2,
    "fp32": 16 * 8 * 128 * 2 * 4,
    "MLA of 576 bf16": 16 * 576 * 2,
    "per-token scales, 4-byte aligned": 16 * (128 + 4),
    "odd": 1023,
}


@pytest.mark.parametrize("block_bytes", BLOCK_BYTES.values(), ids=BLOCK_BYTES.keys())
def test_every_byte_of_every_list_in_every_layout(start: Start, block_bytes: int) -> None:
    exporter, importer = start(), start()
    shape = {"layers": 3, "block_bytes": block_bytes}
    for ours, theirs in itertools.product(("layer", "block"), repeat=2):
        exporter.call("make", seed=1, blocks=BLOCKS, outermost=theirs, lead=512, **shape)
        importer.call("make", seed=2, blocks=BLOCKS + 7, outermost=ours, **shape)
        importer.call("attach", descriptor=exporter.call("export", epoch=5))
        for source, target in LISTS.values():
            importer.call("fill", seed=2)
            assert importer.call("copy", source=source, target=target) == "done"
            lists = {"source": source, "target": target}
            assert importer.call("wrong", own=2, peer=1, peer_blocks=BLOCKS, **lists) == 0
        importer.call("detach")
        importer.call("close")
        exporter.call("close")


def test_equal_addresses_in_both_processes_are_no_matter(start: Start) -> None:
    exporter, importer = start(), start()
    addresses = [peer.call("make", seed=i) for i, peer in enumerate((exporter, importer), 1)]
    importer.call("attach", descriptor=exporter.call("export", epoch=5))
    assert importer.call("copy", source=[1, 2], target=[2, 1]) == "done"
    lists = {"source": [1, 2], "target": [2, 1]}
    assert importer.call("wrong", own=2, peer=1, peer_blocks=64, **lists) == 0, addresses


def test_checksums_agree_across_processes_and_with_the_bytes(start: Start) -> None:
    exporter, importer = start(), start()
    exporter.call("make", seed=1, outermost="layer")
    importer.call("make", seed=2, outermost="block")
    importer.call("attach", descriptor=exporter.call("export", epoch=5))
    importer.call("copy", source=[7, 3], target=[0, 1])
    wanted = exporter.call("checksum", blocks=[7, 3])
    assert importer.call("checksum", blocks=[0, 1]) == wanted
    assert len(set(wanted)) == 2


@pytest.mark.parametrize("kind", ["fd", "fabric", "cumem"])
def test_every_list_from_vmm_memory(start: Start, kind: str) -> None:
    """One chunk in one reserved range, as vLLM's cumem allocator has for a segment of torch; the
    cache begins somewhere in it."""
    exporter, importer = start(), start()
    shape = {"layers": 3, "blocks": BLOCKS, "block_bytes": 16 * 8 * 128 * 2 * 2}
    try:
        exporter.call("make", seed=1, kind=kind, lead=512, **shape)
    except PeerError as exc:
        pytest.skip(f"no VMM memory of kind {kind} here: {exc}")
    importer.call("make", seed=2, **shape)
    importer.call("attach", descriptor=exporter.call("export", epoch=5))
    for source, target in LISTS.values():
        importer.call("fill", seed=2)
        assert importer.call("copy", source=source, target=target) == "done"
        lists = {"source": source, "target": target}
        assert importer.call("wrong", own=2, peer=1, peer_blocks=BLOCKS, **lists) == 0


def test_memory_of_the_pool_is_refused_with_the_setting(start: Start) -> None:
    exporter = start()
    exporter.call("make", seed=1, kind="pool")
    with pytest.raises(PeerError, match="backend:cudaMallocAsync"):
        exporter.call("export", epoch=5)


@pytest.mark.parametrize("conf", ["expandable_segments:True", "backend:cudaMallocAsync"])
def test_other_allocators_of_torch_are_shared_or_refused_but_never_wrong(
    start: Start, conf: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        monkeypatch.setenv(name, conf)
    exporter, importer = start(), start()
    exporter.call("make", seed=1)
    importer.call("make", seed=2)
    try:
        descriptor = exporter.call("export", epoch=5)
    except PeerError as exc:
        if "cannot be exported" not in str(exc):
            raise
        return
    importer.call("attach", descriptor=descriptor)
    assert importer.call("copy", source=[1], target=[2]) == "done"
    lists = {"source": [1], "target": [2]}
    assert importer.call("wrong", own=2, peer=1, peer_blocks=64, **lists) == 0
