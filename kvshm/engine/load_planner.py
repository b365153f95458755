"""The importer's side: from a probe of the replica to the end of a load.

Runs on the scheduler's thread.  A probe is a pure look; leases are taken when blocks have
been allocated, and given back by the ranks (kvshm/rank/rank_load.py).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from itertools import takewhile
from typing import NamedTuple

from kvshm.config import Auto, Config
from kvshm.errors import KvshmError
from kvshm.ids import NO_LEASE_BIT, BlockHash, BlockId, Epoch, LeaseBit
from kvshm.log import RateLimit, logger
from kvshm.shm import counters as c
from kvshm.shm.layout import RECORD_BYTES
from kvshm.syncpoints import SyncPoint, sync_point

from .costs import Costs
from .epoch_state import EpochState, HasEpoch
from .load_plan import NO_TICKET, Load, LoadFailure, LoadReport, Piece, Plan

log = logger(__name__)

PLAN_SECONDS = 5.0
"""A plan older than this leases nothing: what it says is too likely to be untrue."""

_PEERS_FAULT = {
    LoadFailure.UNREACHABLE,
    LoadFailure.COPY_FAILED,
    LoadFailure.MISMATCH,
}
_HINT_WAS_WRONG = {LoadFailure.RECLAIMED, LoadFailure.MISMATCH}
"""All bytes were copied, but the block is not, or no longer, what the replica says.  Where
something else has failed, bytes may have been left out, and the block may just be tried again."""


class Ended(NamedTuple):
    """One load that all ranks have reported."""

    num_blocks: int
    """Blocks that count; what comes after a gap does not."""
    failed: bool
    """Whether some block has to be computed after all."""


class LoadPlanner:
    """Plans loads in whatever epoch is present, takes their leases and learns from how they end.
    Single-threaded, but for ``leaving``; nothing blocks."""

    def __init__(
        self, config: Config, cache: HasEpoch, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._config = config
        self._cache = cache
        self._clock = clock
        self._log_limit = RateLimit(clock)
        self.costs = Costs()
        """What imports and steps take, as far as it is known; the caller feeds the steps."""
        self.ended: list[Ended] = []
        """How the loads went that have ended since ``take_ended`` was asked last."""
        self.leaving = False
        """The engine ends: no load can succeed any more.  Any thread may say so."""

    # -- looking

    def anybody(self) -> bool:
        """Whether there is another engine that ``probe`` could find; if not, that counts as a
        lookup that found nobody."""
        epoch = self._cache.epoch_state
        if epoch is None or (reason := epoch.peers.why_nobody()) is None:
            return epoch is not None
        epoch.table.counters.add_one_to_both(c.LOOKUPS, reason)
        return False

    def attached(self, epochs: Collection[int]) -> None:
        """All ranks can read these peers: whoever was avoided because one could not is not."""
        if (epoch := self._cache.epoch_state) is not None:
            epoch.peers.attached(epochs)

    def probe(self, hashes: Sequence[BlockHash | bytes], start: int, stop: int) -> Plan | None:
        """Find who holds blocks ``start`` to ``stop`` of a chain: the longest run from ``start``
        on that usable peers seem to hold.  A pure look at the own replica; None if nobody has
        the first one, and if no load can succeed: this engine leaves, or the coordinator has
        ended its epoch."""
        epoch = self._cache.epoch_state
        if epoch is None or self.leaving or not self._config.imports:
            return None
        plan = self._matched(epoch, hashes, start, stop)
        return None if plan is None or epoch.was_ended() else plan

    def _matched(
        self, epoch: EpochState, hashes: Sequence[bytes], start: int, stop: int
    ) -> Plan | None:
        count = epoch.table.counters.add
        count(c.LOOKUPS, 1)
        stop = min(stop, start + self._config.max_import_blocks)
        runs = epoch.peers.lookup(hashes, start, stop)
        found = nbytes = 0
        for peer, records in runs:
            found += (blocks := len(records) // RECORD_BYTES)
            nbytes += blocks * peer.block_bytes
        if not found:
            count(epoch.peers.why_missed(hashes, start), 1)
            return None
        least = self._config.min_prefix_tokens
        if least is not Auto.AUTO and found * epoch.table.block_size < least:
            count(c.MISS_TOO_SHORT, 1)
            return None
        count(c.LOOKUP_HITS, 1)
        count(c.BLOCKS_MATCHED, found)
        return Plan(epoch.table.epoch, start, tuple(runs), self._clock(), nbytes)

    def worth(self, plan: Plan, waiting: float) -> bool:
        """Whether to import what the plan names rather than to compute it, where a setting does
        not decide that: whether it is faster, or is tried to see whether it still is not.
        ``waiting``: seconds the request loses beside the copy."""
        epoch = self._cache.epoch_state
        if epoch is None or self._config.min_prefix_tokens is not Auto.AUTO:
            return True
        tokens = plan.num_blocks * epoch.table.block_size
        if self.costs.worth(tokens, plan.nbytes, waiting):
            return True
        tried = self.costs.tries()
        epoch.table.counters.add(c.TRIED if tried else c.MISS_CHEAPER)
        return tried

    def copying(self, load: Load) -> float:
        """Seconds that a load is estimated to take."""
        return self.costs.copying(load.nbytes)

    # -- loads

    def begin(
        self, plan: Plan, load_id: str, targets: Sequence[BlockId], *, attached: bool = False
    ) -> Load:
        """Lease what the plan names, as far as it goes without a gap, and return the load that
        every rank has to carry out.  ``attached``: all of them have said that they have its
        peers' memory open, and need not be told where it lies.

        ``targets`` are the own blocks to fill, one per block of the plan.  What cannot be
        leased any more is listed as lost; the load must be given to the ranks all the same.
        """
        epoch = self._cache.epoch_state
        nothing = Load(load_id, Epoch(0), NO_TICKET, NO_LEASE_BIT, (), tuple(targets))
        if epoch is None or epoch.table.epoch != plan.epoch:
            return nothing
        table = epoch.table
        fresh = self._clock() - plan.made_at <= PLAN_SECONDS
        ticket = table.take_ticket(table.num_ranks) if fresh else None
        if ticket is None:
            table.counters.add(c.MISS_LEASE_LOST)
            return nothing
        bit = table.lease_bit  # read once: a rejoin may bring another one
        pieces = tuple(self._lease(epoch, bit, plan, targets, attached))
        leased = sum(len(piece.targets) for piece in pieces)
        sync_point(SyncPoint.LOAD_PLANNED)
        table.counters.add(c.LEASE_LOST, len(targets) - leased)
        table.counters.add(c.MISS_LEASE_LOST, 0 if leased else 1)
        return Load(load_id, table.epoch, ticket, bit, pieces, tuple(targets[leased:]))

    def _lease(
        self,
        epoch: EpochState,
        bit: LeaseBit,
        plan: Plan,
        targets: Sequence[BlockId],
        attached: bool,
    ) -> Iterator[Piece]:
        done = 0
        for peer, records in plan.runs:
            try:
                leased, taken = peer.table.lease(bit, records)
            except KvshmError as exc:
                text = f"cannot lease from engine {peer.info.name}: {exc}"
                if self._log_limit.allows(text):
                    log.warning("%s", text)
                leased, taken = 0, b""
            first_lost = leased * RECORD_BYTES
            if leased:
                epoch.table.count_lease_batch()
                epoch.table.counters.add(c.LEASES_TAKEN, sum(taken))
                yield Piece(
                    peer=Epoch(peer.info.epoch),
                    memory=() if attached else tuple(rank.memory for rank in peer.info.ranks),
                    records=records[:first_lost],
                    taken=taken[:leased],
                    targets=tuple(targets[done : done + leased]),
                    block_bytes=peer.block_bytes,
                )
            done += leased
            if first_lost < len(records):  # no longer there: try the next owner next time
                lost = records[first_lost : first_lost + RECORD_BYTES]
                epoch.peers.forget(Epoch(peer.info.epoch), lost)
                return

    def end(self, load: Load, reports: Iterable[LoadReport]) -> set[BlockId]:
        """Account for a load that all ranks have reported; returns the targets that must not be
        used, as any rank says.  Peers that failed are avoided from now on.

        A load does not outlive its own epoch, which may have ended since its ranks looked:
        what was computed with the old weights must not be shown in the next epoch.
        """
        epoch, reports, targets = self._cache.epoch_state, list(reports), load.targets
        bad = {*load.lost, *(target for report in reports for target in report.bad)}
        if epoch is None or epoch.table.epoch != load.epoch:
            bad.update(targets)
        failed = bool(bad) or not load.pieces
        good = [target not in bad for target in targets]
        # A block is of use only if everything before it is.
        self.ended.append(Ended(sum(takewhile(bool, good)), failed))
        if epoch is not None:
            epoch.table.counters.add(c.LOADS_FAILED if failed else c.LOADS_DONE)
            epoch.table.counters.add(c.IMPORTED_BLOCKS, sum(good))
            self._learn(epoch, load, reports)
            self._judge(epoch, load, reports)
        return bad

    def take_ended(self) -> list[Ended]:
        """How the loads went that have ended since this was asked last."""
        ended, self.ended = self.ended, []
        return ended

    def _learn(self, epoch: EpochState, load: Load, reports: Sequence[LoadReport]) -> None:
        """Compare what the load took, on its slowest rank, with what was expected of it.  One
        that did not copy all of it shows only that it takes longer."""
        seconds = max((report.seconds for report in reports), default=0.0)
        reasons = {failure.reason for report in reports for failure in report.failures}
        if not load.nbytes or not seconds:
            return
        expected = self.costs.copying(load.nbytes)
        if seconds <= expected and not reasons <= _HINT_WAS_WRONG:
            return
        tokens = len(load.targets) * epoch.table.block_size
        computing = self.costs.computing(tokens) or 0.0
        seen = ((c.ESTIMATED_US, expected), (c.MEASURED_US, seconds), (c.COMPUTING_US, computing))
        for counter, value in seen:
            epoch.table.counters.add(counter, int(value * 1e6))
        self.costs.load(load.nbytes, seconds)

    @staticmethod
    def _judge(epoch: EpochState, load: Load, reports: Sequence[LoadReport]) -> None:
        """Say of each peer how its part of the load went, and of what nothing is to be expected."""
        at_fault: set[Epoch] = set()
        for failure in (failure for report in reports for failure in report.failures):
            if failure.reason in _HINT_WAS_WRONG:
                epoch.peers.forget(failure.peer, failure.records)
            if failure.reason is LoadFailure.NOT_ATTACHED:
                epoch.peers.not_attached(failure.peer)
            if failure.reason in _PEERS_FAULT:
                at_fault.add(failure.peer)
        for piece in load.pieces:
            if piece.peer not in at_fault:
                epoch.peers.fine(piece.peer)
            elif epoch.peers.fail(piece.peer):
                epoch.table.counters.add(c.QUARANTINES)
