"""Both halves of an engine in one process: its scheduler's half, and the one rank with its memory.

Whatever fails while they are opened is why the engine shares nothing; it is not the engine's error.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
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

log = logger(__name__)

FindOwn = Callable[[Iterable[bytes], int], list[BlockId]]


class HalvesInOne:
    """A SchedulerHalf and a RankHalf, opened together."""

    def __init__(
        self,
        config: Config,
        spec: EngineSpec,
        transport: Any,
        memory: Any,
        regions: Sequence[Region],
        opened: Callable[[EpochState], None],
    ) -> None:
        """``transport``: its class.  ``opened``: called on the client's thread when an epoch has
        begun on the rank as well.  Raises KvshmError or OSError; nothing is left open then."""
        self._opened = opened
        run_dir = open_run_directory(config.run_dir, os.environ)
        self.rank = open_rank(config, run_dir, 0, transport, memory, regions)
        try:
            self.cache = SchedulerHalf(config, spec, run_dir, opened=self._open_epoch)
        except BaseException:
            self.rank.close()
            raise

    def begin_epoch(self, fields: Mapping[str, str], groups: Groups, own_blocks: FindOwn) -> None:
        """Begin an epoch, or another one, in the background.  ``own_blocks``: as PrefixSearch has
        it.  Raises TransportError."""
        self.cache.planner.search.groups = groups
        self.cache.planner.search.own_blocks = own_blocks
        memory = self.rank.transport.export(Epoch(0))  # serves no peer until the epoch is open
        self.cache.open_epoch([RankInfo(os.getpid(), memory)], lambda: fields)

    def end_epoch(self) -> None:
        """Retract everything for good, without waiting."""
        self.cache.end_epoch()
        self.rank.end_epoch()

    def _open_epoch(self, state: EpochState) -> None:
        """On the client's thread."""
        try:
            self.rank.open_epoch(state.table.epoch)
        except Exception as exc:  # any, of a transport: for example, no descriptors
            foreseen = isinstance(exc, KvshmError | OSError)
            if self.cache.not_opened(state.table.epoch):
                log.line(CoreLine.NOT_OPENED, self.rank.failed, exc_info=None if foreseen else exc)
            return
        self._opened(state)

    def close(self) -> None:
        """Leave the node.  Blocks for some seconds at most."""
        self.cache.close()
        self.rank.close()
