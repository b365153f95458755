"""Every test of this folder runs over every transport."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

# pytest's importlib mode knows no packages of tests; the rigs are imported by their path.
_spec = importlib.util.spec_from_file_location("rigs", Path(__file__).with_name("rigs.py"))
assert _spec is not None
assert _spec.loader is not None
rigs: Any = importlib.util.module_from_spec(_spec)
sys.modules["rigs"] = rigs
_spec.loader.exec_module(rigs)


@pytest.fixture(params=sorted(rigs.RIGS))
def rig(request: pytest.FixtureRequest) -> Iterator[Any]:
    made = rigs.RIGS[request.param]()
    yield made
    made.close()
