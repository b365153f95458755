"""How the epochs of one engine begin and end: blocks are published and imported within an epoch.

One begins when the ranks have described themselves, and ends, with everything withdrawn at once,
before weights may be written, when vLLM resets its cache, and when a hook fails.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from kvshm._base.log import logger
from kvshm.config import Config
from kvshm.errors import TransportError
from kvshm.halves import (
    HOOK_ERRORS,
    STILL_MAPPED,
    WEIGHTS_WRITTEN,
    ErrorCode,
    RankBoard,
    SchedulerHalf,
)

from ..log_lines import HookLine
from .descriptions import RankDescriptions
from .expert_ranks import AllShares
from .identity.experts import rest_of
from .identity.fields import with_none_hash
from .messages import RankDescription, RankReport
from .ranks import Descriptions, Ranks

log = logger(__name__)

MOST_NAMED = 100
"""Calls of the ranks that the log names; further ones are not named."""

Fields = Callable[[list[dict[str, str]]], dict[str, str]]
NewFields = Callable[[], dict[str, str] | None]


class Epochs:
    """Runs on the EngineCore's main thread, as the scheduler does."""

    def __init__(
        self,
        cache: SchedulerHalf,
        config: Config,
        num_ranks: int,
        fields: Fields,
        on_end: Callable[[], None],
    ) -> None:
        """``fields`` joins the ranks' fields of the fingerprint.  ``on_end`` is called when an
        epoch has ended, or cannot begin."""
        self._cache, self._config = cache, config
        self._fields, self._on_end = fields, on_end
        self.descriptions = RankDescriptions(num_ranks, time.monotonic)
        self._named_calls: set[str] = set()
        self._written = self._mapped = 0
        self._found: list[str] = []
        """What the next epoch is to record as found written."""
        self.ranks: Ranks | None = None
        self.off = False
        """Whether a hook has failed."""
        self.experts: AllShares | None = None
        """Those of the present epoch, if ranks of other engines hold some."""
        self._board: RankBoard | None = None
        self._announced: int | None = None
        """The last epoch that the ranks were asked to open."""

    def started(
        self, descriptions: Descriptions, ranks: Ranks | None, may_write: Callable[[str], None]
    ) -> None:
        """Take the ranks' descriptions, or ask the ranks if they are None.  ``may_write`` is called
        before later calls of the ranks that may write weights.  Only the first call counts: vLLM
        makes another when the KV cache wakes up, while the weights may sleep."""
        if self.ranks is not None:
            return
        self.ranks = ranks
        if ranks is not None:
            ranks.watch_calls(may_write, self._config.read_only_calls.split(","))
        if descriptions is None and ranks is not None:
            descriptions = ranks.describe()
        self._described(descriptions or {})
        self.check(0)

    def reset(self, soon: bool = True) -> None:
        """Withdraw everything now, and have the ranks describe themselves again: with the next step
        if ``soon``, else later if descriptions have taken much of the time."""
        self._end()
        self.descriptions.want(not self.off, soon)

    def call_may_write(self, call: str) -> None:
        """End the epoch before a call of the ranks that may write weights; log each name once."""
        if call not in self._named_calls and len(self._named_calls) < MOST_NAMED:
            self._named_calls.add(call)
            log.line(HookLine.CALL_MAY_WRITE, call)
        self.reset(soon=False)
        if self.ranks is not None:
            self.ranks.weights_change()

    def turn_off(self, error: str) -> None:
        """Share nothing until the engine is started again: a hook failed, so nothing guards the
        published blocks any more."""
        self._cache.count(HOOK_ERRORS)
        self._cache.log_error(error, ErrorCode.HOOK_FAILED)
        self.off, self.descriptions.wanted = True, False
        self._end()
        self._cache.record_declined(f"kvshm is off until the engine is restarted: {error}")

    def _end(self) -> None:
        """Publish and import nothing until another epoch begins."""
        self._cache.end_epoch()
        self._on_end()
        self.descriptions.forget()
        self.experts = None

    def close(self) -> None:
        """Call when no epoch can begin any more."""
        self.experts = None
        if self._board is not None:
            self._board.close()

    # -- steps

    def newly_opened(self) -> int:
        """Return the epoch that the step being built has the ranks open; mostly none, 0."""
        if (table := self._cache.table) is None or table.epoch == self._announced:
            return 0
        self._announced = table.epoch
        self._record_changes()
        return int(table.epoch)

    def _record_changes(self) -> None:
        """Carry over what the epochs before have counted: each has counters of its own."""
        if self._written:
            self._cache.count(WEIGHTS_WRITTEN, self._written)
        if self._mapped:
            self._cache.count(STILL_MAPPED, self._mapped)
        for text in self._found:
            self._cache.log_error(text, ErrorCode.WEIGHTS_WRITTEN)
        self._found.clear()

    def reported(self, report: RankReport) -> None:
        self._mapped += report.still_mapped
        written = report.written
        self._written += len(written)
        self._found += [f"rank {rank}: weights written: {name}" for rank, name in written.items()]
        if report.failed:
            self.turn_off("a hook of a rank failed: its traceback is in the log")
        elif report.weights_changed:
            self.reset(soon=not report.written)
        elif report.not_opened and self._cache.not_opened(report.not_opened):
            self._on_end()
        if report.descriptions:
            self._described(report.descriptions, report.describes)
        if report.step:
            self.check(report.step)

    def check_experts(self) -> None:
        """End the epoch if experts that other engines hold have changed.  Costs next to nothing
        without such."""
        if self.experts is not None and self.experts.changed():
            self.reset(soon=False)

    def unanswered(self) -> None:
        """No worker runs kvshm's connector: a step has ended without a report."""
        self.descriptions.unanswered()
        self.check(0)

    def check(self, step: int) -> None:
        """Begin no epoch if a description that was due when ``step`` ended is missing: log that,
        stop waiting for descriptions and keep no marks of blocks."""
        if reason := self.descriptions.why_missing(step):
            self._cache.decline(reason)
            self._end()

    def _described(self, ranks: dict[int, RankDescription], answers: int = 0) -> None:
        """Open the next epoch if these were the last descriptions to come.  ``answers``: number of
        the reset after which the ranks were asked."""
        if self.off or (ordered := self.descriptions.take(ranks, answers)) is None:
            return
        if refusal := next((d.refusal for d in ordered if d.refusal), ""):
            self._cache.decline(refusal)
            self._end()
            return
        fields: NewFields = partial(with_none_hash, self._fields([d.fields for d in ordered]))
        if (place := ordered[0].board) is not None:
            try:
                own = [rest_of(d.fields) for d in ordered]
                self._board = self._board or RankBoard(Path(place[0]), place[1])
                self.experts = AllShares(self._board, fields, own, self._cache.decline)
            except TransportError as exc:
                self._cache.decline(str(exc))
                self._end()
                return
            fields = self.experts.fields
            self._on_end()  # until all show theirs, blocks may be of experts that were on their way
        self._cache.open_epoch([d.info for d in ordered if d.info], fields)
