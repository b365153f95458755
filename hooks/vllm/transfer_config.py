"""vLLM's KV transfer configuration: kvshm's connector in it, alone or beside another one."""

from __future__ import annotations

import copy
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

from kvshm._base.extra_config import CHILDREN, MULTI, own_settings, without_own
from kvshm._base.extra_config import CONNECTOR as CONNECTOR
from kvshm._base.log_lines import FilledLine

from ..log_lines import HookLine

if TYPE_CHECKING:
    from vllm.config import KVTransferConfig, VllmConfig

    from kvshm.config import Config

CONNECTOR_MODULE = "kvshm.hooks.connector"
OUR_CONNECTOR: dict[str, Any] = {
    "kv_connector": CONNECTOR,
    "kv_connector_module_path": CONNECTOR_MODULE,
    "kv_role": "kv_both",
    "kv_load_failure_policy": "recompute",
}

COMBINED = frozenset({"role", "get_kv_connector_kv_cache_events"})
"""Methods of connectors that a MultiConnector has no version of its own of, and that are combined
all the same: vLLM asks none but a connector itself for ``role``, and ``pass_events_on`` does what
the MultiConnector does not.  Another one loses something: ``has_connector_metadata`` keeps vLLM's
calls per layer from a connector that has nothing to do in a step."""


def register() -> None:
    """Make the connector known by name (MultiConnector looks its children up by name)."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    try:
        KVConnectorFactory.register_connector(CONNECTOR, CONNECTOR_MODULE, CONNECTOR)
    except ValueError:
        # Registered already: a forked child inherits the registry, plugins run again.
        return


def ensure_recompute(transfer: KVTransferConfig) -> FilledLine | None:
    """Make vLLM recompute failed loads instead of failing their request: a block may vanish between
    match and copy.  Returns what to log if this changed the policy.  Call before vLLM's Scheduler
    reads the policy: in the plugin, and in the connector's constructor for engines without it."""
    policy = transfer.kv_load_failure_policy
    if policy == "recompute":
        return None
    transfer.kv_load_failure_policy = "recompute"
    return HookLine.RECOMPUTE.fill(policy)


def with_connector(transfer: KVTransferConfig | None, config: Config) -> KVTransferConfig:
    """Return a configuration that names no connector with kvshm's; the kv_role stays the user's."""
    from vllm.config import KVTransferConfig

    transfer = transfer or KVTransferConfig()
    # If the engine may import, vLLM holds freed blocks back: an exporter need not pay for it.
    role = transfer.kv_role or ("kv_producer" if config.decide_role().no_imports else "kv_both")
    return replace(transfer, **OUR_CONNECTOR | {"kv_role": role})


def beside(other: KVTransferConfig) -> KVTransferConfig:
    """Return the configuration of a MultiConnector of the user's connector and kvshm's; which of
    them loads, the Combination decides.  All other values are the user's, but failed loads are
    recomputed: with kvshm a block may vanish."""
    extra = other.kv_connector_extra_config
    own = dict(own_settings(other.kv_connector, extra))
    ours = {**OUR_CONNECTOR, "kv_connector_extra_config": own, "kv_role": other.kv_role}
    combined = copy.copy(other)
    combined.kv_connector, combined.kv_connector_module_path = MULTI, None
    combined.kv_load_failure_policy = "recompute"
    combined.kv_connector_extra_config = {**extra, CHILDREN: [*_children(other), ours]}
    return combined


def combination_refusal(vllm_config: VllmConfig, transfer: KVTransferConfig) -> str | None:
    """Return why the user's connectors, which this imports, cannot be combined, or None."""
    from vllm.config import KVTransferConfig
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
    from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector

    from .combination import KV_EVENTS, makes_events

    if transfer.kv_connector == MULTI and transfer.kv_connector_module_path:
        return f"the MultiConnector of {transfer.kv_connector_module_path} is not vLLM's"
    names = [name for name in vars(KVConnectorBase_V1) if not name.startswith("_")]
    unknown = {name for name in names if name not in vars(MultiConnector)} - COMBINED
    if vllm_config.device_config.device_type == "cpu":
        unknown.add("get_mem_pool_context")  # kvshm uses it, and only one connector can
    for child in _children(transfer):
        connector: Any = KVConnectorFactory.get_connector_class(KVTransferConfig(**child))
        own = {n for n in unknown if getattr(connector, n) is not getattr(KVConnectorBase_V1, n)}
        if own:
            return f"{child['kv_connector']} cannot be combined due to its {', '.join(sorted(own))}"
        if makes_events(connector):
            unknown.add(KV_EVENTS)  # a worker reports those of one connector
    return None


def _children(transfer: KVTransferConfig) -> list[dict[str, Any]]:
    """The user's connectors as a MultiConnector lists them.  Its own engine id applies to all."""
    extra = transfer.kv_connector_extra_config
    if transfer.kv_connector == MULTI:
        return list(extra.get(CHILDREN, ()))
    child = {f.name: getattr(transfer, f.name) for f in fields(transfer) if f.name != "engine_id"}
    child["kv_connector_extra_config"] = without_own(extra)
    return [child]
