"""What an import may expect of vLLM's block pool: blocks it has itself, and room for others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

PREFILLING = frozenset({"RUNNING", "WAITING_FOR_REMOTE_KVS"})
"""Names of the states in which vLLM keeps room for the rest of a request's prompt."""
SPARE = 8
"""One of so many blocks of the pool has to stay free beside an asynchronous import, for who comes
or decodes while it lasts: behind a request that waits for blocks vLLM looks at nobody."""


class PoolRoom:
    """Looks at the pool of one engine; changes nothing.  Scheduler's thread."""

    def __init__(self, manager: Any, requests: Mapping[str, Any], block_size: int) -> None:
        self._manager = manager
        self._requests = requests
        self._block_size = block_size

    def holds(self, block_hash: bytes) -> bool:
        """Whether the engine's own cache has a block of this hash."""
        return bool(self._manager.block_pool.get_cached_block(block_hash, [0]))

    def is_alone(self, request: Any) -> bool:
        """Whether the engine has no other request: one that waits may come into the same step."""
        others = (each for each in self._requests.values() if each is not request)
        return all(each.is_finished() for each in others)

    def free(self) -> int:
        """Blocks that can be handed out."""
        return int(self._manager.block_pool.get_num_free_blocks())

    def lets_in(self, num_blocks: int, request: Any) -> bool:
        """Whether vLLM admits an asynchronous load that occupies so many blocks, and has room
        for the rest of the request's prompt when it has ended.  vLLM does the former only beside
        what prefills under way still need, looks at nobody behind a request that it does not
        admit, and meanwhile gives blocks to others."""
        missing = sum(self._missing(each) for each in self._requests.values())
        left = self.free() - missing
        kept = int(getattr(self._manager, "watermark_blocks", 0))
        spare = len(self._manager.block_pool.blocks) // SPARE
        return num_blocks + kept <= left and self._blocks(request) + spare <= left

    def _missing(self, request: Any) -> int:
        """Blocks that a prefill under way has yet to be given."""
        if request.status.name not in PREFILLING:
            return 0
        held = len(self._manager.get_blocks(request.request_id).blocks[0])
        return max(self._blocks(request) - held, 0)

    def _blocks(self, request: Any) -> int:
        """Blocks that a request's tokens fill, one of them perhaps in part."""
        return -(-int(request.num_tokens) // self._block_size)
