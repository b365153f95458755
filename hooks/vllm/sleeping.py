"""The connector's hooks for sleep mode, in which vLLM unmaps weights and KV cache.

vLLM 0.33 calls them; in 0.32 the worker's own methods, which kvshm wraps (weights.py), do the same.
Going to sleep, in a rank::

    the weights are about to go     the witness stops, the epoch ends: leases fail, copies of
                                    other engines are discarded at their re-check
    unregister_kv_caches            own loads end, whatever they still bring is discarded; peers
                                    unmap, which is waited for, but not for ever
    vLLM unmaps the memory

Waking up reads nothing: the KV cache may be there before the weights.  The first step that runs the
model finds both, so it digests the weights, exports the memory anew, and a new epoch begins.
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
"""How long a rank that goes to sleep waits for peers to unmap its KV cache, which takes them up to
two seconds.  One that hangs keeps the memory from being given back until it goes on or ends."""


def release_memory(cache: RankHalf, rank: Rank) -> int:
    """Have nothing use a rank's KV cache any more: see SleepHooks.unregister_kv_caches.  Returns
    how many mappings peers still have."""
    begun = time.monotonic()
    if left := cache.release_memory(UNMAP_SECONDS):
        log.line(HookLine.STILL_MAPPED, rank, time.monotonic() - begun, left)
    return left


class SleepHooks:
    """Part of KvshmConnector.  Worker only, except where that is said."""

    _worker: WorkerSide | None

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: Any) -> bool:
        """True, for every transport: the KV cache may be unmapped and mapped anew at any time.  Any
        process."""
        return True

    # After any error here, what may still write to the memory keeps it mapped.
    @guarded(lambda self: _require_no_loads(self._worker))
    def unregister_kv_caches(self) -> None:
        """The KV cache is about to be unmapped.  Blocks until nothing writes to it, and, up to
        UNMAP_SECONDS, until no peer maps it.  Raises MemoryInUse if a copy cannot be stopped."""
        if self._worker is not None:
            self._worker.release_memory()

    def restore_kv_caches(self) -> None:
        """Nothing to do: the memory is exported by the next description of this rank."""


def _require_no_loads(worker: WorkerSide) -> None:
    if worker.is_loading():
        raise MemoryInUse("loads into the KV cache could not be ended: it must stay mapped")
