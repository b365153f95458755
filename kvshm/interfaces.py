"""What a transport is: the one interface between kvshm and the memory that holds KV blocks.

A transport lives in a worker rank's process.  It exports the regions of that rank's own KV
cache, opens the regions of the same rank of a peer engine, and copies blocks from the
peer's into its own.  Implementations register under the entry-point group
``kvshm.transports`` and are opened by name, so an engine without CUDA never imports it.  The
setting KVSHM_TRANSPORT chooses one; a package of anybody's may offer more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum
from importlib.metadata import entry_points
from pathlib import Path
from typing import Annotated, Any, Protocol, TypeVar, cast

import msgspec
from msgspec import Meta

from ._base.copy_path import CopyPath as CopyPath
from ._base.ids import BlockId as BlockId
from ._base.ids import Epoch as Epoch
from ._base.resources import require_descriptors
from .config import Auto
from .errors import ConfigError, KvshmError, TransportError

ENTRY_POINT_GROUP = "kvshm.transports"
AUTO_TRANSPORTS = {"cpu": "posix_shm", "cuda": "cuda_ipc"}
"""What KVSHM_TRANSPORT=auto means, by the type of the device that holds the KV cache: a transport
of kvshm's own, whatever else is installed, so that engines with ``auto`` agree."""
MAX_REGIONS = 4096
"""Regions of one rank: far more than any model has layers; bounds the work of peers."""
MAX_DETAILS_BYTES = 1 << 16


class Region(msgspec.Struct, frozen=True, array_like=True):
    """One strided run of blocks: block ``i`` is ``[offset + i * stride, ... + block_bytes)``.

    ``offset`` counts bytes from the start of memory ``handle`` (0 unless a cache lies in
    several allocations).  A KV cache is a list of regions; two caches exchange blocks only
    if their lists agree in length and in every ``block_bytes``; strides, offsets and
    ``num_blocks`` may differ.
    """

    offset: int
    """Byte at which block 0 begins."""
    stride: int
    """Bytes from the start of one block to that of the next, at least ``block_bytes``."""
    block_bytes: int
    """Bytes of one block in this run."""
    num_blocks: int
    """How many blocks the run has."""
    handle: int = 0
    """Which memory, if there are several."""


class MemoryDescriptor(msgspec.Struct, frozen=True, array_like=True):
    """How a peer rank reaches one rank's KV memory: sent in the roster as msgpack.

    Only the transport packs and unpacks ``details`` (a socket's name, IPC handles, a device UUID):
    no other code has to parse this data of another process.
    """

    transport: str
    epoch: int
    rank: int
    regions: Annotated[list[Region], Meta(max_length=MAX_REGIONS)]
    details: Annotated[bytes, Meta(max_length=MAX_DETAILS_BYTES)] = b""

    @property
    def block_bytes(self) -> int:
        """Bytes of one block in all regions."""
        return sum(region.block_bytes for region in self.regions)


_D = TypeVar("_D", bound=msgspec.Struct)


def unpack_details(descriptor: MemoryDescriptor, transport: str, kind: type[_D]) -> _D:
    """Unpack the ``details`` of ``transport`` (msgpack) as ``kind``.  Raises TransportError if the
    memory is another transport's, or the details cannot be decoded."""
    if descriptor.transport != transport:
        raise TransportError(f"no {transport} memory: {descriptor.transport}")
    try:
        return msgspec.msgpack.decode(descriptor.details, type=kind)
    except (msgspec.DecodeError, ValueError, RecursionError) as exc:
        raise TransportError(f"undecodable {transport} details: {exc}") from exc


class CopyState(Enum):
    """State of a copy.  While it is PENDING, the destination may hold anything."""

    PENDING = "pending"
    DONE = "done"
    FAILED = "failed"


class Copy(Protocol):
    """A copy under way."""

    def poll(self) -> CopyState:
        """Tell the state, without blocking.  Once it is DONE or FAILED, this copy writes nothing
        any more and the state never changes."""

    def cancel(self) -> None:
        """Request an early end: parts not yet started are skipped, as far as they can be, and the
        copy ends FAILED (or DONE, if it was faster).  Only ``poll`` tells when the copy has
        ended."""

    def fence(self) -> bool:
        """Make all work that the model launches from now on wait for the end of this copy, without
        blocking the caller.  False if the transport cannot do that: then call ``poll``.  Only on
        the thread that runs the model."""


