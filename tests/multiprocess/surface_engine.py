"""An engine on the public surface, alone in its process, that does what it is told: one line of
JSON for each order and each answer.  It judges every byte that it imports.

Its orders name prompts, and blocks by a number that it takes modulo what there is, so that whoever
gives them needs to know nothing of its cache.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from typing import Any

import kvshm
from kvshm import Identity, Load, LoadState, Region

from .processes import PATIENCE_SECONDS
from .surface_contents import BLOCK, BLOCKS, TOKENS, content, garbage, keys_of


class Engine:
    def __init__(self) -> None:
        self.memory = kvshm.allocate(BLOCK * BLOCKS)
        self.node: kvshm.Node | None = None
        self.published: dict[int, bytes] = {}
        self.loads: list[tuple[Load, list[bytes]]] = []
        self.let_go: threading.Event | None = None

    def join(self, kind: str, name: str) -> dict[str, Any]:
        self.leave()
        self.node = kvshm.join(
            Identity(engine="toy 1", model="m", weights=kind),
            memory=self.memory,
            regions=[Region(0, BLOCK, BLOCK, BLOCKS)],
            block_size=TOKENS,
            name=name,
        )
        return {"refusal": self.node.refusal}

    def leave(self) -> dict[str, Any]:
        found = self.finish()
        if self.node is not None:
            self.node.close()
        self.node = None
        self.published.clear()
        return found

    def _free(self) -> list[int]:
        loading = {block for load, _ in self.loads for block in load.targets}
        return [b for b in range(BLOCKS) if b not in self.published and b not in loading]

    def publish(self, prompt: int, start: int, number: int) -> dict[str, Any]:
        keys, there = keys_of(prompt), set(self.published.values())
        for index in range(start, min(start + number, len(keys))):
            if keys[index] not in there:
                if not (free := self._free()):
                    return {"length": index}
                self._write(free[0], content(keys[index]))
                self.node.publish(keys[: index + 1], free[:1], index)
                self.published[free[0]] = keys[index]
        return {"length": min(start + number, len(keys))}

    def reuse(self, first: int, number: int) -> dict[str, Any]:
        """Retract blocks, and write what no one asked for."""
        blocks = sorted(self.published)
        chosen = {blocks[(first + i) % len(blocks)] for i in range(number)} if blocks else set()
        self.node.retract(chosen)
        for block in chosen:
            del self.published[block]
            self._write(block, garbage(block))
        return {}

    def load(self, prompt: int, held: bool, seen: int = 0) -> dict[str, Any]:
        """Import a prompt; with ``held`` the copies wait for ``finish``.  ``seen``: wait until so
        many of its blocks are found."""
        keys, free = keys_of(prompt), self._free()
        if held and self.let_go is None:
            self.let_go = threading.Event()
            self.node._halves.ranks.halves[0].transport.copier.submit(self.let_go.wait)
        if seen:
            found = self.node.wait_for(keys[:seen], PATIENCE_SECONDS)
            assert found.length == seen, f"{found}, of {seen} blocks"
        found = self.node.lookup(keys[: len(free)])
        if not found:
            return {"found": 0}
        targets = free[: found.num_blocks]
        for block in targets:
            self._write(block, garbage(block))
        self.loads.append((self.node.load(found, targets), keys[: found.length]))
        return {"found": found.length} | ({} if held else self.finish())

    def finish(self) -> dict[str, Any]:
        """Wait for all loads; say how many of their good blocks hold anything else."""
        if self.let_go is not None:
            self.let_go.set()
            self.let_go = None
        wrong = good = 0
        for load, keys in self.loads:
            assert load.wait() is not LoadState.PENDING
            good += load.good
            for block, key in list(zip(load.targets, keys, strict=True))[: load.good]:
                wrong += self._read(block) != content(key)
        self.loads.clear()
        return {"good": good, "wrong": wrong}

    def reset(self) -> dict[str, Any]:
        self.node.reset()
        self.published.clear()
        return {}

    def _write(self, block: int, what: bytes) -> None:
        self.memory.buffer[block * BLOCK : (block + 1) * BLOCK] = what

    def _read(self, block: int) -> bytes:
        return bytes(self.memory.buffer[block * BLOCK : (block + 1) * BLOCK])


ORDERS = {"join", "leave", "publish", "reuse", "load", "finish", "reset"}


def main() -> None:
    engine = Engine()
    print(json.dumps({"pid": os.getpid()}), flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        what = order.pop("do")
        assert what in ORDERS
        print(json.dumps({"did": what, **getattr(engine, what)(**order)}), flush=True)
    engine.leave()


if __name__ == "__main__":
    main()
