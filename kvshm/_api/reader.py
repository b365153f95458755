"""What is published on this machine, for routers, tools and tests."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import NamedTuple, Self

from kvshm._base.fingerprint import fingerprint
from kvshm._base.ids import BlockHash, BlockId, Epoch
from kvshm._base.rundir import choose_run_directory, list_sockets
from kvshm._node.segment_server import SegmentClient
from kvshm._shm.layout import unpack_records
from kvshm._shm.slot_table import SlotTableView
from kvshm.config import Config
from kvshm.errors import KvshmError, MisuseError

from .arguments import checked_keys
from .engine_layout import EngineLayout, layout_of

READ_SECONDS = 1.0
"""How long an engine that does not answer is waited for."""


class EngineView(NamedTuple):
    """An engine, in its present epoch."""

    name: str
    """As it named itself when it joined."""
    epoch: int
    """Random number of the epoch."""
    pid: int
    """As the engine sees it; 0 is possible in containers."""
    model: str
    """``Identity.model``."""
    fingerprint: str
    """Engines with the same one share; hexadecimal."""
    num_blocks: int
    """Of its KV cache, published or not."""
    block_size: int
    """Tokens for each key."""
    num_ranks: int
    """Worker ranks; 1 for an engine that called ``join``."""
    alive: bool
    """Whether its blocks can be read."""
    keeps: bool = False
    """Whether it computes nothing, and keeps what others have computed."""


class PublishedBlock(NamedTuple):
    """A block that other engines may read."""

    key: BlockHash
    """Of the prefix that ends with this block."""
    group: int
    """Number of the KV cache group."""
    depth: int
    """Index in its prefix, in blocks."""
    block_id: BlockId
    """In its engine's cache."""
    engine: str
    """Name of its engine."""
    epoch: int
    """Of its engine."""


class Reader:
    """Reads what the engines of one namespace publish; changes nothing, needs no coordinator.

    One thread.  Methods block for a second for each engine that does not answer, and leave it out.
    Each call reads the engines' own memory: what it returns was true a moment ago.
    """

    def __init__(self, config: Config | None = None) -> None:
        """``config``: says in which directory and namespace to look; unless given, those of the
        environment.  Raises ConfigError."""
        config = config or Config.from_env(os.environ)
        self._namespace = config.namespace
        self._run_dir = choose_run_directory(config.run_dir, os.environ)
        self._segments = SegmentClient(self._run_dir, config.namespace, READ_SECONDS)
        self._tables: dict[Epoch, SlotTableView] = {}
        self._closed = False

    def engines(self) -> tuple[EngineView, ...]:
        """Return the engines, in the order of their names."""
        return tuple(sorted(_view(table) for table in self._refresh()))

    def holders(
        self, keys: Sequence[bytes], group: int = 0
    ) -> tuple[tuple[PublishedBlock, ...], ...]:
        """Return for each key the blocks that have it, of engines of any fingerprint.  Reads all
        published blocks: some milliseconds for 100,000."""
        keys = checked_keys(keys)
        found: dict[bytes, tuple[PublishedBlock, ...]] = dict.fromkeys(keys, ())
        for block in self.list():
            if block.group == group and block.key in found:
                found[block.key] += (block,)
        return tuple(found[key] for key in keys)

    def list(self, epoch: int | None = None) -> Iterator[PublishedBlock]:
        """Yield the published blocks of all living engines, or of the one in ``epoch``."""
        for table in self._refresh():
            if _is_alive(table) and epoch in (None, table.epoch):
                with suppress(KvshmError):  # what contradicts itself is left out
                    for key, block, _, depth, _, group in unpack_records(table.scan()):
                        yield PublishedBlock(key, group, depth, block, table.engine, table.epoch)

    def layout(self, epoch: int) -> EngineLayout | None:
        """Return how the blocks of the engine in ``epoch`` are made up, for ``join_like``.  None if
        it has ended, does not answer, or is of a version of kvshm that does not say."""
        for table in self._refresh():
            if table.epoch == epoch:
                with suppress(KvshmError, OSError):
                    info = self._segments.info(table.epoch)
                    if fingerprint(info.fields) == table.fingerprint:
                        return layout_of(table, info)
        return None

    def _refresh(self) -> tuple[SlotTableView, ...]:
        """The tables of the present engines.  Raises MisuseError once closed."""
        if self._closed:
            raise MisuseError("the Reader is closed; make another Reader")
        try:
            served = list_sockets(self._run_dir, self._namespace)
        except OSError:  # no engine has ever run here
            served = []
        present = {found.epoch for found in served if found.epoch is not None}
        for epoch in [epoch for epoch in self._tables if epoch not in present]:
            self._tables.pop(epoch).close()
        for epoch in present - self._tables.keys():
            with suppress(KvshmError, OSError):  # it has ended, or hangs
                self._tables[epoch] = self._segments.view(epoch)
        return tuple(self._tables.values())

    def close(self) -> None:
        """Let go of the engines' memory.  Idempotent."""
        self._closed = True
        for table in self._tables.values():
            table.close()
        self._tables.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _view(table: SlotTableView) -> EngineView:
    return EngineView(
        table.engine,
        table.epoch,
        table.pid,
        table.model,
        table.fingerprint.hex(),
        table.num_blocks,
        table.block_size,
        table.num_ranks,
        _is_alive(table),
        table.keeps,
    )


def _is_alive(table: SlotTableView) -> bool:
    """Whether its blocks can be read."""
    return table.alive and not table.died
