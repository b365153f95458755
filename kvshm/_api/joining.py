"""``join``: checks what an engine says of itself, and makes its Node."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from msgspec.structs import astuple

from kvshm._engine.epoch_state import EngineSpec, EpochState
from kvshm._engine.groups import Group, Groups
from kvshm._ground.log import logger, set_level
from kvshm._shm.layout import ENGINE_NAME_BYTES, MAX_BLOCKS
from kvshm.config import Config, Share
from kvshm.errors import KvshmError, MisuseError, TransportError
from kvshm.interfaces import MAX_REGIONS, Region, choose_transport

from .halves_in_one import HalvesInOne
from .identity import Identity
from .node import Node
from .own_blocks import OwnBlocks

DEVICE = "cpu"
MAX_GROUPS = 1 << 16
"""As many as a block's record can name."""

log = logger(__name__)


def allocate(nbytes: int, config: Config | None = None) -> Any:
    """Return zeroed memory on the CPU that other engines can read, for a KV cache.

    ``buffer`` is a writable memoryview of all of it (``torch.frombuffer`` takes it), ``address``
    and ``nbytes`` say where it lies.  ``close()`` lets go of it, after the node's: the pages stay
    as long as something uses ``buffer``.  ``nbytes``: at least 1.  ``config``: names the transport;
    unless given, the environment does.  Blocks while the kernel clears the pages, about a second
    for 4 GB.  Raises TransportError if there is no room, ConfigError for a bad setting, and
    MisuseError if the transport shares memory only where it lies.
    """
    config = config or Config.from_env(os.environ)
    if (make := getattr(choose_transport(config.transport, DEVICE), "allocate", None)) is None:
        raise MisuseError(
            f"transport {config.transport!r} allocates no memory; give join() what it takes instead"
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
    device: str = DEVICE,
) -> Node:
    """Make this engine's cache a part of the node's, and return its place in it.  Takes some
    milliseconds and does not wait: the node is joined in the background, as soon as a
    ``kvshm-coordinator`` runs.

    ``identity``: who may share with this engine.  ``memory``: what ``allocate`` returned, and
    ``regions``: where the blocks lie in it; block ``i`` is block ``i`` of every region, in bytes
    that belong to no other block.  ``block_size``: tokens for each key, at least 1.  ``groups``: KV
    cache groups, numbered from 0; unless given, one of full attention, with blocks of
    ``block_size`` tokens.  ``config``: the settings; unless given, those of the environment
    (KVSHM_ENABLE is not asked).  ``name``: for people.  ``device``: type of the device whose memory
    it is, as torch names it.

    If this engine cannot share (no run directory, no descriptors), a line in the log and
    ``Node.refusal`` say why; the Node then finds nothing.  Raises ConfigError
    for a bad setting, MisuseError for arguments that cannot be meant.
    """
    config = config or Config.from_env(os.environ)
    called = _name(name)
    shape = Groups(_checked_groups(groups, block_size))
    num_blocks = _checked_blocks(regions, memory)
    spec = EngineSpec(called, identity.model, num_blocks, block_size, asynchronous=True)
    path = _chosen_transport(config, device)

    def fields(who: Identity) -> dict[str, str]:
        return who._fingerprint_fields(
            block_size, regions, shape.all, str(getattr(path, "name", ""))
        )

    def open_halves(opened: Callable[[EpochState], None]) -> HalvesInOne:
        if (refusal := config.decide_role().refusal) is not None:
            raise KvshmError(refusal)
        if isinstance(path, TransportError):
            raise path
        if config.share is Share.SALTED_ONLY:
            raise KvshmError(
                f"KVSHM_SHARE={config.share}, and keys do not tell which prompts have a salt; set "
                "all, and publish only what may be shared"
            )
        return HalvesInOne(config, spec, path, memory, regions, opened)

    fields(identity)  # may raise: nothing has been opened
    set_level(config.log_level)
    for warning in config.warnings:
        log.warning("%s", warning)
    own = OwnBlocks(num_blocks, [group.scale for group in shape.all])
    node = Node(called, block_size, own, shape, fields, open_halves)
    node._start(identity)
    return node


def _chosen_transport(config: Config, device: str) -> Any:
    """Return the transport's class, or the TransportError that says why this engine has none.
    Raises ConfigError if there is no such transport."""
    try:
        return choose_transport(config.transport, device)
    except TransportError as exc:
        return exc


def _name(given: str | None) -> str:
    name = given or f"{Path(sys.argv[0]).stem[:40] or 'python'}-{os.getpid()}"
    if not name.isprintable() or len(name.encode()) > ENGINE_NAME_BYTES:
        raise MisuseError(
            f"name {name!r} is not printable, or has over {ENGINE_NAME_BYTES} bytes; shorten it"
        )
    return name


def _checked_blocks(regions: Sequence[Region], memory: Any) -> int:
    """The number of blocks that exist in every region."""
    if not 0 < len(regions) <= MAX_REGIONS:
        raise MisuseError(f"{len(regions)} regions; give 1 to {MAX_REGIONS}")
    memories = list(memory) if isinstance(memory, list | tuple) else [memory]
    for number, region in enumerate(regions):
        whole = isinstance(region, Region) and all(isinstance(n, int) for n in astuple(region))
        if not whole:
            raise MisuseError(f"region {number} is {region!r}; give a Region of whole numbers")
        apart = 0 < region.block_bytes <= region.stride
        if not apart or region.offset < 0 or not 0 <= region.handle < len(memories):
            raise MisuseError(
                f"region {number} is impossible: {region}; give an offset of 0 or more, a stride "
                "of at least a block's bytes, and as `handle` the index of its memory"
            )
        end = region.offset + (region.num_blocks - 1) * region.stride + region.block_bytes
        where = memories[region.handle]
        nbytes = len(where) if isinstance(where, bytearray) else getattr(where, "nbytes", None)
        if not isinstance(nbytes, int):
            raise MisuseError(
                f"memory {region.handle} is {where!r}; give what allocate() "
                "returned, or the tensors of the cache"
            )
        if end > nbytes:
            raise MisuseError(
                f"region {number} ends at byte {end}, its memory at {nbytes}; give fewer blocks, "
                "or more memory"
            )
    num_blocks = min(region.num_blocks for region in regions)
    if not 0 < num_blocks <= MAX_BLOCKS:
        raise MisuseError(f"the regions have {num_blocks} blocks; give 1 to {MAX_BLOCKS}")
    return num_blocks


def _checked_groups(groups: Sequence[Group] | None, block_size: int) -> Sequence[Group]:
    if not isinstance(block_size, int) or not 0 < block_size < 1 << 32:
        raise MisuseError(f"block_size is {block_size!r}; give the tokens of a block, 1 or more")
    given = [Group(0, block_size)] if groups is None else list(groups)
    for number, group in enumerate(given):
        scaled = group.scale > 0 and group.block_size == group.scale * block_size
        if group.number != number or not scaled:
            raise MisuseError(
                f"group {number} is {group}; number the groups from 0, and give each `scale` keys "
                f"of {block_size} tokens per block"
            )
        if min(group.window, group.chunk, group.ahead) < 0 or (group.window and group.chunk):
            raise MisuseError(
                f"group {number} is {group}; give a window, or a chunk, or 0 for full attention"
            )
    if not 0 < len(given) <= MAX_GROUPS:
        raise MisuseError(
            f"{len(given)} groups; give 1 to {MAX_GROUPS}, or none for one of full attention"
        )
    return given
