"""What a forked child must leave alone.

A forked child has the parent's memory and descriptors, but not its threads.  Sockets, epochs and
segments stay the parent's: before any code of the child runs, their objects are told to forget
them.  The child then cannot disturb what the parent still uses, neither by a call nor by its end.
"""

from __future__ import annotations

import os
import weakref
from typing import Protocol


class ForkAware(Protocol):
    """Owns something that a forked child must not use."""

    def forget_in_child(self) -> None:
        """Drop it, in a forked child.  Takes no lock: the thread that holds the lock may not
        exist in the child."""
        ...


_owners: weakref.WeakSet[ForkAware] = weakref.WeakSet()


def guard_forks(owner: ForkAware) -> None:
    """Have ``owner.forget_in_child`` called in every forked child, while ``owner`` exists."""
    _owners.add(owner)


def _after_fork_in_child() -> None:
    for owner in list(_owners):
        owner.forget_in_child()


os.register_at_fork(after_in_child=_after_fork_in_child)
