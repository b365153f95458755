"""Both halves of an engine in one process: its scheduler's half, and the one rank with its memory.

Whatever fails while they are opened is why the engine shares nothing; it is not the engine's error.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from kvshm._engine.cache import SharedCache
from kvshm._engine.epoch_state import EngineSpec, EpochState
from kvshm._engine.groups import Groups
from kvshm._ground.ids import Epoch, Rank
from kvshm._ground.log import logger
from kvshm._ground.rundir import open_run_directory, rank_socket
from kvshm._node.handout import Handouts
from kvshm._node.protocol import RankInfo
from kvshm._rank.rank_cache import RankCache
from kvshm.config import Config
from kvshm.errors import KvshmError
from kvshm.interfaces import Region, load_transport

log = logger(__name__)


class HalvesInOne:
    """A SharedCache and a RankCache, opened together."""

    def __init__(
        self,
        config: Config,
        spec: EngineSpec,
        transport: str,
        memory: Any,
        regions: Sequence[Region],
        opened: Callable[[EpochState], None],
    ) -> None:
        """``opened``: called on the client's thread when an epoch has begun on the rank as well.
        Raises KvshmError or OSError; nothing is left open then."""
        self._opened = opened
        run_dir = open_run_directory(config.run_dir, os.environ)
        with ExitStack() as undo:
            self.rank = self._open_rank(config, run_dir, transport, memory, regions, undo)
            self.cache = SharedCache(config, spec, run_dir, opened=self._open_epoch)
            undo.pop_all()

    def _open_rank(
        self,
        config: Config,
        run_dir: Path,
        name: str,
        memory: Any,
        regions: Sequence[Region],
        undo: ExitStack,
    ) -> RankCache:
        kind = load_transport(name)
        self._transport = kind(
            memory=memory,
            regions=list(regions),
            rank=0,
            socket_path=rank_socket(run_dir, config.namespace, secrets.token_hex(4), 0),
            fault=config.fault,
            **{setting: getattr(config, setting) for setting in getattr(kind, "settings", ())},
        )
        undo.callback(self._transport.close)
        handouts = Handouts(run_dir, config.namespace)
        rank = RankCache(self._transport, Rank(0), handouts, verify=config.verify)
        undo.callback(rank.close)
        return rank

    def begin_epoch(self, fields: Mapping[str, str], groups: Groups) -> None:
        """Begin an epoch, or another one, in the background.  Raises TransportError."""
        self.cache.planner.search.groups = groups
        memory = self._transport.export(Epoch(0))  # serves no peer until the epoch is open
        self.cache.open_epoch([RankInfo(os.getpid(), memory)], lambda: fields)

    def end_epoch(self) -> None:
        """Retract everything for good, without waiting."""
        self.cache.end_epoch()
        self.rank.end_epoch()

    def _open_epoch(self, state: EpochState) -> None:
        """On the client's thread."""
        try:
            self.rank.open_epoch(state.table.epoch)
        except (KvshmError, OSError) as exc:
            if self.cache.not_opened(state.table.epoch):
                log.warning("%s (serving on and trying another epoch)", exc)
            return
        self._opened(state)

    def close(self) -> None:
        """Leave the node.  Blocks for some seconds at most."""
        self.cache.close()
        self.rank.close()
