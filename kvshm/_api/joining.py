"""``join``: checks what an engine says of itself, and makes its Node."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from kvshm._base.log import logger
from kvshm._base.log_output import start_log
from kvshm._engine.epoch_state import EngineSpec, EpochState
from kvshm._engine.groups import Group, Groups
from kvshm.config import Auto, Config, Share
from kvshm.errors import KvshmError, MisuseError, TransportError
from kvshm.interfaces import Region, check_installed, choose_transport, load_transport

from .arguments import (
    checked_block_size,
    checked_groups,
    checked_name,
    checked_regions,
    checked_seconds,
    whole,
)
from .block_node import BlockNode
from .claims import by_address, claimed
from .engine_layout import EngineLayout
from .halves_in_one import HalvesInOne
from .identity import Identity
from .node import Node
from .own_blocks import OwnBlocks

DEVICE = "cpu"
N = TypeVar("N", bound=BlockNode)

log = logger(__name__)


def allocate(nbytes: int, config: Config | None = None) -> Any:
    """Return zeroed memory on the CPU that other engines can read, for a KV cache.

    ``buffer`` is a writable memoryview of all of it (``torch.frombuffer`` takes it), ``address``
    and ``nbytes`` say where it lies.  ``close()`` lets go of it, after the node's: the pages stay
    as long as something uses ``buffer``.  ``nbytes``: at least 1.  ``config``: names the transport
    (for one of GPUs the memory is what ``join_like`` takes); unless given, the environment does.
    Blocks while the kernel clears the pages, about a second for 4 GB.  Raises TransportError if
    there is no room, ConfigError for a bad setting, and MisuseError if the transport shares memory
    only where it lies.
    """
    if (nbytes := whole("nbytes", nbytes)) < 1:
        raise MisuseError(f"{nbytes} bytes; give the bytes of all blocks, 1 or more")
    config = _settings(config)
    wanted = config.transport
    check_installed(wanted)
    if wanted != Auto.AUTO and getattr(load_transport(wanted), "takes_host_memory", False):
        wanted = Auto.AUTO  # that of CPU caches makes it
    if (make := getattr(choose_transport(wanted, DEVICE), "allocate", None)) is None:
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
    wait: float | None = None,
) -> Node:
    """Make this engine's cache a part of the node's, and return its place in it.  If a
    ``kvshm-coordinator`` runs, it waits, ``wait`` seconds at most, until this engine has joined and
    knows the blocks of the engines that it names: some milliseconds (just restarted, it names none
    yet).  Otherwise the node is joined in the background, as soon as one runs and answers.

    ``identity``: who may share with this engine.  ``memory``: what ``allocate`` returned, and
    ``regions``: where the blocks lie in it; block ``i`` is block ``i`` of every region, in bytes
    that belong to no other block, nor to another node.  ``block_size``: tokens for each key, at
    least 1.  ``groups``: KV cache groups, numbered from 0; unless given, one of full attention,
    with blocks of ``block_size`` tokens.  ``config``: the settings; unless given, those of the
    environment (KVSHM_ENABLE is not asked).  ``name``: for people.  ``device``: type of the device
    whose memory it is, as torch names it.  ``wait``: unless given, KVSHM_JOIN_WAIT_MS.

    At most 8 engines of one process share at a time.  If this engine cannot share (no run
    directory, no descriptors, one engine too many), a line in the log and ``Node.refusal`` say why;
    the Node then finds nothing.  Raises ConfigError for a bad setting, MisuseError for arguments
    that cannot be meant, and for blocks that another node of this process has.
    """
    if not isinstance(identity, Identity):
        raise MisuseError(f"identity is {identity!r}; give an Identity")
    config = _settings(config)
    patience = config.join_wait_ms / 1000 if wait is None else checked_seconds("wait", wait)
    called = checked_name(name)
    block_size = checked_block_size(block_size)
    shape = Groups(checked_groups(groups, block_size))
    regions = checked_regions(regions, memory)
    num_blocks = min(region.num_blocks for region in regions)
    spec = EngineSpec(called, identity.model, num_blocks, block_size, asynchronous=True)
    path = _chosen_transport(config, device)
    _check_kind(memory, path, device)

    def fields(who: Identity) -> dict[str, str]:
        return who._fingerprint_fields(
            block_size, regions, shape.all, str(getattr(path, "name", ""))
        )

    def open_halves(opened: Callable[[EpochState], None]) -> HalvesInOne:
        _check_may_share(config)
        if isinstance(path, TransportError):
            raise path
        return HalvesInOne(config, spec, path, [(memory, regions)], opened)

    fields(identity)  # may raise: nothing has been opened
    _begin_log(config)
    own = OwnBlocks(num_blocks, [group.scale for group in shape.all])
    where = by_address(regions, memory)
    node = claimed(where, lambda: Node(called, block_size, own, shape, fields, open_halves))
    return _started(node, identity, patience)


def join_like(
    layout: EngineLayout,
    *,
    memory: Any,
    num_blocks: int,
    config: Config | None = None,
    name: str | None = None,
    wait: float | None = None,
) -> BlockNode:
    """Join the node with the fingerprint of an engine that is there, as one that computes nothing:
    it loads blocks of other engines, and publishes them again.  Waits as ``join`` does.

    ``layout``: what ``Reader.layout`` returned.  ``memory``: what ``allocate`` returned.  Block
    ``i`` of all ranks together is the ``layout.stride`` bytes from byte ``i * layout.stride`` on;
    there are ``num_blocks`` of them.  Several nodes of this function may have the same memory: the
    caller sees to it that no two use, at one time, blocks with a byte in common.  ``config``,
    ``name``, ``wait``: as for ``join``.  Errors are those of ``join``; MisuseError also for an
    engine whose memory another transport shares than the settings name, or one that takes no host
    memory; TransportError if that transport cannot be had.
    """
    if not isinstance(layout, EngineLayout):
        raise MisuseError(f"layout is {layout!r}; give what Reader.layout() returned")
    config = _settings(config)
    patience = config.join_wait_ms / 1000 if wait is None else checked_seconds("wait", wait)
    called = checked_name(name)
    path = _transport_like(layout, config)
    caches = [
        (memory, checked_regions(part, memory))
        for part in layout.regions(whole("num_blocks", num_blocks, 1))
    ]
    spec = EngineSpec(
        called, layout.model, num_blocks, layout.block_size, asynchronous=True, keeps=True
    )

    def open_halves(opened: Callable[[EpochState], None]) -> HalvesInOne:
        _check_may_share(config)
        return HalvesInOne(config, spec, path, caches, opened)

    def make() -> BlockNode:
        own, shape = OwnBlocks(num_blocks, [1]), Groups([Group(0, layout.block_size)])
        fields = dict(layout.fields)
        return BlockNode(called, layout.block_size, own, shape, lambda _: fields, open_halves)

    _begin_log(config)
    where = [region for _, part in caches for region in by_address(part, memory)]
    node = claimed(where, make, apart=False)
    node._follow()
    return _started(node, Identity(engine="", model=layout.model, weights=""), patience)


def _begin_log(config: Config) -> None:
    """Write the log as the settings say, and likely mistakes in them first."""
    start_log(config.log_level, config.log_format, config.log_file)
    for warning in config.mistakes:
        log.filled(warning)


def _settings(given: Config | None) -> Config:
    """Return the settings that were given, else those of the environment.  Raises MisuseError, and
    ConfigError for a bad setting."""
    if given is None:
        return Config.from_env(os.environ)
    if not isinstance(given, Config):
        raise MisuseError(f"config is {given!r}; give a Config")
    return given


def _check_kind(memory: Any, path: Any, device: str) -> None:
    """Raise MisuseError if the memory is of another kind than the transport shares."""
    if isinstance(path, TransportError):  # a line in the log will say so
        return
    allocated = hasattr(memory, "buffer")
    if hasattr(path, "allocate") and not allocated:
        raise MisuseError(f"memory is {type(memory).__name__}; give what allocate() returned")
    if not hasattr(path, "allocate") and allocated:
        raise MisuseError(
            f"memory is what allocate() returned; on {device!r} give the tensors of the cache"
        )


def _transport_like(layout: EngineLayout, config: Config) -> Any:
    """Return the class of the transport that shares an engine's memory, and takes host memory.
    Raises MisuseError, and TransportError."""
    wanted = config.transport
    if wanted in (Auto.AUTO, layout.transport):
        found: Any = load_transport(layout.transport)
        if DEVICE in getattr(found, "devices", ()) or getattr(found, "takes_host_memory", False):
            return found
        raise MisuseError(f"transport {layout.transport} takes no host memory")
    raise MisuseError(
        f"the engine shares its memory by {layout.transport}, this one by {wanted}; only engines "
        "of the same transport share"
    )


def _started(node: N, identity: Identity, patience: float) -> N:
    """Return the node with its first epoch begun, after ``patience`` seconds at most; nothing of
    it is left if that raises."""
    try:
        node._start(identity)
        node._meet_peers(patience)
    except BaseException:
        node.close()
        raise
    return node


def _check_may_share(config: Config) -> None:
    """Raise KvshmError if the settings leave nothing to share."""
    if (refusal := config.decide_role().refusal) is not None:
        raise KvshmError(refusal)
    if config.share is Share.SALTED_ONLY:
        raise KvshmError(
            f"KVSHM_SHARE={config.share}, and keys do not tell which prompts have a salt; set "
            "all, and publish only what may be shared"
        )


def _chosen_transport(config: Config, device: str) -> Any:
    """Return the transport's class, or the TransportError that says why this engine has none.
    Raises ConfigError if there is no such transport."""
    if not isinstance(device, str):
        raise MisuseError(f"device is {device!r}; give its type as text, as torch names it")
    try:
        return choose_transport(config.transport, device)
    except TransportError as exc:
        return exc
