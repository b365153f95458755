"""What holds for every test: cheap ones first."""

from __future__ import annotations

from pathlib import Path

import pytest

from .played_cuda import library

ROOT = Path(__file__).parent
ORDER = ("unit", "core", "conformance", "model", "multiprocess", "packaging", "gpu", "vllm")
"""Folders by what their tests cost; single files of tests/ come before the last one."""


def _cost(item: pytest.Item) -> int:
    folder = item.path.relative_to(ROOT).parts[0]
    return ORDER.index(folder) if folder in ORDER else len(ORDER) - 1


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run cheap tests first, so that a mistake shows before minutes of engines."""
    items.sort(key=_cost)


@pytest.fixture(scope="session")
def played_cuda(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A CUDA driver library played in host memory, for the real cuda-bindings to call."""
    if (reason := library.missing()) is not None:
        pytest.skip(reason)
    return library.build(tmp_path_factory.mktemp("cuda"))
