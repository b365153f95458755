"""The importer's side: from a lookup, which only reads, to the end of a load.  Leases are taken
once vLLM has allocated the blocks, and released by the ranks (kvshm/_rank/rank_load.py)."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import groupby, takewhile
from typing import NamedTuple

from kvshm._base.copy_path import CopyPath, slowest
from kvshm._base.core_lines import CoreLine
from kvshm._base.ids import NO_LEASE_BIT, BlockId, Epoch, LeaseBit, LoadId
from kvshm._base.log import LogLimit, logger
from kvshm._base.syncpoints import SyncPoint, sync_point
from kvshm._node.peer import Peer, PlannedRun
from kvshm._shm import statistics as c
from kvshm._shm.layout import RECORD_BYTES
from kvshm._shm.statistics import IMPORT_TIMES, MATCH_LENGTH, Counter
from kvshm.config import Auto, Config
from kvshm.errors import KvshmError

from .costs import MOST_BLOCKS, Costs
from .epoch_state import EpochState, HasEpoch
from .groups import Restorable
from .load_plan import LoadFailure, LoadOrder, LoadReport, Piece, Plan
from .prefix_search import PrefixSearch
from .store_asks import StoreAsks

log = logger(__name__)

PLAN_SECONDS = 5.0
"""An older plan leases nothing, because it is probably out of date."""

_PEERS_FAULT = {
    LoadFailure.UNREACHABLE,
    LoadFailure.COPY_FAILED,
    LoadFailure.MISMATCH,
}
_HINT_WAS_WRONG = {LoadFailure.RECLAIMED, LoadFailure.MISMATCH}
"""All bytes were copied, but are not what the replica's entry says: it goes.  After any other
failure bytes may be missing, and the entry stays for another try."""


class LoadResult(NamedTuple):
    """The result of one load, which all ranks have reported."""

    num_blocks: int
    """Good blocks before the first bad one; later blocks are of no use."""
    length: int
    """Hashes by which they make the prefix longer."""
    failed: bool
    nbytes: int = 0
    """Bytes of these blocks, summed over ranks."""
    taken: tuple[CopyPath, float] | None = None
    """The slowest path of its copies and its slowest rank's seconds; None without copies."""


