"""An engine of toy contents on the public surface: what the calls of earlier systems are tested on.

The bytes of a block are a function of the tokens up to its end and of nothing that kvshm computes,
so every byte of the memory can be judged: of blocks that were loaded and of all others.  Run as a
program it does what its standard input says, a JSON list of a method's name and arguments in each
line, and answers each with a line of JSON.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Sequence
from typing import Any

import kvshm
from kvshm.compat.kv_pipe import KVPipe
from kvshm.compat.lookup_buffer import LookupBuffer
from kvshm.compat.retrieval import Retrieval
from kvshm.config import Config

BLOCK_SIZE = 4
NUM_BLOCKS = 12
BYTES = (512, 256)
UNTOUCHED = 0xEE
ROW_BYTES = 512


def slots_of(blocks: Sequence[int], num_tokens: int) -> list[int]:
    every = [block * BLOCK_SIZE + place for block in blocks for place in range(BLOCK_SIZE)]
    return every[:num_tokens]


class CallsEngine:
    """A Node, the calls on it, and what its blocks must hold."""

    def __init__(self, config: Config, model: str = "toy", capacity: int = 3) -> None:
        self.memory = kvshm.allocate(NUM_BLOCKS * sum(BYTES))
        self.expected: dict[int, bytes] = {}
        self.forget()
        regions, offset = [], 0
        for size in BYTES:
            regions.append(kvshm.Region(offset, size, size, NUM_BLOCKS))
            offset += NUM_BLOCKS * size
        self.regions, self.config, self.capacity = regions, config, capacity
        self.identity = kvshm.Identity(engine="toy", model=model, weights=model, settings={})
        self.node = kvshm.join(
            self.identity,
            memory=self.memory,
            regions=regions,
            block_size=BLOCK_SIZE,
            config=config,
        )
        self.calls = Retrieval(self.node)
        self._buffer: LookupBuffer | None = None
        self._pipe: KVPipe | None = None

    @property
    def buffer(self) -> LookupBuffer:
        """Made when first asked for, as few tests need it."""
        if self._buffer is None:
            self._buffer = LookupBuffer(
                self.node,
                self.identity,
                capacity=self.capacity,
                row_bytes=ROW_BYTES,
                config=self.config,
            )
        return self._buffer

    @staticmethod
    def contents(tokens: Sequence[int], block: int) -> bytes:
        """What block number ``block`` of a prompt holds, in all regions."""
        until = json.dumps(list(tokens[: (block + 1) * BLOCK_SIZE])).encode()
        return hashlib.shake_256(until).digest(sum(BYTES))

    def read(self, block: int) -> bytes:
        parts = ((r.offset + block * r.stride, r.block_bytes) for r in self.regions)
        return b"".join(bytes(self.memory.buffer[at : at + size]) for at, size in parts)

    def compute(self, tokens: Sequence[int], blocks: Sequence[int]) -> None:
        """Write what the blocks of a prompt must hold, the last one perhaps not full."""
        for number, block in enumerate(blocks):
            data = self.expect(tokens, number, block)
            for region in self.regions:
                at = region.offset + block * region.stride
                self.memory.buffer[at : at + region.block_bytes] = data[: region.block_bytes]
                data = data[region.block_bytes :]

    def expect(self, tokens: Sequence[int], number: int, block: int) -> bytes:
        self.expected[block] = self.contents(tokens, number)
        return self.expected[block]

    def wrong_blocks(self) -> list[int]:
        untouched = bytes([UNTOUCHED]) * sum(BYTES)
        blocks = range(NUM_BLOCKS)
        return [b for b in blocks if self.read(b) != self.expected.get(b, untouched)]

    def forget(self) -> None:
        self.expected.clear()
        self.memory.buffer[:] = bytes([UNTOUCHED]) * self.memory.nbytes

    # What the program is told to do.

    def store(self, tokens: list[int], blocks: list[int]) -> int:
        self.node.retract(blocks)
        self.compute(tokens, blocks)
        return self.calls.store(tokens, slot_mapping=slots_of(blocks, len(tokens)))

    def insert(self, tokens: list[int], blocks: list[int], hidden: str | None) -> int:
        self.node.retract(blocks)
        self.compute(tokens, blocks)
        states = None if hidden is None else bytes.fromhex(hidden)
        return self.buffer.insert(tokens, None, slots_of(blocks, len(tokens)), states)

    def retract(self, blocks: list[int]) -> None:
        self.node.retract(blocks)

    def found(self, tokens: list[int]) -> int:
        return self.node.wait_for(self.node.keys(tokens), 60.0).length * BLOCK_SIZE

    def kept(self, blocks: list[int]) -> list[int]:
        return [*self.node.kept(blocks)]

    def clear(self) -> None:
        self.calls.clear()

    def open_pipe(self, name: str, end: int, slots: int, message_bytes: int) -> None:
        self._pipe = KVPipe(name, end, slots=slots, message_bytes=message_bytes, config=self.config)

    def send(self, hexes: list[str | None]) -> None:
        assert self._pipe is not None
        for text in hexes:
            self._pipe.send_tensor(None if text is None else bytes.fromhex(text))

    def receive(self, count: int) -> list[str | None]:
        assert self._pipe is not None
        got = [self._pipe.recv_tensor() for _ in range(count)]
        return [None if one is None else one.hex() for one in got]

    def close(self) -> None:
        if self._pipe:
            self._pipe.close(0.0)
        if self._buffer:
            self._buffer.close()
        self.node.close()
        self.memory.close()


def main() -> None:
    engine = CallsEngine(Config.from_env(os.environ), *sys.argv[1:])
    try:
        assert engine.node.wait_joined(60.0)
        print(json.dumps("joined"), flush=True)
        for line in sys.stdin:
            name, *arguments = json.loads(line)
            answer: Any = getattr(engine, name)(*arguments)
            print(json.dumps(answer), flush=True)
    finally:
        engine.close()


if __name__ == "__main__":
    main()
