"""Watches vLLM's block pool: reports when a block's bytes or its hash are about to change.

The pool has no callback for this, so methods of the pool *instance* are wrapped.  All of them run
in the scheduler, before the step that writes is dispatched.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

from kvshm._base.ids import BlockId
from kvshm._base.roles import Limit
from kvshm.errors import KvshmError

FOR_SHARING = ("reset_prefix_cache",)
"""Without this method new weights would go unnoticed: the engine may neither export nor import."""
FOR_EXPORT = ("get_new_blocks", "_remove_cached_block_hashes", "blocks")
TABLES = "req_to_blocks"
"""The block tables; vLLM's ``get_blocks`` would cost seven calls."""
CACHED = "num_cached_block"
"""How many blocks vLLM has looked at to give them hashes: one before that without a hash gets none.
"""


class PoolListener(Protocol):
    """Receives the changes of the pool."""

    def blocks_wanted(self, count: int) -> None:
        """The pool is about to hand out ``count`` blocks, and the order of the free ones may have
        to change."""

    def blocks_handed_out(self, blocks: Sequence[Any]) -> None:
        """The pool has handed out these blocks for new contents."""

    def block_changes(self, block: BlockId) -> None:
        """The block loses its hash."""

    def pool_will_reset(self) -> None:
        """The pool is about to drop every hash if all blocks are free."""

    def pool_reset(self) -> None:
        """The pool was asked to drop every hash: new contents may come from other weights."""


class PoolChanged(KvshmError):
    """Something that kvshm relies on is missing in vLLM's block pool; the message names it."""


def by_group(manager: Any, name: str, num_groups: int) -> list[Any]:
    """Return what vLLM's block manager keeps of each request, in a dict for each group: TABLES or
    CACHED.  Raises PoolChanged if this vLLM keeps it elsewhere."""
    managers = getattr(getattr(manager, "coordinator", None), "single_type_managers", ())
    tables = [getattr(of_group, name, None) for of_group in managers]
    if len(tables) != num_groups or not all(isinstance(table, dict) for table in tables):
        raise PoolChanged(f"the block manager of this vLLM has no {name}")
    return tables


def watch_pool(
    pool: Any, listener: PoolListener, track: Callable[[], Callable[[], bool]] | None
) -> Iterator[Limit]:
    """Watch the pool's resets and, unless ``track`` is None, its blocks; yields the limits that
    follow if that is impossible.  ``track`` is called before blocks are watched, may raise
    PoolChanged, and returns ``may_reorder`` for ``watch_blocks``."""
    resets_are_seen = False
    try:
        watch_resets(pool, listener)
        resets_are_seen = True
        if track is not None:
            watch_blocks(pool, listener, track())
    except PoolChanged as exc:
        yield Limit(str(exc), no_exports=True, no_imports=not resets_are_seen)


def watch_resets(pool: Any, listener: PoolListener) -> None:
    """Call the listener when the pool is asked to drop all hashes.  Raises PoolChanged, with
    nothing wrapped, if that is impossible: the engine may neither export nor import then."""
    _require(pool, FOR_SHARING)
    reset = pool.reset_prefix_cache

    def reset_prefix_cache(*args: Any, **kwargs: Any) -> Any:
        listener.pool_will_reset()
        try:
            return reset(*args, **kwargs)
        finally:
            listener.pool_reset()

    pool.reset_prefix_cache = reset_prefix_cache


def watch_blocks(pool: Any, listener: PoolListener, may_reorder: Callable[[], bool]) -> None:
    """Call the listener for every change of a block, and first with how many are wanted if
    ``may_reorder``.  Raises PoolChanged, with nothing wrapped, if that is impossible: the engine
    may not export then."""
    _require(pool, FOR_EXPORT)
    hand_out, remove_hashes = pool.get_new_blocks, pool._remove_cached_block_hashes

    handing_out = False

    def get_new_blocks(num_blocks: int, *args: Any, **kwargs: Any) -> Any:
        # The listener gets all handed-out blocks in one call.  They may be thousands, so vLLM calls
        # its own method for each, without the wrapper, unless other code has wrapped that method.
        nonlocal handing_out
        if may_reorder():
            listener.blocks_wanted(num_blocks)
        handing_out = True
        if unwrapped := pool._remove_cached_block_hashes is remove:
            pool._remove_cached_block_hashes = remove_hashes
        try:
            blocks = hand_out(num_blocks, *args, **kwargs)
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
