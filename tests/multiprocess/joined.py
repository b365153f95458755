"""Engines of one process on the public surface, whose blocks hold what their keys say."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from hashlib import sha256
from typing import Any

import kvshm
from kvshm import Config, Found, Group, Identity, Load, Region
from kvshm._shm.slot_table import SlotTableView

from .processes import PATIENCE_SECONDS, Node, fresh_node, wait_until

BLOCK, BLOCKS, TOKENS = 256, 32, 4


def content(key: bytes, seed: bytes = b"") -> bytes:
    """The bytes of the block with this key, in each engine."""
    return sha256(key + seed).digest() * (BLOCK // 32)


class Toy:
    def __init__(
        self, place: Node, name: str, kind: str, patient: bool = False, **how: Any
    ) -> None:
        """``kind``: engines of one kind share.  ``patient``: it waits for readers until the test
        lets them end, longer than any setting."""
        settings = how.pop("settings", {})
        self.place, self.kind = place, kind
        self.config = config = Config(
            run_dir=str(place.run_dir), namespace=place.namespace, **settings
        )
        if patient:
            object.__setattr__(config, "drain_budget_ms", 1000.0 * PATIENCE_SECONDS)
        regions = [Region(0, BLOCK, BLOCK, BLOCKS)]
        given: dict[str, Any] = {"regions": regions, "block_size": TOKENS, "config": config} | how
        self.memory = kvshm.allocate(BLOCK * BLOCKS, config)
        identity = Identity(engine="toy 1", model="m", weights=kind)
        self.node = kvshm.join(identity, memory=self.memory, name=name, **given)

    def prompt(self, blocks: int = 6, salt: bytes = b"") -> list[bytes]:
        """The keys of a prompt of this many blocks, the same in each engine."""
        return list(self.node.keys(range(blocks * TOKENS), salt))

    def write(self, block: int, key: bytes, seed: bytes = b"") -> None:
        self.memory.buffer[block * BLOCK : (block + 1) * BLOCK] = content(key, seed)

    def read(self, block: int) -> bytes:
        return bytes(self.memory.buffer[block * BLOCK : (block + 1) * BLOCK])

    def holds(self, blocks: Sequence[int], keys: Sequence[bytes]) -> list[bool]:
        """For each of the blocks: whether it holds what its key says."""
        pairs = zip(blocks, keys, strict=True)
        return [self.read(block) == content(key) for block, key in pairs]

    def compute(self, keys: Sequence[bytes], blocks: Iterable[int], start: int = 0) -> int:
        blocks = list(blocks)
        for block, key in zip(blocks, keys[start:], strict=False):
            self.write(block, key)
        return self.node.publish(keys[: start + len(blocks)], blocks, start)

    @property
    def table(self) -> SlotTableView:
        state = self.node._open
        assert state is not None
        return state.table

    def leases(self) -> int:
        return sum(bool(slot.leases) for slot in self.table.slots())

    def copies_held_up(self) -> AbstractContextManager[None]:
        """Copies into its memory wait for the end of this."""
        halves = self.node._halves
        assert halves is not None
        return self.held_up(halves.ranks.halves[0].transport)

    @staticmethod
    @contextmanager
    def held_up(transport: Any) -> Iterator[None]:
        """Copies of a transport wait for the end of this."""
        begun, go_on = threading.Event(), threading.Event()

        def wait() -> None:
            begun.set()
            assert go_on.wait(PATIENCE_SECONDS)

        transport.copier.submit(wait)
        assert begun.wait(PATIENCE_SECONDS)
        try:
            yield
        finally:
            go_on.set()

    def wait_until_copying(self) -> None:
        """Wait until a copy into its memory has begun, or is held up."""
        copier = self.node._halves.ranks.halves[0].transport.copier
        wait_until(lambda: bool(copier._waiting), "the copy begins")

    def close(self) -> None:
        self.node.close()
        self.memory.close()


class Toys:
    def __init__(self, place: Node, kind: str) -> None:
        self.place, self._kind = place, kind
        self._undo = ExitStack()
        self._made: list[Toy] = []

    def join(self, name: str, **how: Any) -> Toy:
        toy = self.begin(name, **how)
        assert toy.node.wait_joined(PATIENCE_SECONDS), toy.node.refusal
        return toy

    def begin(self, name: str, **how: Any) -> Toy:
        how.setdefault("wait", 0)
        toy = Toy(self.place, name, how.pop("kind", self._kind), **how)
        self._undo.callback(toy.close)
        self._made.append(toy)
        return toy

    def pair(self, **how: Any) -> tuple[Toy, Toy]:
        toys = self.join("a", **how), self.join("b", **how)
        for toy in toys:
            wait_until(lambda toy=toy: toy.node.stats()["peers"] > 0, "they know each other")
        return toys

    def prefix(self, **how: Any) -> tuple[Toy, Toy, list[bytes], Found]:
        """Two engines, of which the first has a prompt in its blocks 0 to 5; its keys, and what
        the second finds."""
        a, b = self.pair(**how)
        keys = a.prompt()
        a.compute(keys, range(6))
        return a, b, keys, b.node.wait_for(keys, PATIENCE_SECONDS)

    def close(self) -> None:
        for toy in self._made:
            if toy.node._open is not None:
                wait_until(lambda toy=toy: not toy.leases(), "leases are given back")
                assert toy.table.check_integrity() == []
        self._undo.close()


@contextmanager
def served() -> Iterator[Node]:
    with fresh_node() as place:
        place.coordinator()
        yield place


def ended(load: Load) -> Load:
    assert load.wait(PATIENCE_SECONDS) is not kvshm.LoadState.PENDING
    return load


__all__ = ["BLOCK", "BLOCKS", "TOKENS", "Group", "Toy", "Toys", "content", "ended", "served"]
