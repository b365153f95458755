"""vLLM's real publisher of KV events in a process of its own, without an engine."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any

from vllm.distributed.kv_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KVEventBatch,
    ZmqEventPublisher,
)

SIZE = 16
"""Tokens for each block."""
_PROCESSES = multiprocessing.get_context("forkserver")
_PROCESSES.set_forkserver_preload([__name__])  # imports vLLM once for all


def stored(*hashes: int, parent: int | None = None, **more: Any) -> BlockStored:
    """As vLLM's pool stores blocks that follow each other."""
    given: dict[str, Any] = {
        "block_hashes": list(hashes),
        "parent_block_hash": parent,
        "token_ids": [block for block in hashes for _ in range(SIZE)],
        "block_size": SIZE,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
        "extra_keys": [(f"salt {block}",) for block in hashes],
        "group_idx": 0,
    }
    return BlockStored(**given | more)


def removed(*hashes: int) -> BlockRemoved:
    return BlockRemoved(block_hashes=list(hashes), medium="GPU", group_idx=0)


def cleared() -> AllBlocksCleared:
    return AllBlocksCleared()


class Publisher:
    """Each call has been done when it returns."""

    def __init__(self, rank: int, config: dict[str, Any]) -> None:
        self._pipe, theirs = _PROCESSES.Pipe()
        self.process = _PROCESSES.Process(target=_serve, args=(theirs, rank, config), daemon=True)
        self.process.start()
        theirs.close()
        self.config: dict[str, Any] = self._pipe.recv()
        """As its engine's GET /kv_event_sources says it."""

    @property
    def source(self) -> str:
        return f"{self.config['endpoint']},{self.config['replay_endpoint']}"

    def publish(self, *events: Any) -> None:
        self._ask("publish", events)

    def lose(self, *events: Any) -> None:
        """Publish what ZeroMQ drops, as it does where a subscriber is too slow."""
        self._ask("lose", events)

    def _ask(self, what: str, events: Sequence[Any]) -> None:
        self._pipe.send((what, events))
        assert self._pipe.recv()

    def kill(self) -> None:
        self.process.kill()
        self.process.join()


@contextmanager
def publishers() -> Iterator[Any]:
    """Yield what starts publishers; they are killed at the end."""
    started: list[Publisher] = []

    def start(rank: int = 0, **config: Any) -> Publisher:
        started.append(Publisher(rank, config))
        return started[-1]

    try:
        yield start
    finally:
        for one in started:
            one.kill()


def _serve(pipe: Connection, rank: int, config: dict[str, Any]) -> None:
    publisher = ZmqEventPublisher(rank, **config)
    pipe.send(asdict(publisher.get_publisher_config()))
    socket, dropped = publisher._pub, SimpleNamespace(send_multipart=lambda frames: None)
    while True:
        what, events = pipe.recv()
        publisher._pub = socket if what == "publish" else dropped
        publisher.publish(KVEventBatch(ts=1.0, events=list(events)))
        publisher._event_queue.join()
        pipe.send(True)
