"""What the console asks of the node, each on the one thread that reads its memory."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

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
from .hour import Hour, Point

Found = TypeVar("Found")


class Node:
    """Its methods wait for each other, and block no event loop.  Close it."""

    def __init__(self, run_dir: Path, namespace: str | None) -> None:
        self._run_dir, self._namespace = run_dir, namespace
        self._reader = NodeReader(run_dir, namespace, in_turn=True)
        self._history = NodeHistory(self._reader)
        self._hour = Hour()
        self._thread = ThreadPoolExecutor(1, "kvshm-serve-look")
        self._checking = ThreadPoolExecutor(1, "kvshm-serve-check")
        self._check: asyncio.Future[Json] | None = None

    def close(self) -> None:
        for pool in (self._checking, self._thread):
            pool.shutdown(cancel_futures=True)
        self._reader.close()

    async def look(self) -> tuple[Json, Json]:
        """Return the JSON of ``kvshm status`` and ``kvshm top``.  Raises KvshmError, OSError."""
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
        if self._check is None or self._check.done():  # else all who ask wait for that one
            loop = asyncio.get_running_loop()
            self._check = loop.run_in_executor(self._checking, self._checks)
        return await asyncio.shield(self._check)

    async def _read(self, work: Callable[[], Found]) -> Found:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    def _look(self) -> tuple[Json, Json]:
        view, reading = self._history.look_and_read()
        self._hour.add(reading)
        return _status_of(reading), cleaned(view.as_json())

    def _checks(self) -> Json:
        findings = run_checks(CHECKS, gather(self._run_dir, self._namespace))
        return dict(cleaned(checks_as_json(findings)))


def _status_of(reading: NodeReading) -> Json:
    return dict(cleaned(status_as_json(judge_node(reading))))
