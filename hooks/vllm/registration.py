"""The name and policy of the connector in vLLM; the plugin and the connector itself use them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvshm._base.extra_config import CONNECTOR as CONNECTOR
from kvshm._base.log_lines import FilledLine

from ..log_lines import HookLine

if TYPE_CHECKING:
    from vllm.config import KVTransferConfig

CONNECTOR_MODULE = "kvshm.hooks.connector"


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
