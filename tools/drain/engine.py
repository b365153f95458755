"""One engine in drain."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from kvshm._api.engine_layout import layout_of
from kvshm._base.ids import Epoch
from kvshm._node.segment_server import SegmentClient
from kvshm._shm.slot_table import PeerSlotTable
from kvshm.errors import KvshmError

from ..node.reading import EngineReading
from ..output import Json
from .bars import Part
from .choice import Unreachable
from .progress import (
    End,
    Found,
    Limits,
    Name,
    NoKeeper,
    Progress,
    decide,
    find,
    why_none,
)
from .watch import Kind, Watch, names_of

_WHY = {
    End.KEPT: "nothing is lost when it is stopped",
    End.STALLED: "keepers are full, and take no more",
    End.SECONDS: "the time was over (--seconds)",
    End.BYTES: "enough was copied (--bytes)",
    End.SILENT: "the engine does not answer, and keepers read from it no more",
    End.GONE: "the engine has ended, or reset its cache",
    End.UNDONE: "undone meanwhile (--undo): it imports again",
    End.INTERRUPTED: "interrupted",
}


class Drain:
    """Has a table open until it is closed.  One thread."""

    def __init__(self, run_dir: Path, engine: EngineReading, alike: Iterable[Epoch]) -> None:
        """``alike``: engines with its fingerprint that answer.  Blocks for some seconds at most.
        Raises KvshmError if nobody hands out its table."""
        self.engine = engine
        segments = SegmentClient(run_dir, engine.namespace)
        self.table = _table(segments, engine)
        self.kind: Kind = engine.namespace, self.table.fingerprint
        self._block_bytes = _block_bytes(segments, self.table, alike)
        self.end: End | None = None
        self._asked = 0
        """What the table's word said of this drain."""
        self._began = self._seconds = 0.0
        self._alone = set[Name]()
        """All blocks that were found to be alone, now or before."""
        self._kept: int = 0
        """How many of these a keeper has now."""
        self._found = Found(frozenset(), frozenset(), 0, full=False)
        self._no_keeper = NoKeeper("", may_come=True)

    def begin(self, seconds: float, now: float) -> None:
        self._began = now
        self._asked = self.table.put_in_drain(round(seconds) or 1)

    def look(self, watch: Watch, limits: Limits, now: float) -> None:
        """See how far it is, as of the last look of ``watch``; it may have ended then."""
        gone = self.table.owner_died or self.table.retired or not self.table.alive
        undone = not self.table.in_drain
        if not gone:
            others = watch.others(self.engine.namespace, self.table.epoch, self.table.fingerprint)
            self._found = find(names_of(self.table), others)
            self._alone |= self._found.alone
            self._no_keeper = why_none(self.table.age_seconds, now - self._began, others)
        self._kept = max(self._kept, len(self._alone & self._found.kept))
        self._seconds = now - self._began
        progress = Progress(
            left=len(self._found.alone),
            kept_bytes=self._kept * self._block_bytes,
            keepers=self._found.keepers,
            full=self._found.full,
            may_come=self._no_keeper.may_come,
            seconds=self._seconds,
            rested=now - max(self._began, watch.grew(self.engine.namespace)),
            gone=gone,
            undone=undone,
            silent=not watch.answers(self.engine.namespace, self.table.epoch),
        )
        self.finish(decide(progress, limits))
        if self.end is None and not self.table.gives_away:  # another command for it has ended
            left = limits.seconds - self._seconds
            self._asked = self.table.put_in_drain(round(left) or 1, again=True)

    def finish(self, end: End | None) -> None:
        """It stays in drain, unless somebody has undone that, but nothing more is copied for this
        command."""
        if end is not None and self.end is None:
            self.end = end
            self.table.end_copies(self._asked)

    # -- what is said of it

    def about(self) -> Json:
        engine = self.engine
        return {"engine": engine.label, "epoch": f"{engine.epoch:016x}", "pid": engine.pid}

    def as_json(self) -> Json:
        left = len(self._found.alone)
        why = self._no_keeper.why if self.end in (None, End.NO_KEEPER) else _WHY[self.end]
        return {
            **self.about(),
            "end": self.end,
            "why": why,
            "alone": len(self._alone),
            "kept": self._kept,
            "kept_bytes": self._kept * self._block_bytes,
            "left": left,
            "left_bytes": left * self._block_bytes,
            "seconds": round(self._seconds, 3),
        }

    def part(self) -> Part:
        whole = self._kept + len(self._found.alone)
        return Part(self.engine.label, self._kept, whole, self._kept * self._block_bytes)

    def close(self) -> None:
        self.table.close()


def failed(engine: Unreachable) -> Json:
    """What is said of an engine that could not be drained: what it has is not known."""
    return {
        "engine": engine.label,
        "epoch": f"{engine.epoch:016x}",
        "pid": engine.pid,
        "end": End.FAILED,
        "why": engine.why,
        **dict.fromkeys(("alone", "kept", "kept_bytes", "left", "left_bytes", "seconds")),
    }


def _table(segments: SegmentClient, engine: EngineReading) -> PeerSlotTable:
    """From the engine or, if it does not answer, from the coordinator: keepers can read its memory
    all the same."""
    if engine.answers:
        with suppress(KvshmError):  # it has just ceased to
            return segments.peer_table(engine.epoch)
    return segments.roster_table(engine.epoch, engine.blocks.total, len(engine.life))


def _block_bytes(segments: SegmentClient, table: PeerSlotTable, alike: Iterable[Epoch]) -> int:
    """Return how many bytes a block takes in a keeper, as one of these engines says; 0: it is not
    known."""
    for epoch in alike:
        with suppress(KvshmError):
            if (layout := layout_of(table, segments.info(epoch))) is not None:
                return layout.stride
    return 0
