"""What the console asks of the node, each on the one thread that reads its memory."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

from ..doctor.checks import as_json as checks_as_json
from ..doctor.checks import run_checks
from ..doctor.evidence import gather
from ..doctor.registry import CHECKS
from ..indexer.command import find_caches
from ..indexer.query import Answer, Query, answer
from ..metrics.samples import Samples, samples_of
from ..node.health import judge_node
from ..node.reader import NodeReader
from ..node.reading import NodeReading
from ..output import Json, cleaned
from ..status import as_json as status_as_json
from ..top.history import NodeHistory
from .feed import Look
from .hour import Hour, Point

Found = TypeVar("Found")


class Node:
    """A context.  Its methods wait for each other, and block no event loop."""

    def __init__(self, run_dir: Path, namespace: str | None) -> None:
        self._run_dir, self._namespace = run_dir, namespace
        self._reader = NodeReader(run_dir, namespace, in_turn=True)
        self._history = NodeHistory(self._reader)
        self._hour = Hour()
        self._thread = ThreadPoolExecutor(1, "kvshm-serve-look")
        self._checking = ThreadPoolExecutor(1, "kvshm-serve-check")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, _: TracebackType | None
    ) -> None:
        for pool in (self._checking, self._thread):
            pool.shutdown(cancel_futures=True)
        self._reader.close()

    async def look(self) -> Look:
        """Raises KvshmError or OSError."""
        return await self._read(self._look)

    def points_since(self, seen: int) -> tuple[int, list[Point]]:
        """As ``Hour.since``; never blocks."""
        return self._hour.since(seen)

    async def status(self) -> Json:
        """Look anew; the rates of pages are not disturbed by it."""
        return await self._read(lambda: _status_of(self._reader.read()))

    async def samples(self) -> Samples:
        return await self._read(lambda: samples_of(self._reader.read()))

    async def holders(self, query: Query) -> Answer:
        """Say which engine holds how much of a prefix."""
        return await self._read(lambda: answer(query, find_caches(self._reader, query)))

    async def checks(self) -> Json:
        """Do what ``kvshm doctor`` does.  Takes seconds, and holds up no look."""
        return await asyncio.get_running_loop().run_in_executor(self._checking, self._checks)

    async def _read(self, work: Callable[[], Found]) -> Found:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    def _look(self) -> Look:
        view, reading = self._history.look_and_read()
        self._hour.add(reading)
        return Look(_status_of(reading), cleaned(view.as_json()))

    def _checks(self) -> Json:
        findings = run_checks(CHECKS, gather(self._run_dir, self._namespace))
        return dict(cleaned(checks_as_json(findings)))


def _status_of(reading: NodeReading) -> Json:
    return dict(cleaned(status_as_json(judge_node(reading))))
