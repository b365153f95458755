"""The scheduler's half of a shared cache: the one face between an engine and kvshm.

``join_cache`` gives a SharedCache.  The engine's scheduler publishes what it has computed,
retracts what it is about to overwrite, probes for prefixes it lacks and begins loads; the
ranks' half (kvshm/rank.py) carries the loads out.  Nothing here knows vLLM.

Methods run on the scheduler's thread unless their docstring says otherwise; none blocks
except ``settle`` (bounded by the drain budget) and ``close``.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple

from .client import CoordinatorClient
from .config import Config
from .costs import Costs
from .counters import IMPORTED_BLOCKS, LOADS_DONE, LOADS_FAILED, LOOKUPS
from .epoch_state import EngineSpec, Founding, Life
from .errors import KvshmError
from .forks import guard_forks
from .handout import Handouts, serve_epoch
from .later import Pause
from .leftovers import clear
from .load_plan import Load, LoadReport, Plan
from .load_planner import Imports
from .log import logger
from .marks import Marks, Run
from .member import Membership
from .peer_list import PeerList
from .peers import Peers
from .protocol import RankInfo
from .publisher import Exports, Lame, Publication
from .rundir import engine_socket, peers_file, start_command
from .slots import SlotTable
from .terms import BlockHash, BlockId, Epoch

log = logger(__name__)

Fields = Mapping[str, str]


@dataclass(frozen=True)
class _Opening:
    """What epochs are begun with: one, unless it cannot begin, or a rank cannot open it."""

    ranks: Sequence[RankInfo]
    fields: Callable[[], Fields | None]
    pause: Pause


class Ended(NamedTuple):
    """One load that all ranks have reported."""

    num_blocks: int
    """Blocks that count; what comes after a gap does not."""
    failed: bool
    """Whether some block has to be computed after all."""


class SharedCache:
    """One engine's place in the node's prefix cache."""

    def __init__(
        self,
        config: Config,
        spec: EngineSpec,
        run_dir: Path,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config
        self._exports = config.exports
        self._spec = spec
        self._place: Path | None = run_dir
        self._run_dir = run_dir
        self._clock = clock
        self._lock = threading.Lock()  # guards _opening and life across the two threads
        self._opening: _Opening | None = None
        self.life: Life | None = None
        """The present epoch, as an object of its own; None without one.  Any thread; only this
        object sets it."""
        self.failed = False
        """Whether the present epoch could not begin, and is to be tried again."""
        self._imports = Imports(config, clock)
        self._ended: list[Ended] = []
        self._left = False
        self._lived: Epoch | None = None
        """The epoch in which all ranks have been seen alive last."""
        self._lame = Lame(self._tables_by_bit)
        member = Membership(
            self._open_when_ready, lambda: self.life, start_command(run_dir, config.namespace)
        )
        self._client = CoordinatorClient(run_dir, config.namespace, member)
        guard_forks(self)

    # -- epochs

    @property
    def epoch(self) -> Epoch | None:
        """The epoch of this cache; None before it is open and between two epochs."""
        life = self.life
        return life.table.epoch if life else None

    @property
    def table(self) -> SlotTable | None:
        """Own slot table of the present epoch.  Any thread."""
        life = self.life
        return life.table if life else None

    @property
    def num_peers(self) -> int:
        """Engines whose blocks may be used at present.  Any thread."""
        life = self.life
        return life.peers.stats().usable if life else 0

    def open_epoch(self, ranks: Sequence[RankInfo], fields: Callable[[], Fields | None]) -> None:
        """Begin an epoch as soon as ``fields`` gives the fingerprint's fields (it is asked on
        the client's thread until then).  From there on ``epoch`` is set, and every rank has
        to open it (``RankCache.open_epoch``) before others can read its blocks.  Where that
        fails, for want of memory, descriptors or threads, it is tried again after a pause."""
        self.end_epoch()
        with self._lock:
            self._opening = _Opening(ranks, fields, Pause(self._clock))
        self._client.rejoin()

    def end_epoch(self) -> None:
        """Withdraw all blocks for good, without waiting: the cache was reset, its weights
        changed, or something went wrong.  Idempotent."""
        with self._lock:
            self._opening, self.failed = None, False
            life, self.life = self.life, None
        if life is not None:
            life.end()
            self._client.rejoin()

    def not_opened(self, epoch: int) -> bool:
        """A rank could not open an epoch: withdraw it, and begin another after a pause.  Returns
        whether it was the present one."""
        with self._lock:
            life = self.life
            if life is None or life.table.epoch != epoch:
                return False
            self.life, self.failed = None, True
        life.end()
        self._client.rejoin()
        return True

    def leave(self) -> None:
        """Tell the others that this engine ends, without waiting for anything: they use its
        blocks no more, and it plans no load.  ``close`` has to follow.  Any thread."""
        self._left = True
        self._client.leave()

    def close(self) -> None:
        """End the epoch and leave the node; where no coordinator runs, clear up after the dead,
        so that the last one leaves nothing behind.  Blocks up to two seconds."""
        self.end_epoch()
        self._client.close(timeout=1.0)
        if self._place is not None:
            try:
                clear(self._place, self._config.namespace, patience=1.0)
            except (KvshmError, OSError) as exc:
                log.debug("nothing cleared up: %s", exc)

    def forget_in_child(self) -> None:
        """The epoch is the parent's: here there is none (kvshm/forks.py)."""
        self._lock = threading.Lock()
        self._opening = self.life = self._place = None

    def _open_when_ready(self) -> Life | None:
        """On the client's thread: the present life, begun now if it is due."""
        with self._lock:
            opening = self._opening
            if self.life is None and opening is not None and opening.pause.over:
                fields = opening.fields()
                if fields is not None:
                    self.life = self._try_to_begin(fields, opening)
            return self.life

    def _try_to_begin(self, fields: Fields, opening: _Opening) -> Life | None:
        opening.pause.tried()  # first: whatever goes wrong, it is not tried all the time
        try:
            life = self._begin(Founding(self._config, self._spec, fields, opening.ranks))
        except (KvshmError, OSError) as exc:  # no memory, descriptors or threads left, for one
            level = logging.DEBUG if self.failed else logging.WARNING
            log.log(level, "not sharing the prefix cache: %s (serving on, unshared)", exc)
            self.failed = True
            return None
        self.failed = False
        return life

    def _begin(self, founding: Founding) -> Life:
        """Raises KvshmError or OSError, leaving nothing behind."""
        run_dir, space, epoch = self._run_dir, self._config.namespace, founding.epoch
        with ExitStack() as undo:
            table = founding.table()
            undo.callback(table.close)
            listed = None  # whoever does not import has nothing to attach
            if self._config.imports:
                listed = PeerList(peers_file(run_dir, space, epoch))
            peers = Peers(space, self._spec.name, epoch, Handouts(run_dir, space), listed=listed)
            undo.callback(peers.close)
            path = engine_socket(run_dir, space, epoch)
            server = serve_epoch(path, table, peers.replica)
            undo.pop_all()
        budget = self._config.step_budget_ms(self._spec.asynchronous) / 1000
        exports = Exports(table, self._client.send_events, self._lame, budget, self._clock)
        return Life(table, exports, peers, server, founding.info(table))

    def _tables_by_bit(self) -> dict[int, SlotTable]:
        life = self.life
        return life.peers.tables_by_bit() if life else {}

    # -- the exporter's side

    def publish(self, blocks: Sequence[Publication]) -> set[BlockId]:
        """Show computed blocks to the others.  The caller vouches that every byte of them
        is written on every rank.  Returns those that are published now."""
        life = self.life
        if life is None or not self._exports:
            return set()
        return life.exports.publish(blocks)

    def publish_computed(self, marks: Marks, pool: Sequence[Any], runs: list[Run]) -> list[Run]:
        """``publish`` for what ``marks`` tells of: shows the runs' blocks that vLLM has hashed,
        and tells the others.  Returns the runs that are not through."""
        life = self.life
        if life is None or not self._exports:
            return runs
        return life.exports.publish_marked(marks, pool, runs)

    def retract(self, blocks: Iterable[BlockId]) -> None:
        """Withdraw published blocks: no lease on them succeeds any more."""
        if (life := self.life) is not None:
            life.exports.retract(blocks)

    def retract_marked(self, marks: Marks, blocks: Sequence[Any]) -> bool:
        """Pool blocks get new contents: clears their marks, and withdraws those that are
        published.  Whether some were."""
        if (life := self.life) is not None:
            return life.exports.retract_marked(marks, blocks)
        marks.clear(blocks)
        return False

    def settle(self) -> None:
        """Call before every dispatch, after the last ``retract`` of its step: when it returns
        nobody holds a lease on a retracted block, and no copy of one will be accepted."""
        if (life := self.life) is not None:
            life.exports.settle()

    def flush(self) -> None:
        """Tell the others of what ``publish`` and ``retract`` changed; never blocks."""
        if (life := self.life) is not None:
            life.exports.flush()

    # -- the importer's side

    def anybody(self) -> bool:
        """Whether there is another engine that ``probe`` could find; if not, that counts as a
        lookup that found nobody."""
        life = self.life
        if life is None or (reason := life.peers.why_nobody()) is None:
            return life is not None
        life.table.counters.add_one_to_both(LOOKUPS, reason)
        return False

    def probe(self, hashes: Sequence[BlockHash | bytes], start: int, stop: int) -> Plan | None:
        """Find who holds blocks ``start`` to ``stop`` of a chain: the longest run from
        ``start`` on.  A pure look at the own replica; None if nobody has the first one, and if no
        load can succeed: this engine leaves, or the coordinator has ended its epoch."""
        life = self.life
        if life is None or self._left or not self._config.imports:
            return None
        plan = self._imports.probe(life, hashes, start, stop)
        return None if plan is None or self._was_ended(life.table) else plan

    def _was_ended(self, table: SlotTable) -> bool:
        """Whether ranks have been alive and are not.  They are not yet before the first step of
        an epoch, with which they open it, and may load."""
        if table.alive:
            self._lived = table.epoch
        elif self._lived == table.epoch:
            return True
        return False

    @property
    def costs(self) -> Costs:
        """What imports and steps take, as far as it is known; the caller feeds the steps."""
        return self._imports.costs

    def copying(self, load: Load) -> float:
        """Seconds that a load is estimated to take."""
        return self.costs.copying(load.nbytes)

    def worth(self, plan: Plan, waiting: float) -> bool:
        """Whether to import what the plan names rather than to compute it.  ``waiting``: seconds
        the request loses beside the copy."""
        return self._imports.worth(self.life, plan, waiting)

    def attached(self, epochs: Collection[int]) -> None:
        """All ranks can read these peers: whoever was avoided because one could not is not."""
        if (life := self.life) is not None:
            life.peers.attached(epochs)

    def begin_load(
        self, plan: Plan, load_id: str, targets: Sequence[BlockId], *, attached: bool = False
    ) -> Load:
        """Lease the plan's blocks and return the load that every rank has to carry out.
        ``attached``: all of them have said that they have its peers' memory open.

        ``targets`` are the own blocks to fill, one per block of the plan.  What cannot be
        leased any more is listed as lost; the load must be given to the ranks all the same.
        """
        return self._imports.begin(self.life, plan, load_id, targets, attached)

    def end_load(self, load: Load, reports: Iterable[LoadReport]) -> set[BlockId]:
        """Account for a load that all ranks have reported; returns the targets that must not
        be used.  Peers that failed are avoided from now on."""
        bad = self._imports.end(self.life, load, reports)
        failed = bool(bad) or not load.pieces
        self.count(LOADS_FAILED if failed else LOADS_DONE)
        targets = [target for piece in load.pieces for target in piece.targets]
        good = [target not in bad for target in targets] if bad else [True] * len(targets)
        self.count(IMPORTED_BLOCKS, sum(good))
        # A block is of use only if everything before it is.
        self._ended.append(Ended(sum(takewhile(bool, good)), failed))
        return bad

    @property
    def any_ended(self) -> bool:
        """Whether ``take_ended`` has anything to tell."""
        return bool(self._ended)

    def take_ended(self) -> list[Ended]:
        """How the loads went that have ended since this was asked last."""
        ended, self._ended = self._ended, []
        return ended

    def count(self, counter: int, amount: int = 1) -> None:
        """Add to a counter of the own table; without an epoch it is lost."""
        if (life := self.life) is not None and amount:
            life.table.counters.add(counter, amount)

    def log_error(self, text: str) -> None:
        """Note an error where ``dump_index`` shows it.  Any thread."""
        if (life := self.life) is not None:
            life.table.log_error(text)


def join_cache(config: Config, spec: EngineSpec, run_dir: Path) -> SharedCache:
    """Return this engine's half of the node's cache; it joins in the background, now or
    whenever a coordinator appears, once ``open_epoch`` was called."""
    log.info("engine %s (pid %d) shares its prefix cache by %s", spec.name, os.getpid(), run_dir)
    return SharedCache(config, spec, run_dir)
