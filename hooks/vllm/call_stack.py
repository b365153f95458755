"""vLLM's objects that it hands to no connector: found among those who call it."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

FRAMES = 16
"""How far up they are looked for; vLLM's are 3 to 8 frames away."""


def callers_with(name: str, depth: int = FRAMES) -> list[Any]:
    """Return the callers that have this attribute, innermost first, each once.

    A caller is who a method on the stack was called on.  For connector methods that vLLM
    calls: its model runner calls ``register_kv_caches``, its scheduler
    ``bind_kv_cache_manager``, its core ``set_xfer_handshake_metadata_pp_aware``.
    """
    found: dict[int, Any] = {}
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and depth:
        caller = frame.f_locals.get("self")
        if caller is not None and hasattr(caller, name):
            found.setdefault(id(caller), caller)
        frame, depth = frame.f_back, depth - 1
    return list(found.values())
