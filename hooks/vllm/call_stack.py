"""Finds vLLM's objects that vLLM passes to no connector: they are on the call stack."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

FRAMES = 16
"""How many are searched; vLLM's objects are 3 to 8 frames away."""


def callers_with(name: str, depth: int = FRAMES) -> list[Any]:
    """Return the callers, each the ``self`` of a method on the stack, that have this attribute,
    innermost first, each once."""
    found: dict[int, Any] = {}
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and depth:
        caller = frame.f_locals.get("self")
        if caller is not None and hasattr(caller, name):
            found.setdefault(id(caller), caller)
        frame, depth = frame.f_back, depth - 1
    return list(found.values())
