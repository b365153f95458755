"""What ``kvshm top`` shows of a node, as plain data: what ``--json`` prints.  Pure.

``docs/operations.md`` explains the keys.  None: not known, for instance rates at the first look.
"""

from __future__ import annotations

import dataclasses
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from kvshm._base.copy_path import CopyPath
from kvshm._shm.histograms import Distribution

from ..node.health import EngineHealth, NamespaceHealth, State, judge_node
from ..node.reading import EngineReading, NodeReading
from .copies import Copies, find_copies
from .faults import Fault, find_faults
from .rates import Change, Rates


@dataclass(frozen=True)
class Tokens:
    local: int
    peer: int
    computed: int

    @property
    def all(self) -> int:
        return self.local + self.peer + self.computed

    def share(self, part: int) -> float | None:
        return part / self.all if self.all else None


@dataclass(frozen=True)
class Namespace:
    namespace: str
    coordinator: State
    coordinator_reason: str
    engines: int
    live: int


@dataclass(frozen=True)
class EngineName:
    namespace: str
    engine: str
    epoch: str
    pid: int
    model: str


@dataclass(frozen=True)
class Reused:
    """Blocks that were taken for other contents."""

    duplicates_per_second: float | None
    last_copies_per_second: float | None
    """Those that went in vLLM's order: last copies, mostly."""


@dataclass(frozen=True)
class Engine(EngineName):
    state: State
    reasons: tuple[str, ...]
    keeps: bool
    in_drain: bool
    published_blocks: int
    duplicate_blocks: int
    last_copy_blocks: int
    leased_blocks: int
    lacking_blocks: int | None
    """Published blocks of its peers that its replica does not have yet; None: it cannot be read."""
    lag_seconds: float | None
    """How long the oldest of these has been published."""
    reused: Reused
    tokens: Tokens
    in_bytes_per_second: float | None
    out_bytes_per_second: float | None
    drain_p99_ns: int | None
    """Within a factor of two."""
    hook_mean_ns: int | None
    """Of kvshm's two hooks of a scheduler step, in the last minute."""
    hook_p99_ns: int | None
    """Of either hook, within a factor of two."""


@dataclass(frozen=True)
class Keeper(EngineName):
    """What a keeper's memory is good for.  A keeper is one of these for each fingerprint."""

    filled_share: float | None
    """Of its blocks."""
    in_bytes_per_second: float | None
    out_bytes_per_second: float | None
    hit_rate: float | None
    """Bytes that engines have imported from it for each byte that it has copied, in the last
    minute; None: it has copied nothing."""
    dropped_after_seconds: float | None
    """For how long the blocks that it dropped in the last minute had been kept, on average; None:
    it dropped none."""


@dataclass(frozen=True)
class Totals:
    tokens: Tokens
    tokens_since_start: Tokens
    prompt_tokens_per_second: float | None
    not_prefilled_per_second: float | None
    """Prompt tokens that imports brought."""
    bytes_per_second: dict[CopyPath, float]
    discarded_per_second: float | None
    discarded_since_start: int
    reused: Reused
    published_blocks: int
    """Of engines that have not ended."""
    distinct_blocks: int
    worst_lag_seconds: float | None
    """Of the oldest block that a live engine's replica misses."""


@dataclass(frozen=True)
class View:
    time: float
    seconds: float | None
    window_seconds: float | None
    """Length of the "last minute"; None: since the epochs began."""
    namespaces: tuple[Namespace, ...]
    node: Totals
    engines: tuple[Engine, ...]
    keepers: tuple[Keeper, ...]
    copies: tuple[Copies, ...]
    faults: tuple[Fault, ...]

    def as_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def build_view(
    reading: NodeReading, last: Rates, minute: Rates, start: Rates, wanted: str | None = None
) -> View:
    """Return what is shown of a reading.  ``last``, ``minute``, ``start``: changes since the last
    look, in a minute and since the epochs began; ``wanted``: the engine that is meant."""
    health = judge_node(reading)
    shown = [each for each in health.engines if wanted is None or wanted in each.engine.names]
    labels = {(each.engine.namespace, each.engine.label) for each in shown}
    copies = [
        pair
        for pair in find_copies(reading, last, minute)
        if {(pair.namespace, pair.importer), (pair.namespace, pair.exporter)} & labels
    ]
    return View(
        time=reading.real_ns / 1e9,
        seconds=last.seconds,
        window_seconds=minute.seconds,
        namespaces=tuple(map(_namespace, health.namespaces)),
        node=_totals(shown, last, minute, start, copies),
        engines=tuple(_engine(each, last, minute, copies) for each in shown),
        keepers=tuple(_keeper(e.engine, last, minute, copies) for e in shown if e.engine.keeps),
        copies=tuple(copies),
        faults=tuple(find_faults(health, shown, copies)),
    )


def _namespace(space: NamespaceHealth) -> Namespace:
    return Namespace(
        namespace=space.reading.name,
        coordinator=space.coordinator.state,
        coordinator_reason=space.coordinator.text,
        engines=len(space.engines) + len(space.unknown),
        live=sum(each.live for each in space.engines),
    )


