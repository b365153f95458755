"""The public surface: what ``import kvshm`` offers, for engines and for readers (docs/api.md).

Engines whose scheduler and ranks are processes of their own use kvshm/halves.py as well.
"""

from __future__ import annotations

from kvshm._api.identity import Identity as Identity
from kvshm._api.joining import allocate as allocate
from kvshm._api.joining import join as join
from kvshm._api.load import Found as Found
from kvshm._api.load import Load as Load
from kvshm._api.load import LoadState as LoadState
from kvshm._api.load import Owner as Owner
from kvshm._api.node import Held as Held
from kvshm._api.node import Node as Node
from kvshm._api.prefix_keys import prefix_keys as prefix_keys
from kvshm._api.reader import EngineView as EngineView
from kvshm._api.reader import PublishedBlock as PublishedBlock
from kvshm._api.reader import Reader as Reader
from kvshm._engine.groups import Group as Group
from kvshm._engine.groups import Part as Part
from kvshm.config import Config as Config
from kvshm.errors import ConfigError as ConfigError
from kvshm.errors import KvshmError as KvshmError
from kvshm.errors import MisuseError as MisuseError
from kvshm.errors import TransportError as TransportError
from kvshm.interfaces import Region as Region
from kvshm.version import __version__ as __version__

API_VERSION = (2, 0)
"""Major and minor version of the surface.  A new name or parameter raises the minor version; what
breaks callers raises the major one."""
