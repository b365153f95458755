"""Watches vLLM's block pool: tells when a block's bytes or its hash are about to change.

The pool has no callback for every such change (a reuse watcher misses evictions and moves of
hashes), so four methods of the pool *instance* are wrapped.  All of them run in the
scheduler, strictly before the step that writes is dispatched.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from kvshm.errors import KvshmError
from kvshm.terms import BlockId

FOR_SHARING = ("reset_prefix_cache",)
"""Without it new weights would go unnoticed: nothing may be shared in either direction."""
FOR_EXPORT = ("get_new_blocks", "_remove_cached_block_hashes", "blocks")


class PoolListener(Protocol):
    """Who wants to know."""

    def blocks_handed_out(self, blocks: list[BlockId]) -> None:
        """The pool has handed the blocks out for new contents."""
        ...

    def block_changes(self, block: BlockId) -> None:
        """The block loses its hash."""
        ...

    def pool_reset(self) -> None:
        """Every hash was dropped: the contents may be of other weights from here on."""
        ...


class PoolChanged(KvshmError):
    """vLLM's block pool lacks something kvshm relies on; names it."""


def watch_resets(pool: Any, listener: PoolListener) -> None:
    """Have the listener told when all hashes are dropped.  Raises PoolChanged if that cannot
    be: then nothing was wrapped, and nothing may be shared."""
    _require(pool, FOR_SHARING)
    _after(pool, "reset_prefix_cache", lambda done: listener.pool_reset() if done else None)


def watch_blocks(pool: Any, listener: PoolListener) -> None:
    """Have the listener told of every single block's change.  Raises PoolChanged if that
    cannot be: then nothing was wrapped, and nothing may be exported."""
    _require(pool, FOR_EXPORT)
    hand_out, remove_hashes = pool.get_new_blocks, pool._remove_cached_block_hashes
    handing_out = False

    def get_new_blocks(*args: Any, **kwargs: Any) -> Any:
        nonlocal handing_out
        handing_out = True
        try:
            blocks = hand_out(*args, **kwargs)
        finally:
            handing_out = False
        listener.blocks_handed_out([block.block_id for block in blocks])
        return blocks

    def remove(block: Any, *args: Any, **kwargs: Any) -> Any:
        # Blocks that are being handed out are told of all at once: they may be thousands.
        if block.block_hash is not None and not handing_out:
            listener.block_changes(block.block_id)
        return remove_hashes(block, *args, **kwargs)

    pool.get_new_blocks, pool._remove_cached_block_hashes = get_new_blocks, remove


def _require(pool: Any, names: tuple[str, ...]) -> None:
    if missing := [name for name in names if not hasattr(pool, name)]:
        raise PoolChanged(f"the block pool of this vLLM has no {', '.join(missing)}")


def _after(pool: Any, name: str, then: Callable[[Any], None]) -> None:
    method = getattr(pool, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        result = method(*args, **kwargs)
        then(result)
        return result

    setattr(pool, name, call)
