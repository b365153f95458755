"""What an import may expect of vLLM's block pool: blocks it has itself, and room for others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

PREFILLING = frozenset({"RUNNING", "WAITING_FOR_REMOTE_KVS"})
"""Names of the states in which vLLM keeps room for the rest of a request's prompt."""


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

    def lets_in(self, num_blocks: int) -> bool:
        """Whether vLLM admits an asynchronous load that occupies so many blocks.  It does so
        only beside what prefills under way still need, and looks at nobody behind a request
        that it does not admit."""
        kept = int(getattr(self._manager, "watermark_blocks", 0))
        missing = sum(self._missing(request) for request in self._requests.values())
        return num_blocks + kept + missing <= self.free()

    def _missing(self, request: Any) -> int:
        """Blocks that a prefill under way has yet to be given."""
        if request.status.name not in PREFILLING:
            return 0
        held = len(self._manager.get_blocks(request.request_id).blocks[0])
        return max(-(-int(request.num_tokens) // self._block_size) - held, 0)
