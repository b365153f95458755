"""What vLLM's block pool already holds, and whether it has room for an import."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice, takewhile
from operator import not_
from typing import Any

from kvshm._base.ids import BlockId
from kvshm.halves import Groups

PREFILLING = frozenset({"RUNNING", "WAITING_FOR_REMOTE_KVS"})
"""Names of the states in which vLLM keeps room for the rest of a request's prompt."""
WAITING = frozenset({"WAITING", "PREEMPTED"})
"""Names of the states in which vLLM may begin to compute a request."""
LOOK_BACK = 16
"""How many requests are looked at to find out whether others leave nothing of a step."""
NO_ROOM_SECONDS = 1.0
"""How long a request for whose import there was no room is not looked up again, unless more blocks
are free."""
SPARE = 8
"""An 8th of the pool's blocks must stay free during an asynchronous import, for other requests."""


class PoolRoom:
    """Reads the pool of one engine.  Scheduler's thread."""

    def __init__(
        self, manager: Any, requests: dict[str, Any], groups: Groups, step_tokens: int
    ) -> None:
        """``manager`` is vLLM's KV cache manager with these ``groups``, ``requests`` vLLM's
        scheduler's, by id, in the order in which they came.  ``step_tokens``: most of a step."""
        self._manager = manager
        self._allocate: Any = None
        """vLLM's method that is wrapped now, or None."""
        self._found_none: dict[str, int] = {}
        self._requests = requests
        self._groups = groups
        self._step_tokens = step_tokens
        self._managers = manager.coordinator.single_type_managers
        self._cached = manager.block_pool.cached_block_hash_to_block

    def watch(self) -> None:
        """Note, until ``unwatch``, for which requests vLLM finds no room.  Only steps with a match
        pay for the wrapper: vLLM allocates for each running request, too."""
        if self._allocate is not None:
            return
        self._allocate = allocate = self._manager.allocate_slots

        def allocate_slots(request: Any, *args: Any, **kwargs: Any) -> Any:
            if (blocks := allocate(request, *args, **kwargs)) is None:
                self._found_none[request.request_id] = self.free()
            return blocks

        self._manager.allocate_slots = allocate_slots

    def unwatch(self) -> dict[str, int]:
        """Return these requests, each with the number of free blocks it has found."""
        if self._allocate is None:
            return {}
        self._manager.allocate_slots, self._allocate = self._allocate, None
        found, self._found_none = self._found_none, {}
        return found

    def holds(self, block_hash: bytes) -> bool:
        """Whether the engine's own cache has a block of this hash, in group 0."""
        return bool(self._manager.block_pool.get_cached_block(block_hash, [0]))

    def own_blocks(self, hashes: Iterable[bytes], group: int) -> list[BlockId]:
        """Return the blocks of these hashes in the own cache, up to the first that is missing."""
        find, suffix = self._cached.get_one_block, group.to_bytes(4)
        found = []
        for block_hash in hashes:
            if not (block := find(block_hash + suffix)):
                break
            found.append(block.block_id)
        return found

    def last_own(self, hashes: Sequence[bytes], group: int) -> int:
        """Return how many of these hashes there are up to the last one that the own cache has."""
        suffix = group.to_bytes(4)
        keys = [block_hash + suffix for block_hash in reversed(hashes)]
        return len(keys) - len(list(takewhile(not_, map(self._cached.get_one_block, keys))))

    def keep(self, blocks: Sequence[BlockId]) -> None:
        """Make free blocks those that vLLM hands out last, as if a request had just used them."""
        pool = self._manager.block_pool
        used = [pool.blocks[block] for block in blocks]
        pool.touch(used)
        pool.free_blocks(used)

    def is_alone(self, request: Any) -> bool:
        """Whether the engine has no other request; a waiting one might join the same step."""
        others = (other for other in self._requests.values() if other is not request)
        return all(other.is_finished() for other in others)

    def others_fill_a_step(self, request: Any, start: int) -> bool:
        """Whether those of the LOOK_BACK last requests that wait, and whose prompts part from this
        one's at block ``start``, or before, leave nothing of the next step: vLLM begins them before
        it asks for this one again, and then goes on with them first."""
        own, tokens = request.block_hashes[start], 0
        for other in islice(reversed(self._requests.values()), LOOK_BACK):
            if other.status.name in WAITING and other.block_hashes[start : start + 1] != [own]:
                tokens += other.num_tokens
        return tokens >= self._step_tokens

    def holds_all(self, hashes: int) -> bool:
        """Whether there is room for the blocks of this many hashes, and a block more."""
        return self.free() > self._groups.blocks_at(hashes)

    def free(self) -> int:
        """Return the number of blocks that vLLM can hand out."""
        return int(self._manager.block_pool.get_num_free_blocks())

    def admits(self, num_blocks: int, request: Any) -> bool:
        """Whether vLLM admits an asynchronous load of ``num_blocks``, and will have room for the
        rest of the request's prompt after it.  vLLM reserves the blocks that prefills under way
        still need, and gives blocks to other requests during the load."""
        missing = sum(map(self._missing, self._requests.values()))
        left = self.free() - missing
        kept = int(getattr(self._manager, "watermark_blocks", 0))
        spare = len(self._manager.block_pool.blocks) // SPARE
        return num_blocks + kept <= left and self._blocks(request) + spare <= left

    def has_room(self, request: Any) -> bool:
        """Whether the rest of a request's prompt fits beside what others hold, with one block more
        in each group, for drafts."""
        return self._rest(request) + len(self._managers) <= self.free()

    def _missing(self, request: Any) -> int:
        """Blocks that vLLM reserves because a prefill under way still needs them."""
        return self._rest(request) if request.status.name in PREFILLING else 0

    def _rest(self, request: Any) -> int:
        """Blocks that a request needs for its tokens and does not hold yet."""
        return self._needed(request, self._manager.get_blocks(request.request_id).blocks)

    def _blocks(self, request: Any) -> int:
        """Blocks that vLLM reserves for the tokens of a request that has none, counting partly
        filled ones."""
        return self._needed(request, [()] * len(self._managers))

    def _needed(self, request: Any, tables: Sequence[Sequence[Any]]) -> int:
        """As vLLM, which counts the null blocks of a table, too: else a request that decodes behind
        its window would need, for ever, what a prefill holds at most."""
        needed = 0
        for group, manager, table in zip(self._groups.all, self._managers, tables, strict=True):
            if group.state:
                needed += self._states(manager, request)
                continue
            filled = -(-int(request.num_tokens) // group.block_size)
            most = manager.max_admission_blocks_per_request  # of a window
            needed += max((filled if most is None else min(filled, most)) - len(table), 0)
        return needed

    def _states(self, manager: Any, request: Any) -> int:
        """Blocks that a request still needs for states, as vLLM's own manager of them counts."""
        tokens, computed = request.num_tokens, request.num_computed_tokens
        prefill_end = max(request.num_prompt_tokens, tokens - 1)
        return int(
            manager.get_num_blocks_to_allocate(
                request.request_id, tokens, (), computed, computed, tokens,
                apply_admission_cap=True,
                prefill_end=prefill_end if self._manager.coordinator.retention_interval == 0 else 0,
            )
        )  # fmt: skip
