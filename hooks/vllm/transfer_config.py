"""vLLM's KV transfer configuration: kvshm's connector in it, alone or beside another one."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from kvshm._base.extra_config import CONNECTOR as CONNECTOR
from kvshm._base.extra_config import own_settings
from kvshm._base.log_lines import FilledLine

from ..log_lines import HookLine

if TYPE_CHECKING:
    from vllm.config import KVTransferConfig

    from kvshm.config import Config

CONNECTOR_MODULE = "kvshm.hooks.connector"
OUR_CONNECTOR: dict[str, Any] = {
    "kv_connector": CONNECTOR,
    "kv_connector_module_path": CONNECTOR_MODULE,
    "kv_role": "kv_both",
    "kv_load_failure_policy": "recompute",
}


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
    """Return a configuration of a MultiConnector: kvshm's connector beside the user's."""
    from .multi_connector import combined_config

    own = own_settings(other.kv_connector, other.kv_connector_extra_config)
    return combined_config(other, OUR_CONNECTOR | {"kv_connector_extra_config": dict(own)})
