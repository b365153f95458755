"""The worker rank's half of a shared cache: carries out loads on one rank.

A rank owns KV memory (behind a Transport) and one load thread.  The serving thread gives loads to
the load thread and collects reports.  Neither thread blocks on a peer: each peer is attached on a
thread of its own (kvshm/_rank/attachments.py).  Per load and rank:

    attach the peer's memory (once per epoch)  ->  copy  ->  RE-CHECK the slots  ->
    (KVSHM_VERIFY: compare checksums)  ->  last rank releases the leases  ->  report

The order is the protocol (docs/protocol.md): a block counts only if its slot's generation
and the exporter's life word are unchanged *after* its last byte was copied.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress

from kvshm._base.forks import guard_forks
from kvshm._base.ids import BlockId, Epoch, LoadId, Rank
from kvshm._base.log import logger
from kvshm._base.log_format import forget_own_epoch, note_own_epoch
from kvshm._base.resources import start_thread
from kvshm._engine.load_plan import LoadFailure, LoadOrder, LoadReport
from kvshm._node.peer_list import PeerListReader
from kvshm._node.segment_server import SegmentClient
from kvshm._shm.own_slot_table import RankSlotTable
from kvshm._shm.progress import FIRST_LOAD_THREAD
from kvshm._shm.statistics import HOOKS, LOADS_STARTED, LOADS_TOO_LATE
from kvshm.errors import KvshmError, MemoryInUse
from kvshm.interfaces import SupportsLaunchedWork, SupportsThreads, SupportsWithdraw, Transport

from .attachments import TIDY_SECONDS, AttachmentCache, Tidying
from .optional_calls import call_optional
from .rank_load import RankLoad

log = logger(__name__)

POLL_SECONDS = 0.0002
"""Between two polls of copies under way; much shorter than a scheduler step."""
STEP_POLL_SECONDS = 0.00005
"""Between two polls while a step waits; copies by a device do not notify when they end."""
CLOSE_SECONDS = 5.0
UNMAP_POLL_SECONDS = 0.01
"""Between two looks whether peers have unmapped own memory, which takes them a second or two."""
STUCK_SECONDS = 30.0
"""How long a step waits for a cancelled copy that may still write into the KV cache."""
_CLOSE, _LOOK = "close", "look"
"""What the load thread gets besides loads."""
MAX_COUNTED_SECONDS = 0.1
"""Of a longer pause between two polls of such a copy only so much counts."""


class RankHalf:
    """One rank's memory, exported and filled.  Used by the rank's serving thread."""

    def __init__(
        self,
        transport: Transport,
        rank: Rank,
        segments: SegmentClient,
        *,
        verify: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``segments``: where the own table and those of peers are fetched.  Raises
        TransportError if no thread can be started."""
        self._segments = segments
        self.transport = transport
        """The memory behind it."""
        self._verify = verify
        self._clock = clock
        self.failed = ""
        """Why ``open_epoch`` failed; empty if it succeeded."""
        self.table: RankSlotTable | None = None
        """The engine's own slot table, mapped by this rank; None outside an epoch."""
        self._attachments = AttachmentCache(transport, rank, segments, clock)
        self._tidying = Tidying(self._attachments, clock)
        # Not a SimpleQueue: a thread that is held up while it calls SimpleQueue.get with a timeout
        # may wait for ever (CPython 3.11), and a load under way then never ends.
        self._loads: queue.Queue[RankLoad | str] = queue.Queue()
        self._reports: deque[LoadReport] = deque()
        self._begun: dict[LoadId, RankLoad] = {}
        self._closing = False
        self._unreported = 0
        """Loads whose report ``poll`` has not returned yet."""
        self._inherited = False
        self._thread = self._start_thread()
        guard_forks(self)

    def attached(self) -> frozenset[Epoch]:
        """The peers whose memory this rank has mapped: a load from them begins at once.  A peer
        may have ended since; loads from it fail.  Any thread; does not block."""
        return self._attachments.attached

    def open_epoch(self, epoch: Epoch) -> None:
        """Export own memory under the engine's ``epoch`` and set the rank's life word.

        The life word is set last: before that, no lease on this engine's blocks succeeds.  Blocks
        until the engine has handed out its table, FETCH_SECONDS at most.  Raises SegmentError or
        TransportError; the rank exports nothing then, and ``failed`` gives the reason until an
        epoch is opened.
        """
        self.end_epoch()
        try:
            self.table = self._export(epoch)
        except Exception as exc:  # any; raised again
            self.failed = f"rank {self._attachments.rank} cannot export: {exc}"
            raise
        self.failed = ""
        note_own_epoch(epoch)
        self._attachments.follow(PeerListReader(self._segments.peers_file(epoch)))

    def _export(self, epoch: Epoch) -> RankSlotTable:
        table = self._segments.rank_table(epoch)
        try:
            table.begin_pulse(self._attachments.rank)
            self.transport.export(epoch)
            table.set_life(self._attachments.rank)
        except BaseException:
            table.close()
            raise
        return table

    def end_epoch(self) -> None:
        """Zero the rank's life word, before own memory is freed, remapped or given new meaning.
        Loads under way begin no further copy and deliver nothing."""
        table, self.table = self.table, None
        self._attachments.follow(None)
        if table is not None:
            forget_own_epoch(table.epoch)
            table.end_life(self._attachments.rank)

    def withdraw(self) -> None:
        """Zero the rank's life word now: no lease on own blocks succeeds any more, loads under way
        deliver nothing, and keepers drop their copies.  ``end_epoch`` has to follow on the serving
        thread.  Any thread."""
        if (table := self.table) is not None:
            with suppress(KvshmError, ValueError):  # its epoch has just ended
                table.withdraw()
                table.end_life(self._attachments.rank)

    def begin_load(self, load: LoadOrder) -> None:
        """Start a load; does not block.  Its report comes from ``poll``, exactly once."""
        table = self.table
        new = RankLoad(
            load,
            self._attachments,
            table,
            verify=self._verify,
            clock=self._clock,
            launched=self._launched_work(),
            wake=self._wake,
        )
        self._begun[load.load_id] = new
        self._loads.put(new)
        self._unreported += 1
        self._show_pending()
        if self._attachments.rank == 0 and table is not None:
            table.counters.add(LOADS_STARTED, 1)

    def _launched_work(self) -> object | None:
        """What the model has launched, for the copies that wait for it."""
        return call_optional(self.transport, SupportsLaunchedWork.note_launched).result

    def carries_out(self, load_id: LoadId) -> bool:
        """Whether a load was begun by ``begin_load`` and ``poll`` has yet to report it."""
        return load_id in self._begun

    def cancel(self, load_id: LoadId) -> None:
        """Have a load begun by ``begin_load`` end early; ``poll`` reports all its blocks as bad.
        Does not block.  Nothing happens if it has been reported.  Raises TransportError if the
        load thread has ended and no other can be started."""
        if (load := self._begun.get(load_id)) is not None:
            load.cancel()
            if load.take():  # the load thread has not begun it, and may hang in the copy of another
                while not load.advance():
                    pass  # it has no copies: an error discards it, and then it ends
                self._reports.append(load.report)
            elif not self._thread.is_alive():
                self._thread = self._start_thread()
            self._wake()

    def load_at_once(self, loads: Sequence[LoadOrder], patience: float) -> list[LoadReport]:
        """Carry out loads on the calling thread, which runs the model on their blocks next.

        Blocks for ``patience`` seconds at most, for all loads together, and then until none of
        their copies can write over what the model computes: for the copy of a few megabytes, or
        of one block, at most.  Loads that have not ended by then are reported as lost.  Raises
        MemoryInUse if a copy cannot be stopped: the model must not run.
        """
        table = self.table
        launched = self._launched_work()
        if self._attachments.rank == 0 and table is not None:
            table.counters.add(LOADS_STARTED, len(loads))
        clock, until = self._clock, self._clock() + patience
        ongoing = [
            RankLoad(
                each,
                self._attachments,
                table,
                verify=self._verify,
                until=until,
                clock=clock,
                launched=launched,
            )
            for each in loads
        ]
        reports = []
        with self._attachments.pinned([epoch for load in ongoing for epoch in load.peers]):
            while ongoing:
                ended = [load for load in ongoing if load.advance()]
                reports += [load.report for load in ended]
                ongoing = [load for load in ongoing if load not in ended]
                if not ongoing or clock() >= until:
                    break
                time.sleep(STEP_POLL_SECONDS)  # copies are polled: a GPU wakes no thread
            for load in ongoing:
                self._abandon(load)
                reports.append(load.failed_report(LoadFailure.TOO_LATE))
                self._loads.put(load)  # the load thread releases the leases after the copies
        if (
            self._attachments.rank == 0
            and table is not None
            and (late := sum(_is_late(r) for r in reports))
        ):
            table.counters.add(LOADS_TOO_LATE, late)
        return reports

    def release_memory(self, patience: float) -> int:
        """Own memory is about to be unmapped: end the epoch and all loads, and let no peer attach
        it until the next epoch.

        Returns when nothing here reads or writes it any more and peers have unmapped it, for which
        it waits up to ``patience`` seconds; returns how many mappings peers still have, 0 if the
        transport cannot tell.  Raises MemoryInUse if a copy cannot be stopped: the memory must
        stay.  ``poll`` returns the reports of the loads.
        """
        self.end_epoch()
        withdrawn = call_optional(self.transport, SupportsWithdraw.withdraw)
        for load_id in list(self._begun):
            with suppress(KvshmError):  # it is waited for anyway
                self.cancel(load_id)
        self._wait_until(self._all_ended)
        mapped = withdrawn.result or (lambda: 0)
        until = self._clock() + patience
        while (left := mapped()) and self._clock() < until:
            time.sleep(UNMAP_POLL_SECONDS)
        return left

    def _all_ended(self) -> bool:
        """Whether every load has a report, and no copy of an abandoned one is under way either."""
        return len(self._reports) >= self._unreported and not self._attachments.copying

    def _abandon(self, load: RankLoad) -> None:
        """Wait until no copy of the load writes any more.  A copy that goes on writing would
        overwrite what the model computes in these blocks, now or for a later request."""
        self._wait_until(load.abandon)

    def _wait_until(self, stopped: Callable[[], bool]) -> None:
        """Block until copies have ``stopped``.  Raises MemoryInUse after STUCK_SECONDS."""
        waited, last = 0.0, self._clock()
        while not stopped():
            now = self._clock()
            # While this process was stopped, its copies were stopped as well.
            waited, last = waited + min(now - last, MAX_COUNTED_SECONDS), now
            if waited >= STUCK_SECONDS:
                self.end_epoch()
                raise MemoryInUse(
                    f"rank {self._attachments.rank}: a copy from another engine's cache has not "
                    f"ended {STUCK_SECONDS:g} s after it was cancelled and may still write into "
                    "this one's: the engine cannot go on"
                )
            time.sleep(STEP_POLL_SECONDS)

    def poll(self, linger: float = 0.0) -> list[LoadReport]:
        """Return the reports of the loads that have ended since the last call.  Blocks until all
        loads have ended, for ``linger`` seconds at most."""
        until = self._clock() + linger
        while len(self._reports) < self._unreported and self._clock() < until:
            time.sleep(STEP_POLL_SECONDS)
        reports = [self._reports.popleft() for _ in range(len(self._reports))]
        if reports:
            self._unreported -= len(reports)
            self._show_pending()
        for report in reports:
            self._begun.pop(report.load_id, None)
        return reports

    def hook_took(self, hook: str, nanoseconds: int) -> None:
        """Count the time of one of the rank's hooks (``histograms.HOOKS``), for tools."""
        if self.table is not None:
            self.table.histograms.observe(HOOKS[hook], nanoseconds)

    def _show_pending(self) -> None:
        if self.table is not None:
            self.table.loops.set_pending(self._loop, self._unreported)

    def write_checksums(self, blocks: list[BlockId]) -> None:
        """KVSHM_VERIFY: record the checksums of own blocks that were just computed, before
        they are published.  Blocks while they are hashed."""
        table = self.table
        if table is None or not self._verify or not blocks:
            return
        for block, checksum in zip(blocks, self.transport.checksum(blocks), strict=True):
            table.set_checksum(self._attachments.rank, block, checksum)

    def close(self) -> None:
        """End the epoch, let copies under way end, unmap the peers, close the transport.  Does
        nothing in a forked child, because all of that belongs to the parent."""
        if self._inherited:
            return
        self.end_epoch()
        self._loads.put(_CLOSE)
        self._thread.join(timeout=CLOSE_SECONDS)
        self.transport.close()

    def forget_in_child(self) -> None:
        """Memory and epoch belong to the parent (kvshm/_base/forks.py)."""
        self._inherited = True
        self.table = None

    # -- the load thread

    @property
    def _loop(self) -> int:
        """The load thread's number among the engine's loops."""
        return FIRST_LOAD_THREAD + self._attachments.rank

    def _start_thread(self) -> threading.Thread:
        """Start the load thread, with the loads that one before it has not ended."""
        ended = {report.load_id for report in self._reports}
        left = [load for name, load in self._begun.items() if name not in ended]
        for load in left:
            load.take()  # if the one before it has not
        thread = threading.Thread(target=self._run, args=[left], name="kvshm-loads", daemon=True)
        start_thread(thread)
        return thread

    def _run(self, active: list[RankLoad]) -> None:
        call_optional(self.transport, SupportsThreads.enter_thread)
        while active or not self._closing:
            active = self._go_round(active)
        self._attachments.close()

    def _go_round(self, active: list[RankLoad]) -> list[RankLoad]:
        """Wait for something to do, and do it.  Returns the loads that go on: a separate frame, so
        that nothing keeps those that have ended."""
        # Nothing is polled that tells of its end: the thread that runs the model needs the
        # interpreter.
        pause = POLL_SECONDS if any(load.polled for load in active) else TIDY_SECONDS
        arrived = self._arrived(pause)
        self._closing |= _CLOSE in arrived
        new = (each for each in arrived if isinstance(each, RankLoad) and each.take())
        active = [*active, *new]
        self._went_round()
        ended = [load for load in active if load.advance()]
        active = [load for load in active if load not in ended]
        self._reports.extend(load.report for load in ended if not load.abandoned)
        self._tidying.go_on(lambda: {epoch for load in active for epoch in load.peers})
        return active

    def _arrived(self, pause: float) -> list[RankLoad | str]:
        """All that has come in, after a wait of ``pause`` seconds at most."""
        arrived = []
        with suppress(queue.Empty):
            arrived.append(self._loads.get(timeout=pause))
            while True:
                arrived.append(self._loads.get_nowait())
        return arrived

    def _wake(self) -> None:
        """Have the load thread look at its loads.  Any thread."""
        self._loads.put(_LOOK)

    def _went_round(self) -> None:
        """Show tools that this thread is not stuck."""
        if (table := self.table) is not None:
            with suppress(KvshmError, ValueError):  # its epoch has just ended
                table.loops.went_round(self._loop)


def _is_late(report: LoadReport) -> bool:
    return any(failure.reason is LoadFailure.TOO_LATE for failure in report.failures)
