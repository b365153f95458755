"""What several files of this folder use."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvshm._base import timing

from .joined import Toys, served
from .processes import Node, fresh_node
from .scripted import HASTY, UNHURRIED, Script, scripted


@pytest.fixture
def node() -> Iterator[Node]:
    with fresh_node() as node:
        yield node


@pytest.fixture
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every process that the test starts keeps less than half of the product's times: for a test
    that has to wait until one of them is over."""
    monkeypatch.setenv(timing.VARIABLE, "0.4")


@pytest.fixture
def script() -> Iterator[Script]:
    with scripted(UNHURRIED) as script:
        yield script


@pytest.fixture
def hasty_script() -> Iterator[Script]:
    """Its client waits for a reply half as long as the product does."""
    with scripted(HASTY) as script:
        yield script


@pytest.fixture(scope="module")
def place() -> Iterator[Node]:
    with served() as node:
        yield node


@pytest.fixture
def toys(place: Node, request: pytest.FixtureRequest) -> Iterator[Toys]:
    toys = Toys(place, request.node.nodeid)
    yield toys
    toys.close()