def _tokens(changes: Iterable[Change]) -> Tokens:
    counted = Counter[str]()
    for change in changes:
        for source in ("local", "peer", "computed"):
            counted[source] += change.counted(f"prompt_tokens_{source}")
    return Tokens(counted["local"], counted["peer"], counted["computed"])


def _totals(
    shown: Sequence[EngineHealth],
    last: Rates,
    minute: Rates,
    start: Rates,
    copies: Sequence[Copies],
) -> Totals:
    engines = [each.engine for each in shown]
    now, whole = [last.of(e) for e in engines], [start.of(e) for e in engines]
    by_path: defaultdict[CopyPath, float] = defaultdict(float)
    for pair in copies:
        if pair.bytes_per_second:
            by_path[pair.path] += pair.bytes_per_second
    return Totals(
        tokens=_tokens(minute.of(engine) for engine in engines),
        tokens_since_start=_tokens(whole),
        prompt_tokens_per_second=last.a_second(_tokens(now).all),
        not_prefilled_per_second=last.a_second(sum(c.counted("imported_tokens") for c in now)),
        bytes_per_second=dict(by_path),
        discarded_per_second=last.a_second(sum(c.counted("discarded") for c in now)),
        discarded_since_start=sum(c.counted("discarded") for c in whole),
        reused=_reused(last, now),
        published_blocks=sum(engine.blocks.ready for engine in engines if engine.is_readable),
        distinct_blocks=sum(engine.blocks.distinct for engine in engines),
        worst_lag_seconds=_worst_lag(shown),
    )


def _reused(last: Rates, changes: Sequence[Change]) -> Reused:
    return Reused(
        last.a_second(sum(change.counted("duplicates_reused") for change in changes)),
        last.a_second(sum(change.counted("last_copies_reused") for change in changes)),
    )


def _worst_lag(shown: Sequence[EngineHealth]) -> float | None:
    """Replicas and entries of dead engines do not count."""
    live = {each.engine.epoch for each in shown if each.live and not each.engine.retired}
    lags = [
        peer.lag_seconds
        for each in shown
        for peer in each.engine.peers
        if each.engine.epoch in live and peer.epoch in live and peer.lag_seconds is not None
    ]
    return max(lags, default=None)


def _engine(health: EngineHealth, last: Rates, minute: Rates, copies: Sequence[Copies]) -> Engine:
    engine = health.engine
    into, out_of = _pairs(engine, copies)
    lately, peers = minute.of(engine), [p for p in engine.peers if not p.suspected]
    build, output = lately.observed("hook_build"), lately.observed("hook_output")
    return Engine(
        namespace=engine.namespace,
        engine=engine.label,
        epoch=_epoch(engine),
        pid=engine.pid,
        model=engine.model,
        state=health.state,
        reasons=tuple(health.texts),
        keeps=engine.keeps,
        in_drain=engine.in_drain,
        published_blocks=engine.blocks.ready,
        duplicate_blocks=engine.blocks.duplicates,
        last_copy_blocks=engine.blocks.last_copies,
        leased_blocks=engine.blocks.leased,
        lacking_blocks=sum(n for p in peers if (n := p.lacking) is not None) if peers else None,
        lag_seconds=max((s for p in peers if (s := p.lag_seconds) is not None), default=None),
        reused=_reused(last, [last.of(engine)]),
        tokens=_tokens([lately]),
        in_bytes_per_second=_rate(last, into),
        out_bytes_per_second=_rate(last, out_of),
        drain_p99_ns=lately.observed("drain_wait").quantile(0.99),
        hook_mean_ns=_mean_of_step(build, output),
        hook_p99_ns=(build + output).quantile(0.99),
    )


def _keeper(engine: EngineReading, last: Rates, minute: Rates, copies: Sequence[Copies]) -> Keeper:
    into, out_of = _pairs(engine, copies)
    copied, lately, blocks = sum(p.window_bytes for p in into), minute.of(engine), engine.blocks
    dropped = lately.counted("evicted")
    return Keeper(
        namespace=engine.namespace,
        engine=engine.label,
        epoch=_epoch(engine),
        pid=engine.pid,
        model=engine.model,
        filled_share=blocks.ready / blocks.total if blocks.total else None,
        in_bytes_per_second=_rate(last, into),
        out_bytes_per_second=_rate(last, out_of),
        hit_rate=sum(p.window_bytes for p in out_of) / copied if copied else None,
        dropped_after_seconds=lately.counted("evicted_us") / 1e6 / dropped if dropped else None,
    )


def _pairs(engine: EngineReading, copies: Sequence[Copies]) -> tuple[list[Copies], list[Copies]]:
    """Return what it copies from other engines, and what these copy from it."""
    epoch = _epoch(engine)
    others = [p for p in copies if p.namespace == engine.namespace and p.between_engines]
    into = [pair for pair in others if pair.importer_epoch == epoch]
    return into, [pair for pair in others if pair.exporter_epoch == epoch]


def _epoch(engine: EngineReading) -> str:
    return f"{engine.epoch:016x}"


def _rate(last: Rates, pairs: Iterable[Copies]) -> float | None:
    return sum(pair.bytes_per_second or 0.0 for pair in pairs) if last.seconds else None


def _mean_of_step(build: Distribution, output: Distribution) -> int | None:
    steps = max(build.count, output.count)
    return (build.total + output.total) // steps if steps else None
