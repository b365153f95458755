"""What vLLM's block pool already holds, and whether it has room for an import."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

PREFILLING = frozenset({"RUNNING", "WAITING_FOR_REMOTE_KVS"})
"""Names of the states in which vLLM keeps room for the rest of a request's prompt."""
SPARE = 8
"""An 8th of the pool's blocks must stay free during an asynchronous import, for requests that
arrive or decode meanwhile: vLLM schedules no request behind one that waits for blocks."""


class PoolRoom:
    """Reads the pool of one engine; changes nothing.  Scheduler's thread."""

    def __init__(self, manager: Any, requests: Mapping[str, Any], block_size: int) -> None:
        """``manager`` is vLLM's KV cache manager, ``requests`` vLLM's scheduler's, by id."""
        self._manager = manager
        self._requests = requests
        self._block_size = block_size

    def holds(self, block_hash: bytes) -> bool:
        """Whether the engine's own cache has a block of this hash."""
        return bool(self._manager.block_pool.get_cached_block(block_hash, [0]))

    def is_alone(self, request: Any) -> bool:
        """Whether the engine has no other request; a waiting one might join the same step."""
        others = (each for each in self._requests.values() if each is not request)
        return all(each.is_finished() for each in others)

    def free(self) -> int:
        """Return the number of blocks that vLLM can hand out."""
        return int(self._manager.block_pool.get_num_free_blocks())

    def admits(self, num_blocks: int, request: Any) -> bool:
        """Whether vLLM admits an asynchronous load of so many blocks, and will have room for the
        rest of the request's prompt after the load.  vLLM reserves the blocks that prefills under
        way still need, schedules no request behind one that it does not admit, and gives blocks
        to other requests during the load."""
        missing = sum(self._missing(each) for each in self._requests.values())
        left = self.free() - missing
        kept = int(getattr(self._manager, "watermark_blocks", 0))
        spare = len(self._manager.block_pool.blocks) // SPARE
        return num_blocks + kept <= left and self._blocks(request) + spare <= left

    def _missing(self, request: Any) -> int:
        """Blocks that a prefill under way still needs."""
        if request.status.name not in PREFILLING:
            return 0
        held = len(self._manager.get_blocks(request.request_id).blocks[0])
        return max(self._blocks(request) - held, 0)

    def _blocks(self, request: Any) -> int:
        """Blocks that a request's tokens fill, counting a partly filled one."""
        return -(-int(request.num_tokens) // self._block_size)
