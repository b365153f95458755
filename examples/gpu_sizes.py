"""How large things are in GPU programs: as on a GPU, or small for a rehearsal without one."""

from __future__ import annotations

import os
from typing import TypeVar

Size = TypeVar("Size")


def sized(full: Size, small: Size) -> Size:
    """``small`` if GPU_SMALL is set, as `make rehearse-gpu` does; else ``full``."""
    return small if os.environ.get("GPU_SMALL") else full
