"""The connector's hooks for sleep mode, in which vLLM unmaps weights and KV cache.

vLLM 0.33 calls them; in 0.32 the worker's own methods, which kvshm wraps (weights.py), do the same.
Going to sleep, in a rank::

    the weights are about to go     the witness stops, the epoch ends: leases fail, copies of
                                    other engines are discarded at their re-check
    unregister_kv_caches            own loads end without a result; peers are waited for to unmap
    vLLM unmaps the memory

The first step that runs the model after the wake-up digests the weights and exports the memory
anew.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from kvshm._base.ids import Rank
from kvshm._base.log import logger
from kvshm.errors import MemoryInUse
from kvshm.halves import RankHalf

from ..boundary import guarded
from ..log_lines import HookLine

if TYPE_CHECKING:
    from .worker_side import WorkerSide

log = logger(__name__)

UNMAP_SECONDS = 5.0
"""How long a rank that goes to sleep waits for peers to unmap its KV cache: up to two seconds,
unless one hangs, which keeps the memory from being given back."""


def release_memory(cache: RankHalf, rank: Rank) -> int:
    """Stop all use of a rank's KV cache (SleepHooks); returns how many mappings peers still
    have."""
    start = time.monotonic()
    if left := cache.release_memory(UNMAP_SECONDS):
        log.line(HookLine.STILL_MAPPED, rank, time.monotonic() - start, left)
    return left


class SleepHooks:
    """Part of KvshmConnector.  Worker only, unless noted."""

    _worker: WorkerSide | None

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: Any) -> bool:
        """True, for every transport.  Any process."""
        return True

    # After any error here, what may still write to the memory keeps it mapped.
    @guarded(lambda self: _require_no_loads(self._worker))
    def unregister_kv_caches(self) -> None:
        """Block until nothing writes to the KV cache, which is about to be unmapped, and, up to
        UNMAP_SECONDS, until no peer maps it.  Raises MemoryInUse if a copy cannot be stopped."""
        if self._worker is not None:
            self._worker.release_memory()

    def restore_kv_caches(self) -> None:
        """Nothing to do: the next description of this rank exports the memory."""


def _require_no_loads(worker: WorkerSide) -> None:
    if worker.is_loading():
        raise MemoryInUse("loads into the KV cache could not be ended: it must stay mapped")