class Attachment(Protocol):
    """A peer rank's KV memory, opened for reading; immutable, of exactly one epoch."""

    @property
    def epoch(self) -> Epoch:
        """The peer's epoch whose export was opened."""

    @property
    def ended(self) -> bool:
        """Whether the transport knows that the export or its process has ended.  Later copies may
        still be right.  Does not block."""

    def begin_copy(
        self,
        source: Sequence[BlockId],
        target: Sequence[BlockId],
        keep_going: Callable[[], bool] | None = None,
    ) -> Copy:
        """Start copying the peer's blocks ``source`` onto own blocks ``target``, pairwise.

        Returns at once.  Exception: a caller that waits for the copy anyway passes ``keep_going``;
        a copy by the CPU then runs on the caller's thread and has ended when this returns.
        ``keep_going`` is called before the first byte and every few megabytes; if it returns
        False, the copy ends FAILED.  Both lists have the same length and may be empty; a source may
        appear several times, a target only once.  The lists are not copied: do not change them
        until the copy has ended.  Raises TransportError for block ids out of range and after
        ``close``, before anything is written.  The source may be revoked at any time; the caller's
        re-check decides whether the bytes count.
        """

    def close(self) -> None:
        """Unmap the peer's memory once all copies from it have ended.  Never blocks.
        Idempotent."""


class Transport(Protocol):
    """One rank's own KV memory and its access to peers' memory.  Used by one thread, except for
    ``attach``, which several other threads may call at the same time."""

    name: str
    """Of its entry point."""
    late_writers: bool
    """Whether work that the model launched before a copy may still write to the copy's targets:
    the copy then waits for that work.  True unless the engine itself rules such writes out."""

    def export(self, epoch: Epoch) -> MemoryDescriptor:
        """Describe own memory to peers under ``epoch``.  A second call replaces the first: the old
        descriptor is stale from then on, while copies under way continue.  Raises TransportError
        if peers cannot be served."""

    def attach(self, descriptor: MemoryDescriptor) -> Attachment:
        """Open a peer's memory.  May block for as long as a socket round trip or a mapping
        takes: call it off the serving thread.  Raises TransportError (unreachable, layouts
        differ) or StaleAttachment (the peer serves another epoch)."""

    def checksum(self, blocks: Sequence[BlockId]) -> list[int]:
        """64-bit xxh3 of own blocks, all regions of a block chained in order."""

    def close(self) -> None:
        """End the export, cancel copies and close every attachment.  Idempotent.  Returns when
        nothing writes to own memory any more: blocks for the copy of one block at most."""


class TransportClass(Protocol):
    """What an entry point names: the class of a transport."""

    @property
    def name(self) -> str:
        """Of the entry point."""

    @property
    def devices(self) -> tuple[str, ...]:
        """The types of device whose memory it shares between processes: torch's ("cpu", "cuda"),
        and "rocm" for AMD GPUs, which torch calls "cuda".  Empty: it works only within one process,
        and no engine can choose it."""

    def __call__(
        self,
        *,
        memory: Any,
        regions: Sequence[Region],
        rank: int,
        socket_path: str | Path,
        fault: str | None,
    ) -> Transport:
        """Return the transport of rank ``rank``, whose KV cache lies in ``regions`` of ``memory``.
        It may serve a socket at ``socket_path``.  ``fault``: how to copy wrong on purpose
        (KVSHM_FAULT).  Raises TransportError."""


# -- what a transport may offer besides.  kvshm looks for each method where it would call it; a
# -- method that is missing or fails costs a load at most.


class SupportsAllocate(Protocol):
    """A class whose memory kvshm allocates, as ``posix_shm``."""

    def allocate(self, nbytes: int) -> Any:
        """Return zeroed memory that peers can open, with ``buffer``, ``address`` and ``close``."""


class SupportsAdopt(Protocol):
    """A class that shares memory where the engine has allocated it, as ``cuda_ipc``."""

    def adopt(self, address: int, nbytes: int, storage: object) -> Any:
        """Return the memory at ``address`` as the constructor takes it.  It keeps ``storage``."""


class SupportsHostMemory(Protocol):
    """A class that moves blocks between devices and host memory, as ``cuda_ipc``."""

    @property
    def takes_host_memory(self) -> bool:
        """Whether the constructor also takes what ``allocate`` of the transport for CPU caches
        returned: the memory of an engine that computes nothing."""


class SupportsSettings(Protocol):
    """A class whose constructor takes settings."""

    @property
    def settings(self) -> tuple[str, ...]:
        """Fields of Config that the constructor gets by keyword."""


