"""A node with a coordinator, and managers of it that live in the test's own process."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from local_node import Node
from tiny_model import write_model

MakeManager = Callable[..., Any]
Lines = list[str]


@pytest.fixture(scope="session")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("transformers")
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def node_with_coordinator() -> Iterator[Node]:
    with Node() as node:
        node.start_coordinator()
        yield node


@pytest.fixture
def node(node_with_coordinator: Node, monkeypatch: pytest.MonkeyPatch) -> Node:
    more = {"KVSHM_STRICT": "1", "KVSHM_VERIFY": "1"}
    for name, value in {**node_with_coordinator.environment, **more}.items():
        monkeypatch.setenv(name, value)
    return node_with_coordinator


@pytest.fixture
def manager(node: Node, model_path: Path) -> Iterator[MakeManager]:
    from kvshm.hooks.transformers import share, stats_of

    from .managers import end, new_manager

    made: list[Any] = []

    def make(salt: bytes = b"", name: str | None = None, **options: Any) -> Any:
        made.append(new_manager(model_path, **options))
        return share(made[-1], salt=salt, name=name, wait_seconds=60)

    yield make
    for one in made:
        print({name: count for name, count in stats_of(one).items() if count})  # if the test fails
        end(one)


@pytest.fixture
def lines() -> Iterator[Lines]:
    said: Lines = []

    class Ear(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(record.getMessage())

    ear, ours = Ear(), logging.getLogger("vllm.kvshm")
    level = ours.level
    ours.addHandler(ear)
    ours.setLevel(logging.INFO)
    yield said
    ours.removeHandler(ear)
    ours.setLevel(level)
