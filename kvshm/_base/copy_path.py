"""The ways that copied bytes can take between two caches of one node."""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum


class CopyPath(StrEnum):
    """The way that the bytes of a copy take, in general from the fastest to the slowest.

    Positions are written to shared memory: never reuse or reorder them.
    """

    OWN = "own"
    SAME_GPU = "same_gpu"
    SHM = "shm"
    """A CPU reads the peer's cache in shared memory."""
    NVLINK = "nvlink"
    PCIE = "pcie"
    STAGED = "staged"
    """Through host memory, because the GPUs cannot reach each other."""
    OTHER = "other"
    """A transport that does not say."""


PATHS = tuple(CopyPath)


def slowest(paths: Iterable[CopyPath]) -> CopyPath:
    """Return the slowest of these paths, of which there is at least one."""
    return max(paths, key=PATHS.index)
