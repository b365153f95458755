"""What an engine's role follows from: the kv_role of transfer configurations, and its scheduler."""

from __future__ import annotations

import logging
from collections.abc import Iterator

from vllm import envs
from vllm.config import KVTransferConfig

from kvshm._base.log import logger
from kvshm._base.roles import Decision, Limit

from ..log_lines import HookLine
from .call_stack import callers_with
from .vllm_scheduler import VllmScheduler

log = logger(__name__)

CLIENTS_IDS = "VLLM_DISABLE_REQUEST_ID_RANDOMIZATION=1"


def kv_role_limit(transfer: KVTransferConfig, of: str = "") -> Limit:
    """Return the limit that a kv_role sets; ``of`` names its connector."""
    return Limit(
        f"kv_role={transfer.kv_role}{of}",
        no_exports=not transfer.is_kv_producer,
        no_imports=not transfer.is_kv_consumer,
    )


def log_role(role: Decision, by_settings: bool) -> None:
    """Log the role and its cause: a warning unless kvshm's own settings are the cause."""
    level = logging.INFO if by_settings else logging.WARNING
    if role.no_imports:
        log.line(HookLine.EXPORTING_ONLY, role.no_imports, level=level)
    elif role.no_exports:
        log.line(HookLine.IMPORTING_ONLY, role.no_exports, level=level)
    else:
        log.line(HookLine.EXPORTING_AND_IMPORTING)


def engine_transfer(own: KVTransferConfig) -> KVTransferConfig:
    """Return the engine's transfer configuration: that of the outermost connector among the
    callers, because in a MultiConnector vLLM gives kvshm's only its ``own``."""
    callers = callers_with("_kv_transfer_config")
    return callers[-1]._kv_transfer_config if callers else own


def scheduler_limits(found: VllmScheduler | None, engine: KVTransferConfig) -> Iterator[Limit]:
    """Yield the limits that the engine's kv_role and vLLM's scheduler set."""
    yield kv_role_limit(engine, " of the engine")
    # vLLM ends at a client's retry of a request whose load is still under way.
    named_by_clients = bool(envs.VLLM_DISABLE_REQUEST_ID_RANDOMIZATION)
    yield Limit(CLIENTS_IDS, no_exports=False, no_imports=named_by_clients)
    if found is None:
        yield Limit("vLLM's scheduler was not found", no_exports=False, no_imports=True)
        return
    config = found.scheduler.vllm_config
    late = not found.scheduler.defer_block_free and config.max_concurrent_batches > 1
    yield Limit("this vLLM frees blocks while they are written", no_exports=False, no_imports=late)
