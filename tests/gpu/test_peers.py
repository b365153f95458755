"""Two GPUs, where there are two."""

from __future__ import annotations

import pytest
from gpu_memory import gpu_count
from gpu_peer import PeerError

from .conftest import Start

pytestmark = pytest.mark.skipif(gpu_count() < 2, reason="there are no two GPUs")
LISTS = {"source": [9, 3, 12], "target": [0, 7, 2]}


def test_blocks_travel_between_gpus(start: Start) -> None:
    exporter, importer = start(device=0), start(device=1)
    for block_bytes in (1024, 65536, 1 << 20):
        exporter.call("make", seed=1, block_bytes=block_bytes)
        importer.call("make", seed=2, block_bytes=block_bytes, staging=True)
        importer.call("attach", descriptor=exporter.call("export", epoch=5))
        assert importer.call("copy", **LISTS) == "done"
        assert importer.call("wrong", own=2, peer=1, peer_blocks=64, **LISTS) == 0
        importer.call("detach")
        importer.call("close")


def test_gpus_are_matched_whatever_is_visible(start: Start) -> None:
    exporter, importer = start(visible="0"), start(visible="1")
    exporter.call("make", seed=1)
    importer.call("make", seed=2)
    descriptor = exporter.call("export", epoch=5)
    try:
        importer.call("attach", descriptor=descriptor)
    except PeerError as exc:
        pytest.skip(f"an invisible GPU's memory cannot be opened here: {exc}")
    assert importer.call("copy", **LISTS) == "done"
    assert importer.call("wrong", own=2, peer=1, peer_blocks=64, **LISTS) == 0
