"""Every error kvshm raises on purpose: one tree, one leaf per thing a caller can do about it.

Foreign exceptions (OSError, zmq.ZMQError, msgspec errors) are mapped at the place where
they enter and keep their cause.  A message holds what is needed to act: the name of the
thing, what was wanted and what was found.
"""

from __future__ import annotations


class KvshmError(Exception):
    """Base of all kvshm errors.  In the serving path one of these is a cache miss."""


class ConfigError(KvshmError):
    """A setting has an unusable value; the start stops.  Names setting, value and remedy."""


class SegmentError(KvshmError):
    """A shared-memory segment cannot be used."""


class SegmentNotFound(SegmentError):
    """No segment of that name exists: its owner has gone or never was."""


class SegmentNotReady(SegmentError):
    """The segment's owner is still filling it; trying again shortly makes sense."""


class SegmentTooSmall(SegmentError):
    """Shared memory has no room; the message names needed and available bytes."""


class VersionMismatch(SegmentError):
    """The segment or message was written by another version; names both."""

    def __init__(self, message: str, theirs: int, ours: int) -> None:
        super().__init__(message)
        self.theirs = theirs
        self.ours = ours


class CorruptSegment(SegmentError):
    """A count, offset or magic in a segment contradicts the rest; nothing of it is used."""


class StaleAttachment(SegmentError):
    """The peer's cache has ended or begun another epoch since it was attached."""


class IndexFull(KvshmError):
    """The replica index has no room for another entry or engine; it was not stored."""


class ProtocolError(KvshmError):
    """A message cannot be decoded or breaks the protocol; it was dropped."""


class AlreadyRunning(KvshmError):
    """Another coordinator serves this run directory and namespace."""


class RunDirectoryError(KvshmError):
    """The run directory cannot be trusted or used; names path and remedy."""


class TransportError(KvshmError):
    """KV memory cannot be exported, opened or copied."""


class MemoryInUse(TransportError):
    """A copy may still write where the model is about to compute, and cannot be stopped.  The one
    failure that no miss answers: the rank must not go on."""


class StillAttaching(TransportError):
    """A peer's memory is not open yet; it is still being asked for."""
