"""Two nodes of this machine, each with a coordinator, keepers and engines without a model; behind
them a store, which is a folder (tests/multiprocess/folder_store.py)."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest

from kvshm._engine.store_asks import Coming, Lacking, StoreAsks

from .folder_store import FolderStore
from .joined import Toy, Toys, served
from .keepers import PAGE, Keeper, prompt
from .processes import Node, wait_until

LONG = 1000.0
"""Seconds that computing takes, so that any fetch is faster."""


class StoreKeeper(Keeper):
    def __init__(self, place: Node, folder: Path, blocks: int = 1000) -> None:
        where = ("--run-dir", str(place.run_dir), "--namespace", place.namespace)
        command = ("-m", "tests.multiprocess.folder_store", "keeper", *where)
        memory, store = ("--memory", str(blocks * PAGE)), ("--store", str(folder))
        self.place = place
        self.process = place.processes.python("keeper", *command, *memory, *store)
        self.process.wait_out(lambda line: "bytes for blocks" in line)


class World:
    """Two nodes and a store."""

    def __init__(self, folder: Path, undo: ExitStack) -> None:
        self.store, self._undo = FolderStore(folder), undo
        self.folder = folder
        self.one, self.two = undo.enter_context(served()), undo.enter_context(served())

    def engine(self, place: Node, name: str, kind: str = "k", **how: Any) -> Engine:
        toys = self._undo.enter_context(closing(Toys(place, kind)))
        return self._undo.enter_context(closing(Engine(toys.join(name, **how))))

    def keeper(self, place: Node, blocks: int = 1000) -> StoreKeeper:
        return StoreKeeper(place, self.folder, blocks)

    def computed_on_one(self, **how: Any) -> tuple[Toy, list[bytes]]:
        """An engine of the first node has computed a prompt, which is in the store; returns it, and
        the prompt's keys."""
        a = self.engine(self.one, "a", **how).toy
        keys = prompt(a, b"1")
        a.compute(keys, range(6))
        self.wait_for_written(keys)
        return a, keys

    def served_and_written(self) -> tuple[Engine, list[bytes]]:
        """An engine of the first node, which the keeper there serves; and the keys of a prompt that
        it has computed, and that is in the store."""
        a = self.engine(self.one, "a")
        a.wait_until_served()
        keys = prompt(a.toy, b"1")
        a.toy.compute(keys, range(6))
        self.wait_for_written(keys)
        return a, keys

    def calls(self, what: str) -> list[list[str]]:
        """The keys of each call of this kind so far, a keeper's pid in front."""
        lines = (self.folder / "calls").read_text().splitlines()
        return [line.split()[1:] for line in lines if line.split()[0] == what]

    def wait_for_written(self, keys: Sequence[bytes], group: int = 0) -> None:
        def written() -> bool:
            put = {k for call in self.calls("put") for k in call[1:] if self.store.path(k).exists()}
            ends = {key.rpartition("/")[2] for key in put if key.split("/")[-2] == str(group)}
            return {key.hex() for key in keys} <= ends

        wait_until(written, "the keeper has written them")

    def __truediv__(self, name: str) -> Path:
        return self.folder / name


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    with ExitStack() as undo:
        yield World(tmp_path, undo)


class Engine:
    """The end of an engine that asks."""

    def __init__(self, toy: Toy) -> None:
        self.toy = toy
        self.asks = StoreAsks(toy.place.run_dir, toy.place.namespace, time.monotonic)

    def close(self) -> None:
        self.asks.close()

    def ask(self, keys: Sequence[bytes], computing: float = LONG, found: int = 0) -> int:
        wait_until(lambda: self.asks.possible, "a keeper has a store")
        groups, lacking = self.toy.node._groups.all, Lacking(0, found, len(keys))
        number = self.asks.ask(self.toy.table.fingerprint, keys, lacking, groups, computing)
        assert number is not None
        return number

    def answer(self, number: int) -> Coming:
        wait_until(lambda: self.asks.answer(number) is not None, "the keeper answers")
        answer = self.asks.answer(number)
        assert answer is not None
        return answer

    def length(self, keys: Sequence[bytes], computing: float = LONG, found: int = 0) -> int:
        """What the node will have of a prompt, as the keeper says."""
        return self.answer(self.ask(keys, computing, found)).length

    def wait_until_served(self) -> None:
        """The keeper knows this engine's kind, and the store has answered."""
        keys = prompt(self.toy, b"nobody's")
        self.toy.compute(keys, range(6))
        wait_until(lambda: self.length(keys) == 6, "the keeper has what the engine has")
        self.toy.node.retract(range(6))
