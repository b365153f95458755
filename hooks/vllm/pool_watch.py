"""Watches vLLM's block pool: tells when a block's bytes or its hash are about to change.

The pool has no callback for every such change (a reuse watcher misses evictions and moves of
hashes), so four methods of the pool *instance* are wrapped.  All of them run in the
scheduler, strictly before the step that writes is dispatched.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from kvshm.errors import KvshmError
from kvshm.ids import BlockId

FOR_SHARING = ("reset_prefix_cache",)
"""Without it new weights would go unnoticed: nothing may be shared in either direction."""
FOR_EXPORT = ("get_new_blocks", "_remove_cached_block_hashes", "blocks")
TABLES = "req_to_blocks"


class PoolListener(Protocol):
    """Who wants to know."""

    def blocks_handed_out(self, blocks: Sequence[Any]) -> None:
        """The pool has handed these of its blocks out for new contents."""
        ...

    def block_changes(self, block: BlockId) -> None:
        """The block loses its hash."""
        ...

    def pool_will_reset(self) -> None:
        """Every hash is about to be dropped, if all blocks are free."""
        ...

    def pool_reset(self) -> None:
        """Every hash was dropped: the contents may be of other weights from here on."""
        ...


class PoolChanged(KvshmError):
    """vLLM's block pool lacks something kvshm relies on; names it."""


def block_tables(manager: Any) -> Mapping[str, Sequence[Any]]:
    """The block tables by request, as vLLM's block manager keeps them: asking its ``get_blocks``
    costs seven calls.  Raises PoolChanged if they are not where they are looked for."""
    groups = getattr(getattr(manager, "coordinator", None), "single_type_managers", None)
    tables = getattr(groups[0], TABLES, None) if groups else None
    if not isinstance(tables, dict):
        raise PoolChanged(f"the block manager of this vLLM has no {TABLES}")
    return tables


def watch_resets(pool: Any, listener: PoolListener) -> None:
    """Have the listener told when all hashes are dropped.  Raises PoolChanged if that cannot
    be: then nothing was wrapped, and nothing may be shared."""
    _require(pool, FOR_SHARING)
    reset = pool.reset_prefix_cache

    def reset_prefix_cache(*args: Any, **kwargs: Any) -> Any:
        listener.pool_will_reset()
        if done := reset(*args, **kwargs):
            listener.pool_reset()
        return done

    pool.reset_prefix_cache = reset_prefix_cache


def watch_blocks(pool: Any, listener: PoolListener) -> None:
    """Have the listener told of every single block's change.  Raises PoolChanged if that
    cannot be: then nothing was wrapped, and nothing may be exported."""
    _require(pool, FOR_EXPORT)
    hand_out, remove_hashes = pool.get_new_blocks, pool._remove_cached_block_hashes

    handing_out = False

    def get_new_blocks(*args: Any, **kwargs: Any) -> Any:
        # Blocks that are handed out are told of all at once: they may be thousands, so vLLM is
        # spared our wrapper for each, unless somebody else has wrapped that in turn.
        nonlocal handing_out
        handing_out = True
        if unwrapped := pool._remove_cached_block_hashes is remove:
            pool._remove_cached_block_hashes = remove_hashes
        try:
            blocks = hand_out(*args, **kwargs)
        finally:
            handing_out = False
            if unwrapped:
                pool._remove_cached_block_hashes = remove
        listener.blocks_handed_out(blocks)
        return blocks

    def remove(block: Any, *args: Any, **kwargs: Any) -> Any:
        if not handing_out and block.block_hash is not None:
            listener.block_changes(block.block_id)
        return remove_hashes(block, *args, **kwargs)

    pool.get_new_blocks, pool._remove_cached_block_hashes = get_new_blocks, remove


def _require(pool: Any, names: tuple[str, ...]) -> None:
    if missing := [name for name in names if not hasattr(pool, name)]:
        raise PoolChanged(f"the block pool of this vLLM has no {', '.join(missing)}")
