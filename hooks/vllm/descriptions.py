"""The ranks' descriptions, of which an engine's next epoch is made: when to ask, who has answered.

A description digests all weights and holds a step up.  After a change that was announced the ranks
are asked with the next step.  After a call that perhaps only reads, and after a write that samples
have shown, they may have to wait: descriptions for such reasons take a 50th of the time at most,
or a monitor that calls the ranks every second would slow the engine down.
"""

from __future__ import annotations

from collections.abc import Callable

from .messages import RankDescription

SHARE_OF_TIME = 50
"""Digests that may be for nothing take one part of so many of the time."""


class RankDescriptions:
    """What the ranks of one engine say of themselves.  Scheduler's thread."""

    def __init__(self, num_ranks: int, clock: Callable[[], float]) -> None:
        self._num_ranks = num_ranks
        self._clock = clock
        self.resets = 0
        """Number of the last reset; 0: there was none."""
        self.wanted = False
        """Whether a step that runs the model has to ask the ranks."""
        self._due_at = self._earliest = 0.0
        self._given: dict[int, RankDescription] = {}
        self._awaited: int | None = 0
        """The step whose output completes the descriptions (0: the start completes them); None
        while no description has been asked for."""

    def forget(self) -> None:
        """The epoch has ended: what was said so far counts no more."""
        self._given.clear()
        self._awaited = None

    def want(self, wanted: bool, soon: bool) -> None:
        """There was a reset.  ``wanted``: whether the ranks are to describe themselves again, with
        the next step if it is to be ``soon``."""
        self.resets += 1
        self.wanted = wanted
        self._due_at = 0.0 if soon else self._earliest

    def ask(self, step: int) -> int:
        """``step`` runs the model: return the number of the reset for which it has to ask the
        ranks, 0 if it has not."""
        if not self.wanted or self._clock() < self._due_at:
            return 0
        self._awaited, self.wanted = step, False
        return self.resets

    def unanswered(self) -> None:
        """No rank answers: no description will come any more."""
        self._given, self._awaited = {}, 0

    def take(self, given: dict[int, RankDescription], answers: int) -> list[RankDescription] | None:
        """Ranks have described themselves after reset number ``answers``.  Returns all
        descriptions in rank order, once the last is there.  Those of an earlier reset are ignored:
        the weights may have changed since."""
        if answers != self.resets:
            return None
        self._given.update(given)
        if len(self._given) < self._num_ranks:
            return None
        self._awaited = None
        ordered = [self._given[rank] for rank in sorted(self._given)]
        self._earliest = self._clock() + SHARE_OF_TIME * max(d.seconds for d in ordered)
        return ordered

    @property
    def awaited(self) -> bool:
        """Whether an answer is still to come."""
        return self._awaited is not None

    def why_missing(self, step: int) -> str:
        """``step`` has ended.  If descriptions were due by then, one is missing, and no epoch can
        begin: return which; empty if none is missing."""
        if self._awaited is None or step < self._awaited:
            return ""
        silent = sorted(set(range(self._num_ranks)) - self._given.keys())
        numbers = ", ".join(map(str, silent))
        return f"of {self._num_ranks} ranks, these did not describe their KV cache: {numbers}"
