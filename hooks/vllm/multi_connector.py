"""Puts kvshm and a connector of the user's into one MultiConnector (KVSHM_BESIDE=1).

The user's connector comes first: kvshm loads only what that connector does not have.
"""

from __future__ import annotations

import copy
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from kvshm._base.extra_config import CHILDREN, MULTI, without_own

if TYPE_CHECKING:
    from vllm.config import KVTransferConfig, VllmConfig


def combination_refusal(vllm_config: VllmConfig, transfer: KVTransferConfig) -> str | None:
    """Return why the user's connectors, which this imports, cannot be combined, or None."""
    from vllm.config import KVTransferConfig
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
    from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector

    names = [name for name in vars(KVConnectorBase_V1) if not name.startswith("_")]
    unknown = {name for name in names if name not in vars(MultiConnector)}
    if vllm_config.device_config.device_type == "cpu":
        unknown.add("get_mem_pool_context")  # kvshm uses it, and only one connector can
    for child in _children(transfer):
        connector: Any = KVConnectorFactory.get_connector_class(KVTransferConfig(**child))
        own = {n for n in unknown if getattr(connector, n) is not getattr(KVConnectorBase_V1, n)}
        if own:
            return f"{child['kv_connector']} cannot be combined due to its {', '.join(sorted(own))}"
    return None


def combined_config(transfer: KVTransferConfig, ours: dict[str, Any]) -> KVTransferConfig:
    """Return a MultiConnector's configuration with both.  All other values are the user's, but
    failed loads are recomputed: with kvshm a block may vanish."""
    combined = copy.copy(transfer)
    combined.kv_connector, combined.kv_connector_module_path = MULTI, None
    combined.kv_load_failure_policy = "recompute"
    children = [*_children(transfer), {**ours, "kv_role": transfer.kv_role}]
    combined.kv_connector_extra_config = {**transfer.kv_connector_extra_config, CHILDREN: children}
    return combined


def _children(transfer: KVTransferConfig) -> list[dict[str, Any]]:
    """The user's connectors as a MultiConnector lists them.  Its own engine id applies to all."""
    extra = transfer.kv_connector_extra_config
    if transfer.kv_connector == MULTI:
        return list(extra.get(CHILDREN, ()))
    child = {f.name: getattr(transfer, f.name) for f in fields(transfer) if f.name != "engine_id"}
    child["kv_connector_extra_config"] = without_own(extra)
    return [child]
