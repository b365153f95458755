"""KV events as vLLM's engines publish them, and what a router makes of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from kvshm.tools.events.wire import Batch, Event, decode_batch, encode

SIZE = 2
"""Tokens for each block."""


def tokens(block: int | bytes) -> list[int]:
    number = block[-1] if isinstance(block, bytes) else block
    return [10 * number + i for i in range(SIZE)]


def stored(*blocks: int | bytes, parent: int | None = None, **more: Any) -> Event:
    """Blocks that follow each other."""
    return {
        "type": "BlockStored",
        "block_hashes": list(blocks),
        "parent_block_hash": parent,
        "token_ids": [token for block in blocks for token in tokens(block)],
        "block_size": SIZE,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
        "extra_keys": [[f"salt {block!r}"] for block in blocks],
        "group_idx": 0,
    } | more


def removed(*blocks: int | bytes, **more: Any) -> Event:
    place = {"medium": "GPU", "group_idx": 0}
    return {"type": "BlockRemoved", "block_hashes": list(blocks)} | place | more


CLEARED: Event = {"type": "AllBlocksCleared"}


def batch(*events: Event, rank: int = 0) -> Batch:
    return Batch(1.5, list(events), rank)


def payload(*events: Event, rank: int | None = 0, rest: Sequence[Any] = ()) -> bytes:
    return encode([1.5, list(events), rank, *rest])


Block = tuple[int, str | None, int, int | bytes]
"""Rank, medium, group and hash."""


class Subscriber:
    """Believes what it is told, and fails on what no engine says: a block that is stored twice,
    one that is removed although it is not there, tokens or parents that are not a block's own."""

    def __init__(self) -> None:
        self.blocks: dict[Block, tuple[Any, list[int]]] = {}
        """With parent and tokens of each."""

    def hear(self, events: Iterable[Event], rank: int = 0) -> None:
        for event in events:
            if event["type"] == "AllBlocksCleared":
                self.blocks = {b: about for b, about in self.blocks.items() if b[0] != rank}
                continue
            place = rank, event["medium"], event.get("group_idx") or 0
            names = [(*place, block) for block in event["block_hashes"]]
            assert names
            if event["type"] == "BlockRemoved":
                for name in names:
                    del self.blocks[name]
            else:
                self._store(event, names)

    def take(self, text: bytes) -> Batch:
        got = decode_batch(text)
        self.hear(got.events, got.rank)
        return got

    def _store(self, event: Event, names: list[Block]) -> None:
        size, parent = event["block_size"], event["parent_block_hash"]
        assert len(event["token_ids"]) == size * len(names)
        for i, name in enumerate(names):
            assert name not in self.blocks
            self.blocks[name] = parent, event["token_ids"][i * size : (i + 1) * size]
            parent = name[3]
        for key, name in zip(event.get("extra_keys") or (), names, strict=False):
            assert key in (None, [f"salt {name[3]!r}"])

    @property
    def hashes(self) -> set[int | bytes]:
        return {name[3] for name in self.blocks}
