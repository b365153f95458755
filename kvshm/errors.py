"""All errors that kvshm raises on purpose: one tree, one leaf per thing a caller can do about it.

Foreign exceptions are converted where they are caught and kept as the cause.
"""

from __future__ import annotations


class KvshmError(Exception):
    """Base of all kvshm errors.  In the serving path one of these is a cache miss."""


class ConfigError(KvshmError):
    """A setting has an unusable value; the start stops.  Names setting, value and remedy."""


class SegmentError(KvshmError):
    """A shared-memory segment cannot be used."""


class SegmentNotFound(SegmentError):
    """No segment of that name exists: its owner has ended or never started."""


class SegmentNotReady(SegmentError):
    """The owner is still filling the segment; try again shortly."""


class SegmentTooSmall(SegmentError):
    """Shared memory has no room; the message names the needed and the available bytes."""


class VersionMismatch(SegmentError):
    """Another version wrote the segment or message; names both versions."""

    def __init__(self, message: str, theirs: int, ours: int) -> None:
        super().__init__(message)
        self.theirs = theirs
        self.ours = ours


class CorruptSegment(SegmentError):
    """A count, offset or magic in a segment contradicts the rest; the segment is not used."""


class StaleAttachment(SegmentError):
    """The peer's cache has ended or begun another epoch since it was attached."""


class IndexFull(KvshmError):
    """The replica index has no room for another entry or engine, which was not stored."""


class ProtocolError(KvshmError):
    """A message cannot be decoded or violates the protocol; the message was dropped."""


class AlreadyRunning(KvshmError):
    """Another coordinator serves this run directory and namespace."""


class RunDirectoryError(KvshmError):
    """The run directory cannot be trusted or used; names path and remedy."""


class TransportError(KvshmError):
    """KV memory cannot be exported, opened or copied."""


class MemoryInUse(TransportError):
    """A copy may still write where the model is about to compute, and cannot be stopped, or nothing
    fills the blocks that it needs.  Not a cache miss: the engine must not continue."""


class StillAttaching(TransportError):
    """A peer's memory is not open yet: it is being attached, or its rank serves none."""


class MisuseError(KvshmError):
    """A call that cannot be meant: nothing has been done, and the message says what to do instead.
    The only error that the calls of a joined node raise."""
