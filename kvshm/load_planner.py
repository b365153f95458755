"""The importer's side: from a probe of the replica to the end of a load.

Runs on the scheduler's thread.  A probe is a pure look; leases are taken when blocks have
been allocated, and given back by the ranks (kvshm/rank_load.py).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence

from . import counters as c
from .config import Auto, Config
from .costs import Costs
from .epoch_state import Life
from .errors import KvshmError
from .load_plan import (
    NO_TICKET,
    Load,
    LoadFailure,
    LoadReport,
    Piece,
    Plan,
    PlannedRun,
)
from .log import Seldom, logger
from .records import RECORD_BYTES
from .syncpoints import SyncPoint, sync_point
from .terms import NO_LEASE_BIT, BlockId, Epoch, LeaseBit

log = logger(__name__)

PLAN_SECONDS = 5.0
"""A plan older than this leases nothing: what it says is too likely to be untrue."""

_PEERS_FAULT = {
    LoadFailure.UNREACHABLE,
    LoadFailure.COPY_FAILED,
    LoadFailure.MISMATCH,
}
_COPIED_ALL_THE_SAME = {LoadFailure.RECLAIMED, LoadFailure.MISMATCH}
"""Anything else that fails may have kept bytes from being copied."""
_HINT_WAS_WRONG = {LoadFailure.RECLAIMED, LoadFailure.MISMATCH}
"""The block is not, or no longer, what the replica says; the others may just be tried again."""


class Imports:
    """Plans loads, takes their leases and learns from how they end."""

    def __init__(self, config: Config, clock: Callable[[], float] = time.monotonic) -> None:
        self._config = config
        self._clock = clock
        self.costs = Costs()
        self._seldom = Seldom(clock)

    def probe(self, life: Life, hashes: Sequence[bytes], start: int, stop: int) -> Plan | None:
        """The longest run of blocks from ``start`` on that usable peers seem to hold."""
        count = life.table.counters.add
        count(c.LOOKUPS, 1)
        stop = min(stop, start + self._config.max_import_blocks)
        runs = life.peers.lookup(hashes, start, stop)
        found = nbytes = 0
        for peer, records in runs:
            found += (blocks := len(records) // RECORD_BYTES)
            nbytes += blocks * peer.block_bytes
        if not found:
            count(life.peers.why_missed(hashes, start), 1)
            return None
        least = self._config.min_prefix_tokens
        if least is not Auto.AUTO and found * life.table.block_size < least:
            count(c.MISS_TOO_SHORT, 1)
            return None
        count(c.LOOKUP_HITS, 1)
        count(c.BLOCKS_MATCHED, found)
        return Plan(life.table.epoch, start, tuple(runs), self._clock(), nbytes)

    def worth(self, life: Life | None, plan: Plan, waiting: float) -> bool:
        """Whether importing is faster than computing, or is tried to see whether it still is
        not, where a setting does not decide that.
        ``waiting``: seconds the request loses beside the copy."""
        if life is None or self._config.min_prefix_tokens is not Auto.AUTO:
            return True
        tokens = plan.num_blocks * life.table.block_size
        if self.costs.worth(tokens, plan.nbytes, waiting):
            return True
        tried = self.costs.tries()
        life.table.counters.add(c.TRIED if tried else c.MISS_CHEAPER)
        return tried

    def begin(
        self,
        life: Life | None,
        plan: Plan,
        load_id: str,
        targets: Sequence[BlockId],
        attached: bool = False,
    ) -> Load:
        """Lease what the plan names, as far as it goes without a gap.  ``attached``: all ranks
        have its peers' memory open, and need not be told where it lies."""
        nothing = Load(load_id, Epoch(0), NO_TICKET, NO_LEASE_BIT, (), tuple(targets))
        if life is None or life.table.epoch != plan.epoch:
            return nothing
        fresh = self._clock() - plan.made_at <= PLAN_SECONDS
        ticket = life.table.take_ticket(life.table.num_ranks) if fresh else None
        if ticket is None:
            life.table.counters.add(c.MISS_LEASE_LOST)
            return nothing
        bit = life.table.lease_bit  # read once: a rejoin may bring another one
        pieces = tuple(self._lease(life, bit, plan, targets, attached))
        leased = sum(len(piece.targets) for piece in pieces)
        sync_point(SyncPoint.LOAD_PLANNED)
        life.table.counters.add(c.LEASE_LOST, len(targets) - leased)
        life.table.counters.add(c.MISS_LEASE_LOST, 0 if leased else 1)
        return Load(load_id, life.table.epoch, ticket, bit, pieces, tuple(targets[leased:]))

    def _lease(
        self,
        life: Life,
        bit: LeaseBit,
        plan: Plan,
        targets: Sequence[BlockId],
        attached: bool,
    ) -> Iterator[Piece]:
        done = 0
        for run in plan.runs:
            wanted = len(run.records) // RECORD_BYTES
            try:
                leased, taken = run.peer.table.lease(bit, run.records)
            except KvshmError as exc:
                text = f"cannot lease from engine {run.peer.info.name}: {exc}"
                if self._seldom.passes(text):
                    log.warning("%s", text)
                leased, taken = 0, b""
            if leased:
                life.table.leases_taken += 1
                life.table.counters.add(c.LEASES_TAKEN, sum(taken))
                ranks = () if attached else run.peer.info.ranks
                yield Piece(
                    peer=Epoch(run.peer.info.epoch),
                    memory=tuple(rank.memory for rank in ranks),
                    records=run.records[: leased * RECORD_BYTES],
                    taken=taken[:leased],
                    targets=tuple(targets[done : done + leased]),
                    block_bytes=run.peer.block_bytes,
                )
            done += leased
            if leased < wanted:
                self._forget(life, run, leased)
                return

    def _forget(self, life: Life, run: PlannedRun, index: int) -> None:
        """What could not be leased is no longer there: try the next owner next time."""
        record = run.records[index * RECORD_BYTES : (index + 1) * RECORD_BYTES]
        life.peers.forget(Epoch(run.peer.info.epoch), record)

    def end(self, life: Life | None, load: Load, reports: Iterable[LoadReport]) -> set[BlockId]:
        """Targets that must not be used, as any rank says; peers are judged by the way.

        A load does not outlive its own epoch, which may have ended since its ranks looked:
        what was computed with the old weights must not be shown in the next epoch.
        """
        bad: set[BlockId] = set(load.lost)
        if life is None or life.table.epoch != load.epoch:
            bad.update(target for piece in load.pieces for target in piece.targets)
        at_fault: set[Epoch] = set()
        reports = list(reports)
        self._learn(life, load, reports)
        for report in reports:
            bad.update(report.bad)
            for failure in report.failures:
                if life is not None and failure.reason in _HINT_WAS_WRONG:
                    life.peers.forget(failure.peer, failure.records)
                if failure.reason is LoadFailure.NOT_ATTACHED and life is not None:
                    life.peers.not_attached(failure.peer)
                if failure.reason in _PEERS_FAULT:
                    at_fault.add(failure.peer)
        if life is not None:
            for piece in load.pieces:
                self._judge(life, piece.peer, piece.peer in at_fault)
        return bad

    def _learn(self, life: Life | None, load: Load, reports: Sequence[LoadReport]) -> None:
        """Compare what the load took, on its slowest rank, with what was expected of it.  One
        that did not copy all of it shows only that it takes longer."""
        seconds = max((report.seconds for report in reports), default=0.0)
        reasons = {failure.reason for report in reports for failure in report.failures}
        blocks = sum(len(piece.targets) for piece in load.pieces)
        nbytes = load.nbytes
        if life is None or not nbytes or not seconds:
            return
        expected = self.costs.copying(nbytes)
        if seconds <= expected and not reasons <= _COPIED_ALL_THE_SAME:
            return
        computing = self.costs.computing(blocks * life.table.block_size) or 0.0
        seen = ((c.ESTIMATED_US, expected), (c.MEASURED_US, seconds), (c.COMPUTING_US, computing))
        for counter, value in seen:
            life.table.counters.add(counter, int(value * 1e6))
        self.costs.load(nbytes, seconds)

    @staticmethod
    def _judge(life: Life, peer: Epoch, at_fault: bool) -> None:
        if not at_fault:
            life.peers.fine(peer)
        elif life.peers.fail(peer):
            life.table.counters.add(c.QUARANTINES)
