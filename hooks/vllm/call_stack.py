"""Finds vLLM's objects that vLLM passes to no connector: they are on the call stack."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

FRAMES = 16
"""How many frames are searched; vLLM's objects are 3 to 8 frames away."""


def callers_with(name: str, depth: int = FRAMES) -> list[Any]:
    """Return the callers that have this attribute, innermost first, each once.

    A caller is the ``self`` of a method on the stack.  vLLM's model runner calls
    ``register_kv_caches`` of a connector, its scheduler ``bind_kv_cache_manager``, its core
    ``set_xfer_handshake_metadata_pp_aware``.
    """
    found: dict[int, Any] = {}
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and depth:
        caller = frame.f_locals.get("self")
        if caller is not None and hasattr(caller, name):
            found.setdefault(id(caller), caller)
        frame, depth = frame.f_back, depth - 1
    return list(found.values())
