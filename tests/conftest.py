"""What holds for every test: cheap ones first, and nothing of kvshm stays in shared memory."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvshm.errors import SegmentError, SegmentNotFound
from kvshm.segment import is_alive, list_segments, owner_of

ROOT = Path(__file__).parent
ORDER = ("unit", "core", "conformance", "model", "multiprocess", "gpu", "vllm")
"""Folders by what their tests cost; single files of tests/ come before the last one."""


def _cost(item: pytest.Item) -> int:
    folder = item.path.relative_to(ROOT).parts[0]
    return ORDER.index(folder) if folder in ORDER else len(ORDER) - 1


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run cheap tests first, so that a mistake shows before minutes of engines."""
    items.sort(key=_cost)


def _left_behind(name: str) -> bool:
    """Whether a segment has no living owner outside of this process: somebody else may well
    run kvshm on this machine while its tests run."""
    try:
        owner = owner_of(name)
    except SegmentNotFound:
        return False
    except SegmentError:
        return True
    return owner.pid == os.getpid() or not is_alive(owner)


@pytest.fixture(scope="session", autouse=True)
def nothing_left_in_shared_memory() -> Iterator[None]:
    """The session fails if it ends with a segment that did not exist before."""
    before = set(list_segments())
    yield
    left = [str(name) for name in list_segments() if name not in before]
    left = [name for name in left if _left_behind(name)]
    assert not left, f"left in shared memory: {left}"
