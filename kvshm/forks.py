"""What a forked child must leave alone.

A child has the parent's memory and descriptors, and none of its threads.  Sockets, epochs and
segments stay the parent's: their objects are told to forget them before any code of the child
runs, so that neither its use of them nor its end touches what the parent goes on using.
"""

from __future__ import annotations

import os
import weakref
from typing import Protocol


class Forgetful(Protocol):
    """Owns something that a forked child must not use."""

    def forget_in_child(self) -> None:
        """In a forked child: let go of it.  Takes no lock: its holder may not exist here."""
        ...


_owners: weakref.WeakSet[Forgetful] = weakref.WeakSet()


def guard_forks(owner: Forgetful) -> None:
    """Have ``owner.forget_in_child`` called in every forked child, for as long as it lives."""
    _owners.add(owner)


def _after_fork_in_child() -> None:
    for owner in list(_owners):
        owner.forget_in_child()


os.register_at_fork(after_in_child=_after_fork_in_child)
