"""kvshm: one prefix cache per node, shared in place by the engines on it.

The names of kvshm/api.py are imported when the first of them is used.
"""

# ruff: noqa: F405  # api.py imports the names of __all__

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .version import __version__

if TYPE_CHECKING:
    from .api import *  # noqa: F403  # the names below

__all__ = [
    "API_VERSION",
    "BlockContent",
    "BlockName",
    "BlockNode",
    "Change",
    "Config",
    "ConfigError",
    "EngineLayout",
    "EngineView",
    "Found",
    "FoundBlocks",
    "Group",
    "Held",
    "Identity",
    "KvshmError",
    "Load",
    "LoadOfBlocks",
    "LoadState",
    "MisuseError",
    "News",
    "Node",
    "Owner",
    "Part",
    "PublishedBlock",
    "Reader",
    "Region",
    "TransportError",
    "__version__",
    "allocate",
    "join",
    "join_like",
    "prefix_keys",
]


def __getattr__(name: str) -> Any:
    if name in __all__:
        from . import api

        return getattr(api, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
