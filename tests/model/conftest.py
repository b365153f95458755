"""Says last of all, below pytest's own summary, if the models could not be searched."""

from __future__ import annotations

import pytest

from .run_models import NOT_CHECKED
from .search import spin_is_missing


@pytest.hookimpl(trylast=True)
def pytest_unconfigure() -> None:
    """Runs once, after the summary; only where this folder's tests were collected."""
    if spin_is_missing():
        print(f"{NOT_CHECKED}: spin is not installed")
