"""The ranks' descriptions, of which the next epoch is made: when to ask, which have answered.

A description digests all weights and holds a step up.  After a change that was announced the ranks
are asked with the next step; after a call that perhaps only reads, or a write that samples have
shown, late enough that descriptions take a 50th of the time at most.
"""

from __future__ import annotations

from collections.abc import Callable

from .messages import RankDescription

SHARE_OF_TIME = 50
"""Digests that may be for nothing take at most one part in 50 of the time."""


class RankDescriptions:
    """Scheduler's thread."""

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
        """The step whose output completes the descriptions, 0: the start; None: none is due."""

    def forget(self) -> None:
        """Drop the descriptions of an epoch that has ended."""
        self._given.clear()
        self._awaited = None

    def want(self, wanted: bool, soon: bool) -> None:
        """Have the ranks describe themselves again after a reset if ``wanted``, with the next step
        if ``soon``."""
        self.resets += 1
        self.wanted = wanted
        self._due_at = 0.0 if soon else self._earliest

    def ask(self, step: int) -> int:
        """Return the number of the reset for which ``step``, which runs the model, has to ask the
        ranks; 0: it need not."""
        if not self.wanted or self._clock() < self._due_at:
            return 0
        self._awaited, self.wanted = step, False
        return self.resets

    def unanswered(self) -> None:
        """Expect no description any more, because no rank answers."""
        self._given, self._awaited = {}, 0

    def take(self, new: dict[int, RankDescription], answers: int) -> list[RankDescription] | None:
        """Return all descriptions in rank order, once the last is there.  ``answers``: number of
        the reset after which the ranks made these; those of an earlier one are ignored."""
        if answers != self.resets:
            return None
        self._given.update(new)
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
        """Return which descriptions are missing that were due when ``step`` ended; empty: none."""
        if self._awaited is None or step < self._awaited:
            return ""
        silent = sorted(set(range(self._num_ranks)) - self._given.keys())
        numbers = ", ".join(map(str, silent))
        return f"of {self._num_ranks} ranks, these did not describe their KV cache: {numbers}"
