"""Tests that need a GPU and several processes on it; skipped, with the reason, elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from gpu_memory import no_gpu
from gpu_peer import GpuPeer

REASON = no_gpu()
Start = Callable[..., GpuPeer]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if item.path.is_relative_to(here):
            item.add_marker(pytest.mark.gpu)
            if REASON is not None:
                item.add_marker(pytest.mark.skip(reason=REASON))


@pytest.fixture
def start() -> Iterator[Start]:
    with ExitStack() as stack:
        yield lambda **arguments: stack.enter_context(GpuPeer(**arguments))
