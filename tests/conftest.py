"""What holds for every test: the order."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from . import side_by_side
from .played_cuda import library

ROOT = Path(__file__).parent
ORDER = ("unit", "core", "conformance", "model", "multiprocess", "packaging", "gpu", "vllm")
"""Folders by what their tests cost; single files of tests/ come before the last one."""


def _folder(item: pytest.Item) -> int:
    folder = item.path.relative_to(ROOT).parts[0]
    return ORDER.index(folder) if folder in ORDER else len(ORDER) - 1


def _cost(item: pytest.Item) -> tuple[int, bool, bool]:
    starts_engines, is_long = (item.get_closest_marker(name) for name in ("vllm", "long"))
    return _folder(item), starts_engines is not None, is_long is not None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Run cheap tests first, so that a mistake shows before minutes of engines."""
    items.sort(key=_cost)
    if hasattr(config, "workerinput"):  # a worker of pytest-xdist
        items[:] = side_by_side.spread(items, _folder)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    return side_by_side.scheduler(config, log)


@pytest.fixture(scope="session")
def played_cuda(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A CUDA driver library played in host memory, for the real cuda-bindings to call."""
    if (reason := library.missing()) is not None:
        pytest.skip(reason)
    return library.build(tmp_path_factory.mktemp("cuda"))
