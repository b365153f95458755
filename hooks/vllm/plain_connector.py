"""A connector that shares nothing, in a vLLM in which kvshm's cannot be made: an engine whose user
names kvshm in ``--kv-transfer-config`` serves as plain vLLM then."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1 import base

from kvshm._base.core_lines import CoreLine
from kvshm._base.log import logger
from kvshm.errors import ConfigError

log = logger(__name__)


def connector_class() -> type[Any]:
    """Return kvshm's connector, or one that does nothing if this vLLM does not fit.  Raises
    ConfigError for a bad setting, and what ``plain_connector`` raises."""
    try:
        from .connector import KvshmConnector
    except ConfigError:
        raise  # stops the start
    except Exception as exc:  # any: vLLM has something else than kvshm knows, and the engine serves
        return plain_connector(exc)
    if unknown := ", ".join(sorted(KvshmConnector.__abstractmethods__)):
        return plain_connector(TypeError(f"connectors must have {unknown}"))
    return KvshmConnector


def plain_connector(error: Exception) -> type[Any]:
    """Return a class of connectors that do nothing, and log why once per engine.  Raises
    AttributeError if this vLLM has no base class for connectors."""

    def initialize(self: Any, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        base.KVConnectorBase_V1.__init__(self, vllm_config, role, kv_cache_config)
        if role.name == "SCHEDULER":  # one of the engine's processes
            _decline(error, vllm_config)

    parents = [base.KVConnectorBase_V1]
    if (hybrid := getattr(base, "SupportsHMA", None)) is not None:
        parents.append(hybrid)
    abstract = {name for parent in parents for name in parent.__abstractmethods__}
    answers: dict[str, Any] = {
        "get_num_new_matched_tokens": (0, False),
        "build_connector_meta": base.KVConnectorMetadata(),
        "request_finished_all_groups": (False, None),
    }
    methods = {name: _always(answers.get(name)) for name in abstract}
    return type("KvshmConnector", tuple(parents), {**methods, "__init__": initialize})


def _always(answer: object) -> Callable[..., object]:
    return lambda *_, **__: answer


def _decline(error: Exception, vllm_config: Any) -> None:
    """Report the refusal as usual; if that cannot be imported either, log only the reason."""
    reason = f"this vLLM is not as kvshm knows it: {error}"
    try:
        from .admission import admit
        from .declining import decline_engine
        from .plugin import touchpoint_refusal
        from .settings import settings_of_connector

        config = settings_of_connector(vllm_config.kv_transfer_config)
        reason = admit(config.untested).refusal or touchpoint_refusal() or reason
        decline_engine(reason, config, vllm_config, is_scheduler=True)
    except Exception:  # any: whatever this vLLM has changed, the engine serves
        log.line(CoreLine.NOT_SHARING, reason)
