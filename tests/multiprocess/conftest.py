"""What several files of this folder use."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from .processes import Node, fresh_node
from .scripted import UNHURRIED, Script, scripted


@pytest.fixture
def node() -> Iterator[Node]:
    """A namespace of the test's own, of which nothing is left afterwards."""
    with fresh_node() as node:
        yield node


@pytest.fixture
def script() -> Iterator[Script]:
    with scripted(UNHURRIED) as script:
        yield script


@pytest.fixture
def hasty_script() -> Iterator[Script]:
    """Its client waits for a reply no longer than the product does."""
    with scripted() as script:
        yield script