class SupportsFence(Protocol):
    """A transport of an engine whose steps only launch work."""

    def fence(self) -> Callable[[], bool]:
        """Return a function that tells, without blocking, whether all work launched before has
        ended.  Called by the thread that runs the model."""


class SupportsLaunchedWork(Protocol):
    """A transport whose copies need not wait for all that the model launches."""

    def note_launched(self) -> object | None:
        """Return what the model has launched so far: the copies of a load that is handed over now
        wait for that work alone.  None: they need not wait."""


class SupportsAfter(Protocol):
    """An attachment of a transport with SupportsLaunchedWork."""

    def begin_copy(
        self,
        source: Sequence[BlockId],
        target: Sequence[BlockId],
        keep_going: Callable[[], bool] | None = None,
        after: Any = None,
    ) -> Copy:
        """See Attachment.  ``after``: what ``note_launched`` returned, unless that was None."""


class SupportsWithdraw(Protocol):
    """A transport that knows how many peers map its memory."""

    def withdraw(self) -> Callable[[], int]:
        """Let no peer attach until the next export.  Return a function that tells how many mappings
        peers still have, as far as it knows.  Called before own memory is unmapped."""


class SupportsThreads(Protocol):
    """A transport that prepares kvshm's threads."""

    def enter_thread(self) -> None:
        """Prepare the calling thread, before its first call of the transport."""


class SupportsWhenEnded(Protocol):
    """A copy that need not be polled."""

    def when_ended(self, call: Callable[[], None]) -> None:
        """Have ``call`` called once, on any thread, when the copy has ended.  ``poll`` says how."""


class SupportsPath(Protocol):
    """An attachment that knows which way its copies take."""

    @property
    def path(self) -> CopyPath:
        """The way, for operators."""


def load_transport(name: str) -> TransportClass:
    """Return the class of transport ``name``; imports its module and what that needs.  Raises
    TransportError if no installed package offers that transport, or it cannot be imported."""
    if (entry := _entry(name)) is None:
        raise TransportError(f"no transport {name!r} is installed (installed: {_installed()})")
    try:
        return cast(TransportClass, entry.load())
    except (ImportError, AttributeError) as exc:
        raise TransportError(f"transport {name!r} cannot be loaded: {exc}") from exc


def check_installed(wanted: str, called: str = "KVSHM_TRANSPORT") -> None:
    """Raise ConfigError if the setting KVSHM_TRANSPORT is ``wanted``, and no installed package
    offers that transport; ``called``: what the message calls the setting.  Imports no transport.
    Raises TransportError without descriptors."""
    if wanted != Auto.AUTO and _entry(wanted) is None:
        raise ConfigError(
            f"{called}={wanted!r} is not an installed transport (installed: "
            f"{_installed()}); correct it, install its package into this environment, or unset it "
            "for the default (auto)"
        )


def choose_transport(wanted: str, device: str) -> TransportClass:
    """Return the class of the transport by which an engine shares a KV cache on ``device`` (one of
    TransportClass.devices); ``wanted``: the setting KVSHM_TRANSPORT.

    Raises ConfigError like ``check_installed``, and TransportError if the transport does not work
    for this device, or cannot be loaded.
    """
    if wanted == Auto.AUTO:
        if device not in AUTO_TRANSPORTS:
            raise TransportError(f"there is no transport for KV caches on {device}")
        return load_transport(AUTO_TRANSPORTS[device])
    check_installed(wanted)
    found = load_transport(wanted)
    if device in (devices := getattr(found, "devices", ())):
        return found
    if devices:
        served = " and ".join(devices)
        raise TransportError(f"KVSHM_TRANSPORT={wanted} is for KV caches on {served}, not {device}")
    raise TransportError(f"KVSHM_TRANSPORT={wanted} works only within one process")


def _entry(name: str) -> Any:
    """Return the entry point, or None.  Raises TransportError without descriptors to find out."""
    try:
        for entry in entry_points(group=ENTRY_POINT_GROUP, name=name):
            return entry
        require_descriptors(8)  # without descriptors, packages cannot be found
    except (KvshmError, OSError) as exc:
        raise TransportError(f"transport {name!r} cannot be loaded: {exc}") from exc
    return None


def _installed() -> str:
    return ", ".join(sorted({e.name for e in entry_points(group=ENTRY_POINT_GROUP)})) or "none"
