"""Limits that vLLM's configuration, or a change in vLLM, sets to an engine's role."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import TYPE_CHECKING

from kvshm.config import Config
from kvshm.log import logger
from kvshm.roles import Decision, Limit

from .vllm_scheduler import VllmScheduler

if TYPE_CHECKING:
    from vllm.config import KVTransferConfig

log = logger(__name__)


def kv_role_limit(transfer: KVTransferConfig, of: str = "") -> Limit:
    """Return the limit that a connector's kv_role sets; ``of`` names the connector."""
    return Limit(
        f"kv_role={transfer.kv_role}{of}",
        no_exports=not transfer.is_kv_producer,
        no_imports=not transfer.is_kv_consumer,
    )


def scheduler_limits(scheduler: VllmScheduler | None) -> Iterator[Limit]:
    """Yield the limits that vLLM's scheduler sets: without the scheduler a failed load would be an
    error, and a step under way may write to a block while an import fills it."""
    if scheduler is None:
        yield Limit("vLLM's scheduler was not found", no_exports=False, no_imports=True)
        return
    yield kv_role_limit(scheduler.transfer, " of the engine")
    late = not scheduler.holds_back_freed_blocks()
    yield Limit("this vLLM frees blocks while they are written", no_exports=False, no_imports=late)


def log_role(role: Decision, config: Config) -> None:
    """Log the engine's role and its cause: a warning unless kvshm's own settings are the cause."""
    level = logging.INFO if role == config.decide_role() else logging.WARNING
    if role.no_imports:
        log.log(level, "exporting only: %s", role.no_imports)
    elif role.no_exports:
        log.log(level, "importing only: %s", role.no_exports)
    else:
        log.info("exporting and importing")
