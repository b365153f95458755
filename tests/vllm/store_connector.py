"""A connector of a store that keeps nothing, for tests: it offers what the test says, and remembers
a request's blocks from the first time that it hears of them, as LMCache's does."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    SupportsHMA,
)


class StoreConnector(KVConnectorBase_V1, SupportsHMA):
    """The scheduler's half only."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self.has: list[tuple[int | None, bool]] = []
        """What it answers, the last one again and again."""
        self.asked = 0
        self.told: dict[str, list[int]] = defaultdict(list)
        """With how many tokens it was told of blocks, by request."""
        self.blocks: dict[str, list[list[int]]] = {}
        """The blocks of each request that has not ended, in all groups."""
        self.saves = False
        """Whether vLLM is to keep the blocks of a request that has ended."""
        self.locked: set[str] = set()
        """Requests for which it has offered something, until it is told what becomes of it."""

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        self.asked += 1
        found = (self.has.pop(0) if len(self.has) > 1 else self.has[0]) if self.has else (0, False)
        if found[0]:
            self.locked.add(request.request_id)
        return found

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self.told[request.request_id].append(num_external_tokens)
        self.locked.discard(request.request_id)
        tables = blocks.get_block_ids()
        known = self.blocks.setdefault(request.request_id, [[] for _ in tables])
        for remembered, table in zip(known, tables, strict=True):
            remembered += table[len(remembered) :]

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        return KVConnectorMetadata()

    def request_finished(self, request: Any, block_ids: Any) -> tuple[bool, None]:
        self.blocks.pop(request.request_id, None)
        self.locked.discard(request.request_id)
        return self.saves, None

    request_finished_all_groups = request_finished

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        pass

    def wait_for_layer_load(self, layer_name: str) -> None:
        pass

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn: Any, **kwargs: Any) -> None:
        pass

    def wait_for_save(self) -> None:
        pass
