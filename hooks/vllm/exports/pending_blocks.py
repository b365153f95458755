"""Blocks that are not known computed yet: those of steps under way, and of the loads below them."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Sequence, Set
from typing import TypeAlias

from kvshm._base.ids import BlockId
from kvshm.halves import Run, blocks_of

CompletedRuns: TypeAlias = list[tuple[bool, Run]]
"""The blocks that a step completes, and whether their request may share them."""


class PendingBlocks:
    """Scheduler's thread."""

    def __init__(self, delay: int) -> None:
        """A step's blocks are computed only ``delay`` steps after its own output."""
        self._delay = delay
        self.steps: deque[tuple[int, CompletedRuns]] = deque()
        """Steps under way that complete blocks, by their numbers."""
        self.promised: dict[BlockId, Sequence[BlockId]] = {}
        """Block that a load under way will fill -> all blocks of that load, in order."""
        self._held: dict[BlockId, int] = {}
        """Promised block -> the first step that computes on top of it."""

    def clear(self) -> None:
        """Forget all steps and loads: their epoch has ended."""
        for table in (self.steps, self.promised, self._held):
            table.clear()

    def promise(self, blocks: Sequence[BlockId]) -> None:
        """A load will fill these blocks, in this order."""
        self.promised.update(dict.fromkeys(blocks, blocks))

    def build_on(self, blocks: Iterable[BlockId], step: int) -> None:
        """A step computes on top of these blocks: hold its results back until loads fill them."""
        for block in blocks:
            if block in self.promised:
                self._held.setdefault(block, step)

    def release(self, blocks: Collection[BlockId]) -> list[bool]:
        """Nothing waits for loads of these blocks any more; returns which were promised."""
        promised = [self.promised.pop(block, None) is not None for block in blocks]
        for block in blocks if self._held else ():
            self._held.pop(block, None)
        return promised

    def fail(self, blocks: Set[BlockId]) -> set[BlockId]:
        """Loads did not fill these blocks.  Returns all that must not count: these, those behind
        them in the same loads, and what steps have completed on top of them."""
        doubtful = set(blocks)
        for block in blocks & self.promised.keys():
            load = self.promised[block]
            doubtful.update(load[load.index(block) :])
        held = [self._held[block] for block in doubtful if block in self._held]
        while held and self.steps and self.steps[-1][0] >= min(held):
            doubtful.update(blocks_of(run for _, run in self.steps.pop()[1]))
        return doubtful

    @property
    def fence(self) -> int:
        """The step whose blocks are held back only until a fence has passed.  0: there is none."""
        return self.steps[-1][0] if self._delay and self.steps and not self._held else 0

    def computed(self, number: int, fenced: bool) -> list[Run]:
        """Step ``number`` has ended, and (``fenced``) all that it wrote is in memory; returns the
        blocks to share that are computed by now."""
        last = number if fenced else number - self._delay
        if self._held:
            last = min(last, min(self._held.values()) - 1)
        runs: list[Run] = []
        while self.steps and self.steps[0][0] <= last:
            runs += [run for wanted, run in self.steps.popleft()[1] if wanted]
        return runs
