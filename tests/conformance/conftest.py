"""Every test of this folder runs over every transport."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from . import cuda_processes, rigs


@pytest.fixture(scope="session", autouse=True)
def no_process_outlives_the_session() -> Iterator[None]:
    yield
    cuda_processes.end_all()


@pytest.fixture(params=sorted(rigs.RIGS))
def rig(request: pytest.FixtureRequest) -> Iterator[Any]:
    kind = rigs.RIGS[request.param]
    made = kind(*(request.getfixturevalue(name) for name in kind.fixtures))
    yield made
    made.close()
