"""What the transports log."""

from __future__ import annotations

from logging import DEBUG, ERROR, INFO, WARNING

from kvshm._base.log_lines import LogLine


class TransportLine(LogLine):
    """Level, text and remedy of each; docs/operations.md shows them."""

    FENCE_FAILED = (
        ERROR,
        "the model's stream cannot wait for the copies: %s",
        "look at the GPU's own log; the blocks are computed",
    )
    COPY_FAILED = (
        ERROR,
        "copy of %d blocks failed",
        "report the traceback; the blocks are computed",
    )
    JOB_FAILED = (
        ERROR,
        "a job of thread %s failed",
        "report the traceback",
    )
    GPU_COPY_FAILED = (
        ERROR,
        "a copy failed on the GPU: %s",
        "look at the GPU's own log; the blocks are computed",
    )
    STREAM_FAILED = (
        ERROR,
        "the copy stream ended with an error: %s",
        "look at the GPU's own log; the blocks are computed",
    )
    STREAM_NOT_FREED = (
        WARNING,
        "memory of the copy stream is not freed: %s",
        "nothing: it comes while the engine ends",
    )
    TRANSPORT_NOT_FREED = (
        WARNING,
        "memory of the transport is not freed: %s",
        "nothing: it comes while the engine ends",
    )
    NOT_UNMAPPED = (
        WARNING,
        "a peer's memory could not be unmapped: %s",
        "nothing; memory of an ended engine stays mapped",
    )
    FRAGMENTS = (
        INFO,
        "%d fragments of %d bytes from GPU %s: %s",
        "nothing: the line says how fast copies from that GPU are",
    )
    NO_BATCHED_COPIES = (
        INFO,
        "no batched copies: %s",
        "nothing: this driver copies blocks by the kernel instead",
    )
    OWNER_NOT_NOTIFIED = (
        DEBUG,
        "the owner of the memory does not hear that it is mapped: %s",
        "nothing: the other engine's socket could not be reached; when it goes to sleep it does "
        "not wait for this one",
    )
    LENGTH_UNKNOWN = (
        DEBUG,
        "the length of a peer's memory is not known: %s",
        "nothing: the GPU's driver does not tell it, so it is not compared with what the peer says",
    )