class LoadPlanner:
    """Plans loads in the present epoch, takes their leases and learns from their results.
    Single-threaded, except ``leaving``; nothing blocks."""

    def __init__(
        self, config: Config, cache: HasEpoch, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._config = config
        self._cache = cache
        self._clock = clock
        self._log_limit = LogLimit(clock=clock)
        self.search = PrefixSearch()
        """Finds prefixes; the caller tells it the engine's KV cache groups."""
        self.common_prefix = 0
        """``Restorable.common`` of the last ``lookup``, or the length that a setting refused."""
        self.costs = Costs()
        """Estimated times of loads and steps; the caller adds the steps."""
        self.results: list[LoadResult] = []
        self.store: StoreAsks
        """Of the keeper that is the client of a store, if there is one; SchedulerHalf sets it."""
        self.leaving = False
        """Set when the engine ends: no load can succeed any more.  Any thread may set it."""

    # -- lookups

    def has_peers(self) -> bool:
        """Whether ``lookup`` could find another engine; if not, the reason is counted."""
        epoch = self._cache.epoch_state
        if epoch is None or (reason := epoch.peers.why_no_peer()) is None:
            return epoch is not None
        epoch.table.counters.add_one_to_both(c.LOOKUPS, reason)
        return False

    def attached(self, epochs: Collection[int]) -> None:
        """All ranks have attached these peers, which may be used again."""
        if (epoch := self._cache.epoch_state) is not None:
            epoch.peers.ranks_attached(epochs)

    def lookup(self, hashes: Sequence[bytes], start: int, stop: int) -> Plan | None:
        """Find the longest prefix of at most ``stop`` hashes that can be restored behind a local
        hit of ``start`` hashes.  Sets ``common_prefix``.  None if there is none, a setting refuses
        it, or no load can succeed: this engine does not import, leaves, is in drain, or has lost a
        rank."""
        self.common_prefix = 0
        epoch = self._cache.epoch_state
        if epoch is None:
            return None
        if epoch.table.in_drain:
            epoch.table.counters.add_one_to_both(c.LOOKUPS, c.MISS_IN_DRAIN)
            return None
        imports = not (self.leaving or self._cache.role.no_imports)
        plan = self._make_plan(epoch, hashes, start, stop) if imports else None
        if not imports or (plan is not None and epoch.has_ended()):
            epoch.table.counters.add(c.MISS_NOT_IMPORTING)
            return None
        return plan

    def _make_plan(
        self, epoch: EpochState, hashes: Sequence[bytes], start: int, stop: int
    ) -> Plan | None:
        table = epoch.table
        found = self.search.longest(epoch, hashes, start, stop, self._config.max_import_blocks)
        self.common_prefix = found.common
        if not found.runs:
            group, scale = (leading := self.search.groups.leading).number, leading.scale
            missed = epoch.peers.why_missed(hashes, start // scale, group=group, scale=scale)
            table.counters.add_one_to_both(c.LOOKUPS, missed)
            return None
        length = found.length - start
        tokens = length * table.block_size
        if (refused := self._why_refused(found, tokens)) is not None:
            self.common_prefix = found.common or found.length
            table.counters.add_one_to_both(c.LOOKUPS, refused)
            return None
        num_blocks = nbytes = 0
        for peer, records in found.runs:  # as every prompt waits for this: no calls
            blocks = len(records) // RECORD_BYTES
            num_blocks, nbytes = num_blocks + blocks, nbytes + blocks * peer.block_bytes
        table.counters.add_match(num_blocks)
        table.histograms.observe(MATCH_LENGTH, tokens)
        return Plan(table.epoch, start, length, found.parts, found.runs, self._clock(), nbytes)

    def _why_refused(self, found: Restorable, tokens: int) -> Counter | None:
        least, most = self._config.min_prefix_tokens, self._config.max_import_blocks
        if least is not Auto.AUTO and tokens < least:
            return c.MISS_TOO_SHORT
        for part in found.parts:
            if part.num_blocks > most:
                return c.MISS_TOO_LONG
        return None

    def hold(self, hashes: Sequence[bytes], seconds: float, group: int = 0) -> int:
        """Ask the engines that have these blocks of a group to hand them out last for ``seconds``,
        an hour at most.  Returns how many were found.  IndexError if there is no such group."""
        epoch = self._cache.epoch_state
        if epoch is None or self.leaving:
            return 0
        return self.search.hold(epoch, hashes, seconds, group)

    def is_current(self, plan: Plan) -> bool:
        """Whether a load could still succeed, as far as the plan's peers go."""
        epoch = self._cache.epoch_state
        if epoch is None or self.leaving or epoch.has_ended():
            return False
        return all(run.peer is epoch.own_peer or epoch.peers.may_use(run.peer) for run in plan.runs)

    def worth(self, plan: Plan, waiting: float) -> bool:
        """Whether to import the plan's blocks rather than compute them: by ``min_prefix_tokens``,
        by estimate, or as a trial.  ``waiting``: seconds of delay besides the copy."""
        epoch = self._cache.epoch_state
        if epoch is None or self._config.min_prefix_tokens is not Auto.AUTO:
            return True
        tokens = plan.length * epoch.table.block_size
        if self.costs.worth(tokens, plan.nbytes, waiting):
            return True
        tried = self.costs.try_anyway()
        epoch.table.counters.add(c.TRIED if tried else c.MISS_CHEAPER)
        return tried

    def computes_within(self, tokens: int, seconds: float) -> bool:
        """Whether computing these tokens is estimated to take less time than that."""
        return self.computing_seconds(tokens) < seconds

    def computing_seconds(self, tokens: int) -> float:
        """What computing these tokens is estimated to take: infinity before a prefill was measured,
        and where ``min_prefix_tokens`` says what to import."""
        computing = self.costs.compute_seconds(tokens)
        by_estimate = self._config.min_prefix_tokens is Auto.AUTO
        return computing if by_estimate and computing is not None else math.inf

    def imported_blocks(self, epoch: EpochState) -> tuple[int, int]:
        """The fewest and most blocks of a prefix that would be imported, about: by
        ``min_prefix_tokens`` or by estimate, and by ``max_import_blocks``."""
        size, least = epoch.table.block_size, self._config.min_prefix_tokens
        if least is Auto.AUTO:
            blocks = self.costs.least_blocks(size, epoch.own_peer.block_bytes)
        else:
            blocks = -(-least // size)
        return min(blocks, MOST_BLOCKS), min(self._config.max_import_blocks, MOST_BLOCKS)

    def load_seconds(self, load: LoadOrder) -> float:
        """Seconds that a load is estimated to take."""
        return self.costs.load_seconds(load.nbytes)

    # -- loads

    def load(
        self, plan: Plan, load_id: LoadId, targets: Sequence[BlockId], *, attached: bool = False
    ) -> LoadOrder:
        """Lease the plan's blocks, and return the load that every rank has to carry out, even if
        all are lost.  ``attached``: all ranks have attached the plan's peers.

        ``targets``: the own blocks to fill, one per block of the plan; lost from the first on whose
        source cannot be leased, or all unless the engine has one group of full attention.
        """
        epoch = self._cache.epoch_state
        all_lost = LoadOrder.of_nothing(load_id, targets)
        if epoch is None or epoch.table.epoch != plan.epoch:
            return all_lost
        table = epoch.table
        fresh = self._clock() - plan.made_at <= PLAN_SECONDS
        ticket = table.take_ticket(table.num_ranks) if fresh else None
        if ticket is None:
            table.counters.add(c.MISS_LEASE_LOST)
            return all_lost
        bit = table.lease_bit  # read once: a rejoin may change it
        runs = _joined(plan.runs)
        pieces = tuple(self._lease(epoch, bit, runs, targets, attached))
        leased = sum(len(piece.targets) for piece in pieces)
        sync_point(SyncPoint.LOAD_PLANNED)
        table.counters.add(c.LEASE_LOST, len(targets) - leased)
        length = leased if self.search.groups.is_single_full_attention else plan.length
        if leased < len(targets) and not self.search.groups.is_single_full_attention:
            _give_back(runs, bit, pieces)
            pieces, leased = (), 0
        table.counters.add(c.MISS_LEASE_LOST, 0 if leased else 1)
        return LoadOrder(load_id, table.epoch, ticket, bit, pieces, tuple(targets[leased:]), length)

    def find_blocks(self, wanted: Iterable[tuple[bytes, int]]) -> Plan | None:
        """Find single blocks, each named by key and group, whatever lies before them in a prefix.
        Those that no usable peer seems to hold are left out.  Counts nothing: no prompt asks."""
        epoch = self._cache.epoch_state
        if epoch is None or self.leaving or self._cache.role.no_imports or epoch.has_ended():
            return None
        lookup = epoch.peers.lookup
        runs = tuple(run for key, group in wanted for run in lookup([key], 0, 1, group=group))
        nbytes = sum(run.peer.block_bytes for run in runs)
        return Plan(epoch.table.epoch, 0, 0, (), runs, self._clock(), nbytes) if runs else None

    def load_blocks(self, plan: Plan, load_id: LoadId, targets: Sequence[BlockId]) -> LoadOrder:
        """Return the load of a plan of ``find_blocks``, which every rank has to carry out.  Takes
        no leases, so no exporter waits for it: the re-check alone decides about each block."""
        epoch = self._cache.epoch_state
        fresh = self._clock() - plan.made_at <= PLAN_SECONDS
        ticket = None
        if fresh and epoch is not None and epoch.table.epoch == plan.epoch:
            ticket = epoch.table.take_ticket(epoch.table.num_ranks)
        if epoch is None or ticket is None:
            return replace(LoadOrder.of_nothing(load_id, targets), apart=True)
        there: dict[Epoch, tuple[Peer, list[bytes], list[BlockId]]] = {}
        lost = list[BlockId]()
        for (peer, record), target in zip(plan.runs, targets, strict=True):
            if self._is_there(epoch, peer, record):
                of = there.setdefault(Epoch(peer.info.epoch), (peer, [], []))
                of[1].append(record)
                of[2].append(target)
            else:
                lost.append(target)
        pieces = tuple(_untaken(*of) for of in there.values())
        sync_point(SyncPoint.LOAD_PLANNED)
        own = epoch.table.epoch
        return LoadOrder(load_id, own, ticket, NO_LEASE_BIT, pieces, tuple(lost), apart=True)

    def _is_there(self, epoch: EpochState, peer: Peer, record: bytes) -> bool:
        """Whether a peer still has a block; if not, the hint goes."""
        try:
            serving, (found, _) = peer.table.alive, peer.table.lease(NO_LEASE_BIT, record)
        except KvshmError:  # a table that somebody spoilt
            return False
        if not found and serving:
            epoch.peers.forget(Epoch(peer.info.epoch), record)
        return bool(found)

    def _lease(
        self,
        epoch: EpochState,
        bit: LeaseBit,
        runs: Iterable[PlannedRun],
        targets: Sequence[BlockId],
        attached: bool,
    ) -> Iterator[Piece]:
        done = 0
        for peer, records in runs:
            serving = True
            try:
                # Before the lease, since the ranks may open the epoch in between.
                serving = peer.table.alive
                own = peer.info.epoch == epoch.table.epoch
                leased, taken = peer.table.lease(NO_LEASE_BIT if own else bit, records)
            except KvshmError as exc:
                who = peer.info.log_name
                if self._log_limit.allows(CoreLine.LEASE_FAILED, who):
                    log.line(CoreLine.LEASE_FAILED, who, exc)
                leased, taken = 0, b""
            first_lost = leased * RECORD_BYTES
            if leased:
                epoch.table.count_lease_batch()
                epoch.table.counters.add(c.LEASES_TAKEN, sum(taken))
                yield Piece(
                    peer_epoch=Epoch(peer.info.epoch),
                    memory=() if attached else tuple(rank.memory for rank in peer.info.ranks),
                    records=records[:first_lost],
                    taken=taken[:leased],
                    targets=tuple(targets[done : done + leased]),
                    block_bytes=peer.block_bytes,
                )
            done += leased
            if first_lost < len(records):
                if serving:  # the peer reused the block: let the next lookup find another
                    lost = records[first_lost : first_lost + RECORD_BYTES]
                    epoch.peers.forget(Epoch(peer.info.epoch), lost)
                else:  # the block is as it was, and must not be forgotten
                    epoch.peers.rank_not_attached(Epoch(peer.info.epoch))
                return

    def end_load(self, load: LoadOrder, reports: Iterable[LoadReport]) -> set[BlockId]:
        """Account for a load that all ranks have reported.  Returns the targets that must not be
        used: those that any rank reports as bad, or all if a part is of no use, or if the load's
        epoch has ended, because blocks of old weights must not be published in the next one."""
        epoch, reports, targets = self._cache.epoch_state, list(reports), load.targets
        bad = {*load.lost, *(target for report in reports for target in report.bad)}
        if epoch is None or epoch.table.epoch != load.epoch:
            bad.update(targets)
        failed = bool(bad) or not load.pieces
        whole = self.search.groups.is_single_full_attention  # every beginning of it is of use
        if failed and not (whole or load.apart):
            bad.update(targets)
        good = [target not in bad for target in targets]
        # A block is usable only if all blocks before it are.
        usable = sum(takewhile(bool, good))
        length = usable if whole and not load.apart else load.length * (not failed)
        nbytes = load.bytes_of(usable) * epoch.table.num_ranks if epoch is not None else 0
        self.results.append(LoadResult(usable, length, failed, nbytes, _time_taken(reports)))
        if epoch is not None:
            epoch.table.counters.add(c.LOADS_FAILED if failed else c.LOADS_DONE)
            epoch.table.counters.add(c.IMPORTED_BLOCKS, sum(good))
            epoch.table.counters.add(c.IMPORTED_TOKENS, length * epoch.table.block_size)
            self._learn(epoch, load, reports)
            _record_traffic(epoch, load, reports, bad)
            self._update_peers(epoch, load, reports)
        return bad

    def take_results(self) -> list[LoadResult]:
        """Return the results of the loads that have ended since the last call."""
        results, self.results = self.results, []
        return results

    def _learn(self, epoch: EpochState, load: LoadOrder, reports: Sequence[LoadReport]) -> None:
        """Add the load's time on its slowest rank, or if cut short only if it was long."""
        seconds = max((report.seconds for report in reports), default=0.0)
        reasons = {failure.reason for report in reports for failure in report.failures}
        if not load.nbytes or not seconds:
            return
        expected = self.costs.load_seconds(load.nbytes)
        if seconds <= expected and not reasons <= _HINT_WAS_WRONG:
            return
        tokens = load.length * epoch.table.block_size
        computing = self.costs.compute_seconds(tokens) or 0.0
        seen = ((c.ESTIMATED_US, expected), (c.MEASURED_US, seconds), (c.COMPUTING_US, computing))
        for counter, value in seen:
            epoch.table.counters.add(counter, int(value * 1e6))
        self.costs.add_load(load.nbytes, seconds)

    @staticmethod
    def _update_peers(epoch: EpochState, load: LoadOrder, reports: Sequence[LoadReport]) -> None:
        """Record each peer's success or failure, and forget blocks whose hint was wrong."""
        at_fault: set[Epoch] = set()
        for failure in (failure for report in reports for failure in report.failures):
            if failure.reason in _HINT_WAS_WRONG:
                epoch.peers.forget(failure.peer_epoch, failure.records)
            if failure.reason is LoadFailure.NOT_ATTACHED:
                epoch.peers.rank_not_attached(failure.peer_epoch)
            if failure.reason in _PEERS_FAULT:
                at_fault.add(failure.peer_epoch)
        for piece in load.pieces:
            if piece.peer_epoch not in at_fault:
                epoch.peers.load_succeeded(piece.peer_epoch)
            elif epoch.peers.load_failed(piece.peer_epoch):
                epoch.table.counters.add(c.QUARANTINES)


def _untaken(peer: Peer, records: Sequence[bytes], targets: Sequence[BlockId]) -> Piece:
    """A piece of blocks that are not leased."""
    return Piece(
        peer_epoch=Epoch(peer.info.epoch),
        memory=tuple(rank.memory for rank in peer.info.ranks),
        records=b"".join(records),
        taken=bytes(len(records)),
        targets=tuple(targets),
        block_bytes=peer.block_bytes,
    )


def _joined(runs: Iterable[PlannedRun]) -> list[PlannedRun]:
    """The same blocks, cut only where the peer changes, and not at each group: a run is leased and
    copied by itself."""
    by_peer = groupby(runs, lambda run: run.peer)
    return [PlannedRun(peer, b"".join(run.records for run in same)) for peer, same in by_peer]


def _give_back(runs: Sequence[PlannedRun], bit: LeaseBit, pieces: Sequence[Piece]) -> None:
    for run, piece in zip(runs, pieces, strict=False):
        if bit >= 0 and any(piece.taken):
            with suppress(KvshmError):  # the exporter takes them back after one drain budget
                run.peer.table.release(bit, piece.records, piece.taken)


def _time_taken(reports: Sequence[LoadReport]) -> tuple[CopyPath, float] | None:
    """Return the slowest path of a load's copies, and the seconds of its slowest rank.  None if
    nothing was copied."""
    took = max((report.seconds for report in reports), default=0.0)
    used = {path for report in reports for path in report.paths if path is not None}
    return (slowest(used), took) if used and took else None


def _record_traffic(
    epoch: EpochState, load: LoadOrder, reports: Sequence[LoadReport], bad: Collection[BlockId]
) -> None:
    """Add a load that all ranks have reported.  Its peers share a rank's time by bytes."""
    took = max((report.seconds for report in reports), default=0.0)
    if (taken := _time_taken(reports)) is not None:
        epoch.table.histograms.observe(IMPORT_TIMES[taken[0]], round(taken[1] * 1e9))
    for place, piece in enumerate(load.pieces):
        own = piece.peer_epoch == epoch.table.epoch
        paths = [report.paths[place] for report in reports if len(report.paths) > place]
        copied = [path for path in paths if path is not None]
        nbytes = piece.block_bytes * len(piece.targets)
        epoch.table.traffic.add(
            epoch.peers.name_of(piece.peer_epoch),
            piece.peer_epoch,
            CopyPath.OWN if own else slowest(copied) if copied else None,
            loads=1,
            failed=any(target in bad for target in piece.targets),
            blocks=len(piece.targets) * len(copied),
            nbytes=nbytes * len(copied),
            seconds=took * nbytes / load.nbytes if copied else 0.0,
        )
