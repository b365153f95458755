"""Every test of this folder runs over every transport."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest


def load(name: str) -> Any:
    """Import a module of this folder by its path: pytest's importlib mode knows no packages of
    tests, and the tests import the rigs by their name."""
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


processes = load("cuda_processes")
rigs = load("rigs")


@pytest.fixture(scope="session", autouse=True)
def no_process_outlives_the_session() -> Iterator[None]:
    yield
    processes.end_all()


@pytest.fixture(params=sorted(rigs.RIGS))
def rig(request: pytest.FixtureRequest) -> Iterator[Any]:
    kind = rigs.RIGS[request.param]
    made = kind(*(request.getfixturevalue(name) for name in kind.fixtures))
    yield made
    made.close()
