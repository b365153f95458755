"""The public surface: what ``import kvshm`` offers, for engines and for readers.

``__all__`` lists it, docs/api.md explains it, and tests/unit/test_public_surface.py guards it
against accidental change.  Engines whose scheduler and ranks are processes of their own use
kvshm/halves.py as well.  All other modules are internal.
"""

from __future__ import annotations

from kvshm._api.identity import Identity
from kvshm._api.joining import allocate, join
from kvshm._api.load import Found, Load, LoadState, Owner
from kvshm._api.node import Node
from kvshm._api.prefix_keys import prefix_keys
from kvshm._api.reader import EngineView, PublishedBlock, Reader
from kvshm._engine.groups import Group, Part
from kvshm.config import Config
from kvshm.errors import ConfigError, KvshmError, MisuseError, TransportError
from kvshm.interfaces import Region
from kvshm.version import __version__

API_VERSION = (2, 0)
"""Major and minor version of the surface.  A new name or parameter raises the minor version; what
breaks callers raises the major one."""

__all__ = [
    "API_VERSION",
    "Config",
    "ConfigError",
    "EngineView",
    "Found",
    "Group",
    "Identity",
    "KvshmError",
    "Load",
    "LoadState",
    "MisuseError",
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
    "prefix_keys",
]
