"""Watching other processes end, without anybody who tells: a pidfd each.

Where a pid means nothing (another pid namespace) a process is taken for alive: what it shows
of itself, its heartbeat and its connections, has to do.
"""

from __future__ import annotations

import os
import select
from collections.abc import Iterable

from .segment import Identity, is_alive, is_dead, is_exiting


class DeathWatch:
    """Processes in groups, by a number; a group is dead when one of its processes is known to have
    ended.  Used by one thread; nothing blocks."""

    def __init__(self) -> None:
        self._groups: dict[int, list[Identity]] = {}
        self._pidfds: dict[int, int] = {}
        self._unwatchable: set[tuple[int, Identity]] = set()
        self._dead: set[int] = set()
        self._poll = select.poll()

    def watch(self, key: int, processes: Iterable[Identity]) -> None:
        """Add to a group who is not in it.  Who has ended already is found at once."""
        group = self._groups.setdefault(key, [])
        for process in processes:
            if process not in group:
                group.append(process)
                self._open(key, process)

    def _open(self, key: int, process: Identity) -> None:
        pidfd = -1
        try:
            if is_alive(process):  # else dead, or not to be seen: a stranger has its number here
                pidfd = os.pidfd_open(process.pid)
        except OSError:  # descriptors are short, or pidfds forbidden: looked at each time
            self._unwatchable.add((key, process))
            return
        # Again, now that the number cannot be another process's any more.
        if is_dead(process):
            self._dead.add(key)
        if pidfd >= 0:
            self._pidfds[pidfd] = key
            self._poll.register(pidfd, select.POLLIN)

    def dead(self) -> frozenset[int]:
        """The keys of those that are known to have ended so far."""
        for pidfd, _ in self._poll.poll(0):
            self._dead.add(self._pidfds.pop(pidfd))
            self._close(pidfd)
        self._dead.update(key for key, p in self._unwatchable if is_dead(p))
        return frozenset(self._dead)

    def is_whole(self, key: int) -> bool:
        """Whether each process of the group still holds its memory, as far as can be seen.
        Reads /proc: a process that is ending gives its files and memory back before its pidfd
        shows the end, but not before /proc does."""
        return not any(is_exiting(process) for process in self._groups.get(key, ()))

    def forget(self, key: int) -> None:
        """Watch no longer."""
        for pidfd in [fd for fd, whose in self._pidfds.items() if whose == key]:
            del self._pidfds[pidfd]
            self._close(pidfd)
        self._unwatchable -= {(key, process) for process in self._groups.pop(key, ())}
        self._dead.discard(key)

    def _close(self, pidfd: int) -> None:
        self._poll.unregister(pidfd)
        os.close(pidfd)

    def close(self) -> None:
        """Forget all.  Idempotent."""
        for key in list(self._groups):
            self.forget(key)

    def __del__(self) -> None:
        self.close()
