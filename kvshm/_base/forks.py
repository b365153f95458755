"""What a forked child must leave alone: its objects forget it before any code of the child runs."""

from __future__ import annotations

import os
import weakref
from contextlib import suppress
from typing import Protocol


class ForkAware(Protocol):
    """Owns something that a forked child must not use."""

    def forget_in_child(self) -> None:
        """Drop it, in a forked child.  Takes no lock, whose thread may not exist there."""
        ...


_owners: weakref.WeakSet[ForkAware] = weakref.WeakSet()


def guard_forks(owner: ForkAware) -> None:
    """Have ``owner.forget_in_child`` called in every forked child, while ``owner`` exists."""
    _owners.add(owner)


class Closeable(Protocol):
    """What a forked child inherits and must not keep open."""

    def close(self) -> None: ...


_inherited: weakref.WeakSet[Closeable] = weakref.WeakSet()


def close_in_children(resource: Closeable) -> None:
    """Have a connection or mapping closed in every forked child."""
    _inherited.add(resource)


def _after_fork_in_child() -> None:
    for owner in list(_owners):
        owner.forget_in_child()
    for resource in list(_inherited):
        with suppress(OSError, BufferError):  # a buffer: something in the parent is using it
            resource.close()


os.register_at_fork(after_in_child=_after_fork_in_child)
