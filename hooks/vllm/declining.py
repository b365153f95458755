"""How an engine of vLLM reports that it shares nothing: once, in its log and for tools."""

from __future__ import annotations

import math
import os
from typing import Any

from kvshm._base.log import LogLimit, logger
from kvshm.config import Config
from kvshm.errors import KvshmError

from ..boundary import decline, record
from ..log_lines import HookLine

log = logger(__name__)

_log_limit = LogLimit(math.inf)


def decline_engine(reason: str, config: Config, vllm_config: Any, *, is_scheduler: bool) -> None:
    """Report it in the scheduler's process; workers find the same reasons, and log at debug."""
    if is_scheduler:
        decline(reason, _name(), config, _model(vllm_config))
    else:
        log.line(HookLine.WORKER_NOT_SHARING, reason)


def record_engine(reason: str, config: Config, vllm_config: Any) -> None:
    """Report it to tools only, in the process that makes an engine's configuration."""
    record(reason, _name(), config, _model(vllm_config))


def why_not_started(exc: Exception, *, strict: bool) -> str:
    """Return the reason for ``decline_engine`` if a half of kvshm has failed to start.  ``strict``
    raises again what does not explain itself."""
    if isinstance(exc, KvshmError | OSError | RuntimeError):  # for example no descriptors, threads
        return str(exc)
    if strict:
        raise exc
    return unexpected(exc)


def unexpected(exc: Exception) -> str:
    """Return the reason for an error in what vLLM has, and log its traceback, once."""
    reason = f"this vLLM is not as kvshm knows it: {type(exc).__name__}: {exc}"
    if _log_limit.allows(HookLine.VLLM_CHANGED, reason):
        log.line(HookLine.VLLM_CHANGED, exc_info=exc)
    return reason


def _name() -> str:
    return f"vllm-{os.getpid()}"


def _model(vllm_config: Any) -> str:
    model = getattr(vllm_config, "model_config", None)
    return "" if model is None else str(model.model)
