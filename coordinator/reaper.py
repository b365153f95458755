"""Looks at engines' segments and sweeps after the dead.  The only part that unlinks.

Nothing here raises for what an engine left behind: a segment that cannot be opened is
logged and left alone.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Set
from contextlib import contextmanager
from pathlib import Path

from kvshm.counters import SWEPT
from kvshm.errors import KvshmError, SegmentNotFound, SegmentNotReady, VersionMismatch
from kvshm.leftovers import end_life, is_served, nobodys, owned_segments
from kvshm.protocol import EngineInfo
from kvshm.rundir import list_peers_files, list_rank_sockets
from kvshm.segment import (
    TABLE_KIND,
    Identity,
    SegmentName,
    identity_of,
    is_alive,
    list_segments,
    unlink,
)
from kvshm.slots import SlotTable

from . import logfmt
from .actions import Log, Process, Refusal
from .roster import processes_of
from .versions import who_upgrades

_ONE_SHM = "let both see one /dev/shm (containers: --ipc=host, or one mount in both)"
_VISIBLE = "restart the engine; run both in one pid namespace (containers: --pid=host)"


class Reaper:
    """One namespace's segments and rank sockets."""

    def __init__(self, run_dir: Path, namespace: str) -> None:
        self._run_dir = run_dir
        self._namespace = namespace

    # -- before a join

    def examine(self, info: EngineInfo) -> Refusal | None:
        """Say why the engine is not what it says, None if it is.

        That its slot table can be opened here, and holds the random epoch of the Join,
        proves that engine and coordinator see the same /dev/shm.
        """
        for process in sorted(processes_of(info)):
            if not _runs(process):
                return Refusal(f"the engine's process {process.pid} does not run here", _VISIBLE)
        try:
            table = SlotTable.open(info.table, writable=False)
        except SegmentNotFound:
            return Refusal(f"{info.table} is not in the coordinator's /dev/shm", _ONE_SHM)
        except SegmentNotReady as exc:
            return Refusal(str(exc), "nothing: it is tried again", retry=True)
        except VersionMismatch as exc:
            return who_upgrades("layout", exc, info.kvshm_version)
        except (KvshmError, OSError) as exc:
            return Refusal(str(exc), "run engine and coordinator as one user")
        try:
            return _compare(table, info)
        finally:
            table.close()

    # -- after an end

    def end_life(self, name: str) -> None:
        """Zero the life words of a slot table."""
        with self._tolerant("end-life", name):
            end_life(name)

    def sweep_bits(self, bits: int) -> None:
        """Clear lease bits in every slot table of the namespace."""
        for name in self._segments(TABLE_KIND):
            with self._tolerant("sweep", name):
                table = SlotTable.open(name)
                swept = table.sweep(bits)
                table.counters.add(SWEPT, swept)
                table.close()
                about: dict[str, object] = {"table": name, "bits": f"{bits:#x}", "slots": swept}
                logfmt.write(Log(logging.DEBUG, "swept", about))

    def unlink_epoch(self, table: str, epoch: int) -> None:
        """Remove the slot table of an epoch, and rank sockets that nobody serves any more."""
        with self._tolerant("unlink", table):
            unlink(table)
        self._remove_list(epoch)
        self._sweep_sockets()

    def sweep_process(self, process: Process) -> None:
        """Remove every segment of a dead process."""
        dead = identity_of()._replace(pid=process.pid, start_time=process.start_time)
        for name, owner in self._owned():
            if owner == dead:
                self._remove(name, owner)
        self._sweep_sockets()

    def sweep_leftovers(self, keep: Set[int] = frozenset()) -> None:
        """Remove segments and rank sockets of dead processes, except those of epochs in
        ``keep``, whose end is yet to be told.  Whether a process of another pid namespace
        lives cannot be seen from here: what it has made stays."""
        for name, owner in self._owned():
            if name.epoch not in keep and nobodys(owner):
                self._remove(name, owner)
        self._sweep_sockets()

    def _sweep_sockets(self) -> None:
        """Remove rank sockets left by dead workers.  A worker binds its socket once, so one
        that nobody serves will never be served again."""
        for pid, path in list_rank_sockets(self._run_dir, self._namespace):
            if not is_served(path):
                path.unlink(missing_ok=True)
                logfmt.write(Log(logging.INFO, "removed", {"socket": path, "pid": pid}))

    def _remove_list(self, epoch: int) -> None:
        """Remove what an engine of this epoch told its own ranks, half-written or not."""
        for whose, listed in list_peers_files(self._run_dir, self._namespace):
            if whose == epoch:
                with self._tolerant("unlink", str(listed)):
                    listed.unlink(missing_ok=True)

    # -- the segments

    def _segments(self, kind: str) -> list[str]:
        return [str(name) for name in list_segments(self._namespace) if name.kind == kind]

    def _owned(self) -> Iterator[tuple[SegmentName, Identity]]:
        """Yield the engines' segments and their owners; nobody for abandoned births."""
        yield from owned_segments(self._namespace, _left_alone)

    def _remove(self, name: SegmentName, owner: Identity) -> None:
        if name.kind == TABLE_KIND:
            self.end_life(str(name))
            self._remove_list(name.epoch)
        with self._tolerant("unlink", str(name)):
            unlink(str(name))
            logfmt.write(Log(logging.INFO, "removed", {"segment": name, "owner_pid": owner.pid}))

    @contextmanager
    def _tolerant(self, what: str, name: str) -> Iterator[None]:
        try:
            yield
        except (SegmentNotFound, SegmentNotReady, VersionMismatch):
            return  # gone, or nobody's yet, or of engines that no engine of ours ever met
        except (KvshmError, OSError, ValueError, IndexError) as exc:
            about: dict[str, object] = {"what": what, "segment": name, "reason": exc}
            logfmt.write(Log(logging.WARNING, "failed", about))


def _runs(process: Process) -> bool:
    try:
        return is_alive(identity_of(process.pid)._replace(start_time=process.start_time))
    except (ProcessLookupError, OverflowError):
        return False


def _compare(table: SlotTable, info: EngineInfo) -> Refusal | None:
    found = (table.epoch, table.identity.pid, table.identity.start_time, table.fingerprint)
    if found != (info.epoch, info.pid, info.start_time, info.fingerprint):
        return Refusal(f"{info.table} in the coordinator's /dev/shm is another's", _ONE_SHM)
    if (table.num_blocks, table.num_ranks) != (info.num_blocks, len(info.ranks)):
        return Refusal(
            f"{info.table} has {table.num_blocks} blocks and {table.num_ranks} ranks, the engine "
            f"states {info.num_blocks} and {len(info.ranks)}",
            "report this as a bug",
        )
    return None


def _left_alone(name: SegmentName, exc: Exception) -> None:
    about: dict[str, object] = {"segment": name, "reason": exc}
    logfmt.write(Log(logging.DEBUG, "left-alone", about))
