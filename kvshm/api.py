"""The public surface: what ``import kvshm`` offers, for engines and for readers (docs/api.md).

Engines whose scheduler and ranks are processes of their own use kvshm/halves.py as well.
"""

from __future__ import annotations

from kvshm._api.block_node import BlockNode as BlockNode
from kvshm._api.contents import BlockContent as BlockContent
from kvshm._api.contents import BlockName as BlockName
from kvshm._api.engine_layout import EngineLayout as EngineLayout
from kvshm._api.identity import Identity as Identity
from kvshm._api.joining import allocate as allocate
from kvshm._api.joining import join as join
from kvshm._api.joining import join_like as join_like
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
from kvshm._api.single_blocks import Change as Change
from kvshm._api.single_blocks import FoundBlocks as FoundBlocks
from kvshm._api.single_blocks import LoadOfBlocks as LoadOfBlocks
from kvshm._api.single_blocks import News as News
from kvshm._engine.groups import Group as Group
from kvshm._engine.groups import Part as Part
from kvshm.config import Config as Config
from kvshm.errors import ConfigError as ConfigError
from kvshm.errors import KvshmError as KvshmError
from kvshm.errors import MisuseError as MisuseError
from kvshm.errors import TransportError as TransportError
from kvshm.interfaces import Region as Region
from kvshm.version import __version__ as __version__

API_VERSION = (2, 4)
"""Major and minor version of the surface.  A new name or parameter raises the minor version; what
breaks callers raises the major one."""
