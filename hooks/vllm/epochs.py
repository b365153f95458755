"""How the epochs of one engine begin and end: blocks are published and imported within an epoch.

::

    ranks describe themselves     their KV cache and the digest of their weights: an epoch begins
    the cache is reset, weights
    may be written, a hook fails  the epoch ends: everything is withdrawn at once
    next step that runs the model the ranks are asked again

An engine of which a hook has failed begins no epoch until it is started again.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

from kvshm.config import Config
from kvshm.halves import HOOK_ERRORS, ErrorCode, SchedulerHalf

from .descriptions import RankDescriptions
from .identity.fields import with_none_hash
from .identity.weight_changes import WeightChanges
from .messages import RankDescription, RankReport
from .ranks import Given, Ranks

Fields = Callable[[list[dict[str, str]]], dict[str, str]]


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
        """``fields``: makes the fingerprint's fields of those of the ranks.  ``on_end`` is called
        when an epoch has ended, or cannot begin."""
        self._cache, self._config = cache, config
        self._fields, self._on_end = fields, on_end
        self.descriptions = RankDescriptions(num_ranks, time.monotonic)
        self._changes = WeightChanges(cache)
        self.ranks: Ranks | None = None
        self.off = False
        """Whether a hook has failed."""
        self._announced: int | None = None
        """The last epoch that the ranks were told to open."""

    def started(self, given: Given, ranks: Ranks | None, may_write: Callable[[str], None]) -> None:
        """The ranks have started.  ``given``: their descriptions; None: ask the ranks.
        ``may_write`` is called before later calls of the ranks that may write weights.  vLLM says
        so again when the KV cache wakes up: the weights may sleep then, so no rank is asked."""
        if self.ranks is not None:
            return
        self.ranks = ranks
        if ranks is not None:
            ranks.watch_calls(may_write, self._config.read_only_calls.split(","))
        self._described((ranks.describe() if given is None and ranks else given) or {})
        self.check(0)

    def reset(self, soon: bool = True) -> None:
        """End the epoch: withdraw everything now, and have the ranks describe themselves again.
        Not ``soon``: perhaps for nothing, so later if that has taken much of the time."""
        self._end()
        self.descriptions.want(not self.off, soon)

    def call_may_write(self, call: str) -> None:
        """Somebody is about to call the ranks, and the call may write weights."""
        self._changes.called(call)
        self.reset(soon=False)
        if self.ranks is not None:
            self.ranks.weights_change()

    def turn_off(self, error: str) -> None:
        """A hook failed, so nothing guards the published blocks any more: withdraw them, and share
        nothing until the engine is started again."""
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

    # -- steps

    def newly_opened(self) -> int:
        """Return the epoch that the step being built has the ranks open; mostly none, 0."""
        if (table := self._cache.table) is None or table.epoch == self._announced:
            return 0
        self._announced = table.epoch
        self._changes.epoch_began()
        return int(table.epoch)

    def reported(self, report: RankReport) -> None:
        """The ranks report a step's end, and perhaps more."""
        self._changes.told(report)
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

    def unanswered(self) -> None:
        """A step has ended without a report: no worker runs kvshm's connector."""
        self.descriptions.unanswered()
        self.check(0)

    def check(self, step: int) -> None:
        """``step`` has ended.  If a description that was due by then is missing, no epoch can
        begin: log that, stop waiting for descriptions and keep no marks of blocks."""
        if reason := self.descriptions.why_missing(step):
            self._cache.decline(reason)
            self._end()

    def _described(self, ranks: dict[int, RankDescription], answers: int = 0) -> None:
        """Ranks have described themselves; with the last description the next epoch can begin.
        ``answers``: number of the reset after which they were asked."""
        if self.off or (ordered := self.descriptions.take(ranks, answers)) is None:
            return
        if refusal := next((d.refusal for d in ordered if d.refusal), ""):
            self._cache.decline(refusal)
            self._end()
            return
        fields = self._fields([d.fields for d in ordered])
        infos = [d.info for d in ordered if d.info]
        self._cache.open_epoch(infos, partial(with_none_hash, fields))
