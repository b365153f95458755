"""``join``: checks what an engine says of itself, and makes its Node."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from kvshm._engine.epoch_state import EngineSpec, EpochState
from kvshm._engine.groups import Group, Groups
from kvshm._shm.layout import ENGINE_NAME_BYTES, MAX_BLOCKS
from kvshm.config import Config
from kvshm.errors import KvshmError, MisuseError
from kvshm.interfaces import MAX_REGIONS, Region, load_transport

from .halves_in_one import HalvesInOne
from .identity import Identity
from .node import Node
from .own_blocks import OwnBlocks

DEFAULT_TRANSPORT = "posix_shm"


def allocate(nbytes: int, transport: str = DEFAULT_TRANSPORT) -> Any:
    """Return zeroed memory that other engines can read, for a KV cache.

    ``buffer`` is a writable memoryview of all of it (``torch.frombuffer`` takes it), ``address``
    and ``nbytes`` say where it lies; ``close()`` ends the sharing.  Blocks while the kernel clears
    the pages, about a second for 4 GB.  Raises TransportError if there is no room, or the transport
    shares memory only where it lies.
    """
    if (make := getattr(load_transport(transport), "allocate", None)) is None:
        raise MisuseError(
            f"transport {transport!r} allocates no memory; give join() the memory of the cache"
        )
    return make(nbytes)


def join(
    identity: Identity,
    *,
    memory: Any,
    regions: Sequence[Region],
    block_size: int,
    groups: Sequence[Group] | None = None,
    config: Config | None = None,
    name: str | None = None,
    transport: str = DEFAULT_TRANSPORT,
    environ: Mapping[str, str] = os.environ,
) -> Node:
    """Make this engine's cache a part of the node's, and return its place in it.  Does not wait:
    the node is joined in the background, as soon as a ``kvshm-coordinator`` runs.

    ``identity``: who may share with this engine.  ``memory``: what ``allocate`` returned, and
    ``regions``: where the blocks lie in it; block ``i`` is block ``i`` of every region.
    ``block_size``: tokens for each key, at least 1.  ``groups``: KV cache groups, numbered from 0;
    unless given, one of full attention, with blocks of ``block_size`` tokens.  ``config``: the
    settings; unless given, those of ``environ`` (KVSHM_ENABLE is not asked).  ``name``: for
    people.

    If this engine cannot share, a line in the log and ``Node.refusal`` say why; the Node then finds
    nothing.  Raises ConfigError for a bad setting, MisuseError for arguments that cannot be meant.
    """
    config = config or Config.from_env(environ)
    called = _name(name)
    shape = Groups(_checked_groups(groups, block_size))
    num_blocks = _checked_blocks(regions)
    spec = EngineSpec(called, identity.model, num_blocks, block_size, asynchronous=True)

    def fields(who: Identity) -> dict[str, str]:
        return who.fields(block_size, regions, shape.all)

    def open_halves(opened: Callable[[EpochState], None]) -> HalvesInOne:
        if (refusal := config.decide_role().refusal) is not None:
            raise KvshmError(refusal)
        return HalvesInOne(config, spec, transport, memory, regions, opened)

    fields(identity)  # may raise: nothing has been opened
    own = OwnBlocks(num_blocks, [group.scale for group in shape.all])
    node = Node(called, block_size, own, shape, fields, open_halves)
    node.begin(identity)
    return node


def _name(given: str | None) -> str:
    name = given or f"{Path(sys.argv[0]).stem[:40] or 'python'}-{os.getpid()}"
    if not name.isprintable() or len(name.encode()) > ENGINE_NAME_BYTES:
        raise MisuseError(
            f"name {name!r} is not printable, or has over {ENGINE_NAME_BYTES} bytes; shorten it"
        )
    return name


def _checked_blocks(regions: Sequence[Region]) -> int:
    """The number of blocks that exist in every region."""
    if not 0 < len(regions) <= MAX_REGIONS:
        raise MisuseError(f"{len(regions)} regions; give 1 to {MAX_REGIONS}")
    num_blocks = min(region.num_blocks for region in regions)
    if not 0 < num_blocks <= MAX_BLOCKS:
        raise MisuseError(f"the regions have {num_blocks} blocks; give 1 to {MAX_BLOCKS}")
    return num_blocks


def _checked_groups(groups: Sequence[Group] | None, block_size: int) -> Sequence[Group]:
    if not isinstance(block_size, int) or not 0 < block_size < 1 << 32:
        raise MisuseError(f"block_size is {block_size!r}; give the tokens of a block, 1 or more")
    given = [Group(0, block_size)] if groups is None else list(groups)
    for number, group in enumerate(given):
        if group.number != number or group.block_size != group.scale * block_size:
            raise MisuseError(
                f"group {number} is {group}; number the groups from 0, and give each `scale` keys "
                f"of {block_size} tokens per block"
            )
    if not given:
        raise MisuseError("no groups; leave `groups` out for one of full attention")
    return given
