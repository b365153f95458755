"""Nobody ends because another one does; ``ends.py`` says how much more of this there is to run."""

from __future__ import annotations

import pytest

from .ends import flood_rounds, node_rounds

pytestmark = [pytest.mark.multiprocess, pytest.mark.long]


def test_ends_of_coordinator_and_engines_under_load_end_nobody_else() -> None:
    assert node_rounds(4, seed=1)["ended"] == []


def test_a_client_under_a_flood_outlives_who_floods_it() -> None:
    assert flood_rounds(6, seed=1, old=False)["ended"] == []


def test_as_messages_were_sent_before_it_would_not() -> None:
    """Else the others here show nothing."""
    assert flood_rounds(100, seed=1, old=True, enough=1)["ended"] == ["listen: -6"]
