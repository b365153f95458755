"""How an engine of vLLM says that it shares nothing: once, in its log and for tools."""

from __future__ import annotations

import os
from typing import Any

from kvshm._ground.log import logger
from kvshm.config import Config

from ..boundary import decline, record

log = logger(__name__)


def decline_engine(reason: str, config: Config, vllm_config: Any, *, is_scheduler: bool) -> None:
    """Say it in the scheduler's process.  Workers find the same reasons, and say them at debug."""
    if is_scheduler:
        decline(reason, _name(), config, _model(vllm_config))
    else:
        log.debug("not sharing the prefix cache: %s", reason)


def record_engine(reason: str, config: Config, vllm_config: Any) -> None:
    """Leave it for tools, in the process that makes an engine's configuration."""
    record(reason, _name(), config, _model(vllm_config))


def _name() -> str:
    return f"vllm-{os.getpid()}"


def _model(vllm_config: Any) -> str:
    model = getattr(vllm_config, "model_config", None)
    return "" if model is None else str(model.model)
