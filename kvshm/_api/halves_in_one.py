"""Both halves of an engine in one process: its scheduler's half, and its ranks with their memory.

Whatever fails while they are opened is why the engine shares nothing; it is not the engine's error.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from kvshm._base.core_lines import CoreLine
from kvshm._base.ids import BlockId, Epoch
from kvshm._base.log import logger
from kvshm._base.rundir import open_run_directory
from kvshm._engine.epoch_state import EngineSpec, EpochState
from kvshm._engine.groups import Groups
from kvshm._engine.scheduler_half import SchedulerHalf
from kvshm._node.protocol import RankInfo
from kvshm._rank.opening import open_rank
from kvshm.config import Config
from kvshm.errors import KvshmError
from kvshm.interfaces import Region

from .ranks import Ranks

log = logger(__name__)

FindOwn = Callable[[Iterable[bytes], int], list[BlockId]]


class HalvesInOne:
    """A SchedulerHalf and the RankHalf of each rank, opened together."""

    def __init__(
        self,
        config: Config,
        spec: EngineSpec,
        transport: Any,
        caches: Sequence[tuple[Any, Sequence[Region]]],
        opened: Callable[[EpochState], None],
    ) -> None:
        """``transport``: its class.  ``caches``: of each rank its memory and the regions in it.
        ``opened``: called on the client's thread when an epoch has begun on the ranks as well.
        Raises KvshmError or OSError; nothing is left open then."""
        self._opened = opened
        run_dir = open_run_directory(config.run_dir, os.environ)
        with ExitStack() as undo:
            halves = []
            for rank, (memory, regions) in enumerate(caches):
                halves.append(open_rank(config, run_dir, rank, transport, memory, regions))
                undo.callback(halves[-1].close)
            self.ranks = Ranks(halves)
            self.cache = SchedulerHalf(config, spec, run_dir, opened=self._open_epoch)
            undo.pop_all()

    def begin_epoch(self, fields: Mapping[str, str], groups: Groups, own_blocks: FindOwn) -> None:
        """Begin an epoch, or another one, in the background.  ``own_blocks``: as PrefixSearch has
        it.  Raises TransportError."""
        self.cache.planner.search.groups = groups
        self.cache.planner.search.own_blocks = own_blocks
        # Serves no peer until the epoch is open.
        memories = [half.transport.export(Epoch(0)) for half in self.ranks.halves]
        ranks = [RankInfo(os.getpid(), memory) for memory in memories]
        self.cache.open_epoch(ranks, lambda: fields)

    def end_epoch(self) -> None:
        """Retract everything for good, without waiting."""
        self.cache.end_epoch()
        self.ranks.end_epoch()

    def _open_epoch(self, state: EpochState) -> None:
        """On the client's thread."""
        try:
            self.ranks.open_epoch(state.table.epoch)
        except Exception as exc:  # any, of a transport: for example, no descriptors
            foreseen = isinstance(exc, KvshmError | OSError)
            if self.cache.not_opened(state.table.epoch):
                log.line(CoreLine.NOT_OPENED, self.ranks.failed, exc_info=None if foreseen else exc)
            return
        self._opened(state)

    def close(self) -> None:
        """Leave the node.  Blocks for some seconds at most."""
        self.cache.close()
        self.ranks.close()
