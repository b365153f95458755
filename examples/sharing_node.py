"""A node seen through what its engines hand out: what they show, know and have counted.

What comes by itself (joining, hearing of a block) is waited for here, by looking at the
slot tables and replicas themselves, so that its users need not guess a delay.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import permutations

from local_node import Engine, Node, PromptTokens, wait_until

from kvshm._base.ids import Epoch
from kvshm._base.rundir import FoundFile, list_sockets
from kvshm._node.segment_server import SegmentClient
from kvshm._replica.index_reader import ReplicaReader
from kvshm._shm.layout import RowState, SlotState
from kvshm._shm.slot_table import SlotTableView
from kvshm._shm.statistics import PUBLISHED
from kvshm.errors import SegmentError

Place = tuple[int, int]
"""Block id and generation: one block of one engine, for as long as it is not reused."""
BLOCK_SIZE = 128
"""Tokens per block of vLLM's CPU backend."""
SHARING_TIMEOUT_S = 120.0

_METRIC = re.compile(r"\w+:kvshm_(\w+)_total\{.*\}")


@dataclass
class Observation:
    """What happened on one engine while it was observed."""

    tokens: PromptTokens = field(default_factory=lambda: PromptTokens(0, 0, 0))
    counted: dict[str, int] = field(default_factory=dict)
    loaded: dict[str, int] = field(default_factory=dict)
    """By vLLM's page of metrics: vllm:kvshm_..._total."""

    def __getattr__(self, name: str) -> int:
        """Counters by name: ``seen.verified``."""
        try:
            return self.counted[name]
        except KeyError:
            raise AttributeError(name) from None

    def assert_imported(self, blocks: int) -> None:
        """Exactly ``blocks`` blocks were imported, all verified, and none computed instead."""
        assert self.imported_blocks == self.verified == blocks > 0
        assert self.mismatched == 0
        assert self.tokens.imported == blocks * BLOCK_SIZE
        assert self.loaded["imported_tokens"] == blocks * BLOCK_SIZE
        assert self.loaded["failed_loads"] == 0


class SharingNode(Node):
    """A node whose slot tables and replicas are read beside its engines' answers."""

    def owned(self, engine: Engine) -> set[str]:
        """Return the names of the sockets at which the engine hands out a table and a replica."""
        return {found.path.name for found in self._served(engine)}

    def _served(self, engine: Engine) -> list[FoundFile]:
        """The sockets at which the engine's processes hand out an epoch's table and replica."""
        pids, served = engine.processes(), []
        for found in list_sockets(self.run_dir, self.namespace):
            if found.epoch is not None:
                with contextlib.suppress(SegmentError):
                    table = self._segments.view(found.epoch)
                    table.close()
                    if table.pid in pids:
                        served.append(found)
        return served

    def _epoch(self, engine: Engine) -> Epoch | None:
        """The epoch of the engine's cache, None between two."""
        served = self._served(engine)
        return served[0].epoch if served else None

    @property
    def _segments(self) -> SegmentClient:
        return SegmentClient(self.run_dir, self.namespace)

    def table(self, engine: Engine) -> SlotTableView:
        """Map the engine's present slot table for reading; the caller closes it."""
        return self._segments.view(self.epoch(engine))

    def replica(self, engine: Engine) -> ReplicaReader:
        """Map what the engine knows of the others for reading; the caller closes it."""
        return self._segments.replica(self.epoch(engine))

    def counted(self, engine: Engine) -> dict[str, int]:
        """Return the counters of the engine's present epoch."""
        with contextlib.closing(self.table(engine)) as table:
            return table.counters.snapshot()

    def leased(self, engine: Engine) -> set[int]:
        """Return the ids of the engine's blocks on which there is a lease."""
        with contextlib.closing(self.table(engine)) as table:
            return {i for i, slot in enumerate(table.slots()) if slot.leases}

    def epoch(self, engine: Engine) -> Epoch:
        """Return the epoch of the engine's cache; wait for one if none has begun yet: an engine
        joins behind its start, and may answer before it has a slot table."""
        for _ in wait_until(f"{engine!r} has a slot table", SHARING_TIMEOUT_S):
            if (epoch := self._epoch(engine)) is not None:
                break
        assert epoch is not None  # else that has raised TimeoutError
        return epoch

    def reset(self, engine: Engine) -> None:
        """Reset the engine's prefix cache and wait until its new epoch has begun."""
        before = self.epoch(engine)
        engine.request("/reset_prefix_cache", post=True)
        for _ in wait_until(f"{engine!r} begins another epoch", SHARING_TIMEOUT_S):
            engine.complete([0], max_tokens=1)  # the ranks hear of it with a step
            if self._epoch(engine) not in (None, before):
                break

    def shown(self, engine: Engine) -> set[Place]:
        """Return what the engine shows to others."""
        with contextlib.closing(self.table(engine)) as table:
            slots = enumerate(table.slots())
            return {(i, s.generation) for i, s in slots if s.state is SlotState.READY}

    def known(self, importer: Engine, exporter: Engine) -> set[Place] | None:
        """Return what the importer's replica has of the exporter; None while it does not
        know the exporter as alive."""
        own, epoch = self._epoch(importer), self._epoch(exporter)
        if own is None or epoch is None:
            return None
        with contextlib.closing(self._segments.replica(own)) as replica:
            for row in replica.rows():
                if row.epoch == epoch and row.state is RowState.LIVE:
                    entries = [e for e in replica.entries() if e.row == row.row]
                    return {(e.block_id, e.generation) for e in entries}
        return None

    # -- waiting for what comes by itself

    def wait_joined(self, *engines: Engine) -> None:
        """Wait until each of the engines knows all that the others show."""
        for importer, exporter in permutations(engines, 2):
            self._wait_known(importer, exporter, self.shown(exporter))

    @contextlib.contextmanager
    def sharing(self, exporter: Engine, blocks: int = 0) -> Iterator[None]:
        """On leaving wait until the exporter has published ``blocks`` more blocks, and every
        engine that knows it knows of all that it has come to show."""
        before, old = self.counted(exporter)[PUBLISHED.label], self.shown(exporter)
        yield
        for _ in wait_until(f"{exporter!r} publishes {blocks} blocks", SHARING_TIMEOUT_S):
            if self.counted(exporter)[PUBLISHED.label] - before >= blocks:
                break
        for other in self.engines:
            if other is not exporter and self.known(other, exporter) is not None:
                self._wait_known(other, exporter, self.shown(exporter) - old)

    def _wait_known(self, importer: Engine, exporter: Engine, places: set[Place]) -> None:
        for _ in wait_until(f"{importer!r} knows {exporter!r}", SHARING_TIMEOUT_S):
            known = self.known(importer, exporter)
            if known is not None and places & self.shown(exporter) <= known:
                break


@contextlib.contextmanager
def observe(node: SharingNode, engine: Engine) -> Iterator[Observation]:
    """Count what the engine does inside the ``with``; filled in on leaving it."""
    seen = Observation()
    tokens, counted, loaded = engine.prompt_tokens(), node.counted(engine), _loaded(engine)
    yield seen
    seen.tokens = engine.prompt_tokens() - tokens
    seen.counted = {n: v - counted[n] for n, v in node.counted(engine).items()}
    seen.loaded = {n: v - loaded[n] for n, v in _loaded(engine).items()}


def _loaded(engine: Engine) -> dict[str, int]:
    metrics = engine.metrics()
    found = map(_METRIC.match, metrics)
    return {match[1]: int(metrics[match[0]]) for match in found if match}
