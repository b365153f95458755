"""Opens a rank: its transport, over the memory of its KV cache, and its half of the engine."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvshm._base.core_lines import CoreLine
from kvshm._base.ids import Rank
from kvshm._base.log import logger
from kvshm._base.rundir import rank_socket
from kvshm._node.segment_server import SegmentClient
from kvshm.config import Config
from kvshm.interfaces import Region, TransportClass

from .rank_half import RankHalf

log = logger(__name__)


def open_rank(
    config: Config,
    run_dir: Path,
    rank: Rank | int,
    transport: TransportClass,
    memory: Any,
    regions: Sequence[Region],
) -> RankHalf:
    """Return the half of rank ``rank``, whose KV blocks lie in ``regions`` of ``memory``, as the
    class ``transport`` takes it.  Raises TransportError, leaving nothing open."""
    if config.fault is not None:
        log.line(CoreLine.FAULT_SET, config.fault)
    socket = rank_socket(run_dir, config.namespace, secrets.token_hex(4), rank)
    wanted: tuple[str, ...] = getattr(transport, "settings", ())  # SupportsSettings
    opened = transport(
        memory=memory,
        regions=list(regions),
        rank=rank,
        socket_path=socket,
        fault=config.fault,
        **{name: getattr(config, name) for name in wanted},
    )
    try:
        segments = SegmentClient(run_dir, config.namespace)
        return RankHalf(opened, Rank(rank), segments, verify=config.verify)
    except BaseException:
        opened.close()
        raise
