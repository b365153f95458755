"""A connector that does nothing: what vLLM itself pays for having any."""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
)


class IdleConnector(KVConnectorBase_V1):  # type: ignore[misc]  # mypy does not follow vLLM
    """Matches nothing, loads nothing, saves nothing."""

    def get_num_new_matched_tokens(self, *_: Any) -> tuple[int, bool]:
        """No token."""
        return 0, False

    def update_state_after_alloc(self, *_: Any) -> None:
        """Nothing to remember."""

    def build_connector_meta(self, *_: Any) -> KVConnectorMetadata:
        """Nothing to tell the workers."""
        return KVConnectorMetadata()

    def start_load_kv(self, *_: Any, **__: Any) -> None:
        """Nothing to load."""

    def wait_for_layer_load(self, *_: Any) -> None:
        """Nothing was begun."""

    def save_kv_layer(self, *_: Any, **__: Any) -> None:
        """Nothing to save."""

    def wait_for_save(self) -> None:
        """Nothing was begun."""
