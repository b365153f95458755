"""The generated part of docs/scaling.md: what a node larger than any that was measured would take.
``make docs`` writes it.  Pure, but for ``read``.

Sizes follow from kvshm/_shm/layout.py, times from the results in benchmarks/results.  Like
docs/generate.py this must not import the native module.
"""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from kvshm._node.protocol import MAX_FRAME_BYTES, QUEUE_FRAMES
from kvshm._shm.layout import (
    ENTRY_BYTES,
    MAX_BLOCKS,
    NUM_LEASE_BITS,
    NUM_ROWS,
    RECORD_BYTES,
    SLOT_BYTES,
    TOMBSTONE_BYTES,
    index_bytes,
    table_bytes,
)
from kvshm.coordinator.bounds import MAX_DESCRIPTORS, MAX_MEMORY

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"
TRACE_BLOCK_TOKENS = 512
BLOCK_TOKENS = 16
"""Of vLLM, by default; smaller ones make more records."""
REQUESTS_PER_SECOND = 1_000_000 / 3600
REPLICA_SOURCE = Path(__file__).parents[1] / "kvshm" / "native" / "replica.c"
DESCRIPTORS_OF_ENGINE = 4
"""In the coordinator: a table, a connection that shows the engine's end, one for each socket."""
MEASURED_ENGINES = 16
"""On which the coordinator was measured."""
HOST_BYTES = 2 << 40
"""Memory of a host with eight GPUs."""
SCHEDULER_SHARE = 0.1
"""Of an engine's scheduler, what it may lose to others' events."""

Results = Mapping[str, Sequence[Mapping[str, Any]]]


class Number(NamedTuple):
    """A measured number."""

    value: float
    source: str


class Cost(NamedTuple):
    """What a rate of records takes: a straight line through what was measured."""

    fixed: float
    """Of a core, however few records there are."""
    each: float
    """Seconds for each record."""
    source: str

    def at(self, records: float) -> float:
        """Of a core, at so many records a second."""
        return self.fixed + self.each * records

    def __str__(self) -> str:
        return f"{self.fixed:.1%}, and {self.each * 1e6:.2f} µs a record"


class Node(NamedTuple):
    """A node to project."""

    engines: int
    blocks: int
    """Of each engine."""

    @property
    def name(self) -> str:
        return f"{self.engines} engines, {self.blocks:,} blocks each"


NODES = Node(16, 625_000), Node(16, 10_000_000), Node(128, 10_000_000)


def read(folder: Path = RESULTS) -> Results:
    """The lines of all results that there are, by the name of their file."""
    return {
        path.stem: [json.loads(line) for line in path.read_text("utf-8").splitlines()]
        for path in sorted(folder.glob("*.jsonl"))
    }


class Measured(NamedTuple):
    """What of the results is needed."""

    records: Number
    """Of a request, in blocks of 512 tokens."""
    wire: Number
    """Bytes of a record in an engine's message."""
    coordinator: Cost
    """Of its core, with MEASURED_ENGINES."""
    apply: Cost
    """For how long a busy scheduler stands still."""
    join: Number
    """Seconds for an entry of an engine that is new."""


def numbers(results: Results) -> Measured:
    """Find what is needed in the results.  Raises LookupError naming those that are missing."""
    records, wire = _of_traces(results)
    coordinator, relays = _last(results, "events", _of_coordinator)
    applied = [_last(results, name, _of_apply) for name in ("client", "client-crowd")]
    join, joined = _last(results, "join", _of_join)
    return Measured(
        records, wire, _line(coordinator, relays),
        _line([point for point, _ in applied], ", ".join(source for _, source in applied)),
        Number(join, joined),
    )  # fmt: skip


def _line(points: Sequence[tuple[float, float]], source: str) -> Cost:
    """The straight line with the least squares through (records a second, of a core)."""
    slope, intercept = statistics.linear_regression(*zip(*points, strict=True))
    return Cost(max(0.0, intercept), slope, source)


def _of_traces(results: Results) -> tuple[Number, Number]:
    """From the longest replay through the most engines."""
    runs = [
        line
        for name in ("traces", "traces-whole")
        for line in results.get(name, ())
        if (line.get("mode"), line.get("routing"), line.get("split")) == ("kvshm", "rr", 1)
    ]
    if not runs:
        raise LookupError("benchmarks/results has no replay of a trace: run bench_traces.py")
    best = max(runs, key=lambda line: (line["requests"], line["engines"]))
    events, of = best["events"], f"{best['requests']:,} requests, {best['engines']} engines"
    source = f"`benchmarks/results/`, `bench_traces.py`: {of}, round robin"
    return (
        Number(events["records"] / best["requests"], source),
        Number(events["sent_bytes"] / events["records"], source),
    )


Value = TypeVar("Value")


def _last(
    results: Results, name: str, value: Callable[[Mapping[str, Any]], Value]
) -> tuple[Value, str]:
    """What the last line has that is of the kind, and where it stands."""
    for line in reversed(results.get(name, ())):
        with suppress(KeyError):
            return value(line), f"`benchmarks/results/{name}.jsonl`"
    raise LookupError(f"benchmarks/results/{name}.jsonl does not say it: run benchmarks/suite.py")


def _of_coordinator(line: Mapping[str, Any]) -> list[tuple[float, float]]:
    if (line["row"], line["engines"]) != ("coordinator", MEASURED_ENGINES):
        raise KeyError(line["row"])
    return [(rate["records_per_second"], rate["cores"]) for rate in line["rates"]]


def _of_apply(line: Mapping[str, Any]) -> tuple[float, float]:
    lost: float = line["lost_percent"]["p50"]
    return line["records_heard_per_second"]["p50"], lost / 100


def _of_join(line: Mapping[str, Any]) -> float:
    whole: float = line["it begins to join, its replica is whole"]["p50"]
    return whole / 1000 / float(line["entries"])


# -- what a node takes


def fullest() -> tuple[int, int]:
    """How full an index may become before it grows, as numerator and denominator, in the words of
    ``insert``.  Raises ValueError if that says something else."""
    said = re.search(
        r"capacity / (\d+) \* (\d+)\)\n\s*return KVSHM_FULL", REPLICA_SOURCE.read_text()
    )
    if said is None:
        raise ValueError(f"{REPLICA_SOURCE} does not say how full an index may be")
    return int(said[2]), int(said[1])


def capacity(entries: int, full: tuple[int, int]) -> int:
    """Entries for which an index has room that was doubled until these fit."""
    most, of = full
    rooms = 8
    while rooms // of * most < entries:
        rooms *= 2
    return rooms


def projected(node: Node, of: Measured) -> dict[str, float]:
    """What a node takes.  Bytes, and what happens in a second."""
    others = (node.engines - 1) * node.blocks
    room = capacity(others, fullest())
    table, index = table_bytes(node.blocks, 1), index_bytes(room)
    tombstones = others * TOMBSTONE_BYTES
    records = REQUESTS_PER_SECOND * of.records.value * TRACE_BLOCK_TOKENS / BLOCK_TOKENS
    received = records * (node.engines - 1) / node.engines
    sent = records * of.wire.value
    return {
        "table": table,
        "entries": others,
        "index": index,
        "index growing": index + index_bytes(room // 2),
        "tombstones": tombstones,
        "memory": node.engines * (table + index + tombstones),
        "records": records,
        "sent": sent,
        "received": sent * node.engines,
        "coordinator": of.coordinator.at(records) * node.engines / MEASURED_ENGINES,
        "apply": of.apply.at(received),
        "join": others * of.join.value,
    }


class Limit(NamedTuple):
    """Something that ends somewhere."""

    name: str
    source: str
    used: Callable[[Node, Mapping[str, float]], float]
    most: float
    beyond: str
    """What happens behind it."""
    moves: str
    """What would move it."""


LIMITS = (
    Limit(
        "blocks of an engine", "`MAX_BLOCKS`, kvshm/_shm/layout.py",
        lambda node, _: node.blocks, MAX_BLOCKS, "the engine shares nothing",
        "larger blocks; wider block numbers are a new layout",
    ),
    Limit(
        "lease bits", "`NUM_LEASE_BITS`, kvshm/_shm/layout.py",
        lambda node, _: node.engines, NUM_LEASE_BITS,
        "further engines import without leases: a block that is handed out meanwhile is a miss",
        "a namespace for each group of engines; wider words are a new layout",
    ),
    Limit(
        "engines in a replica", "`NUM_ROWS`, kvshm/_shm/layout.py",
        lambda node, _: node.engines - 1, NUM_ROWS, "further engines are not attached",
        "a namespace for each group of engines; rows of several words",
    ),
    Limit(
        "the coordinator's descriptors", f"`MAX_DESCRIPTORS`, coordinator/bounds.py; "
        f"{DESCRIPTORS_OF_ENGINE} for each engine",
        lambda node, _: node.engines * DESCRIPTORS_OF_ENGINE, MAX_DESCRIPTORS,
        "it ends, and its successor begins without those connections", "a higher bound",
    ),
    Limit(
        "memory of the host", f"{HOST_BYTES >> 40} TiB, assumed",
        lambda _, of: of["memory"], HOST_BYTES, "engines serve on, unshared",
        "one replica for the node in place of one for each engine: each is the same but for the "
        "engine's own row",
    ),
    Limit(
        "the coordinator's core", "one core: it is one thread",
        lambda _, of: of["coordinator"], 1.0,
        "events wait, then are lost, and replicas scan tables again",
        "larger blocks; a namespace, and so a coordinator, for each group of engines",
    ),
    Limit(
        "what a scheduler loses to events", f"{SCHEDULER_SHARE:.0%} of its time, assumed",
        lambda _, of: of["apply"], SCHEDULER_SHARE, "steps become longer",
        "larger blocks; one replica for the node, applied by one process",
    ),
)  # fmt: skip


def reached(node: Node, of: Mapping[str, float]) -> list[tuple[Limit, float]]:
    """The limits with how much of each a node uses, the most first."""
    used = [(limit, limit.used(node, of) / limit.most) for limit in LIMITS]
    return sorted(used, key=lambda pair: -pair[1])


# -- as a page


def size(count: float, unit: str = "B") -> str:
    """A number of bytes, or of something else, with three digits."""
    power = 0
    while count >= 999.5:
        count, power = count / 1000, power + 1
    return f"{count:.3g} {('', 'k', 'M', 'G', 'T')[power]}{unit}".strip()


ROWS: tuple[tuple[str, str, Callable[[Mapping[str, float]], str]], ...] = (
    ("slot table of an engine", "`table_bytes`", lambda of: size(of["table"])),
    ("entries in each replica", "all blocks of all others", lambda of: size(of["entries"], "")),
    ("index of a replica", "`index_bytes`, doubled until it fits", lambda of: size(of["index"])),
    ("the same while it grows", "the old one beside it", lambda of: size(of["index growing"])),
    ("what an engine keeps of others' blocks", "`TOMBSTONE_BYTES`",
     lambda of: size(of["tombstones"])),
    ("all of it on the node", "for every engine", lambda of: size(of["memory"])),
    ("records a second", "requests times records", lambda of: size(of["records"], "")),
    ("to the coordinator, a second", "times bytes of a record", lambda of: size(of["sent"])),
    ("from the coordinator, a second", "times engines", lambda of: size(of["received"])),
    ("the coordinator", "the line through what was measured, in proportion to engines",
     lambda of: f"{of['coordinator']:.2f} cores"),
    ("a scheduler loses to others' events", "the line through what was measured",
     lambda of: f"{of['apply']:.1%}"),
    ("a new engine knows all", "entries times seconds", lambda of: f"{of['join']:.1f} s"),
)  # fmt: skip


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(cells)} |" for cells in (head, *rows)]
    return "\n".join([lines[0], "|" + "---|" * len(head), *lines[1:], ""])


def page(results: Results) -> str:
    """The generated part."""
    of = numbers(results)
    took = [projected(node, of) for node in NODES]
    names = [node.name for node in NODES]
    sizes = [(what, *(text(each) for each in took), how) for what, how, text in ROWS]
    most, of_all = fullest()
    inputs = [
        ("bytes of a block's slot", f"{SLOT_BYTES}, and 8 for each rank", "`SLOT_BYTES`"),
        ("bytes of an entry of the index", f"{ENTRY_BYTES}; at most {most}/{of_all} are in use",
         "`ENTRY_BYTES`; `insert` in kvshm/native/replica.c"),
        ("bytes of what is known of a block", f"{TOMBSTONE_BYTES}", "`TOMBSTONE_BYTES`"),
        ("an engine that does not read", f"{size(QUEUE_FRAMES * MAX_FRAME_BYTES)} wait for it at "
         f"most, of {size(MAX_MEMORY)} that the coordinator may have",
         "`QUEUE_FRAMES`, `MAX_FRAME_BYTES`; `MAX_MEMORY`"),
        ("records of a request", f"{of.records.value:.1f}, in blocks of {TRACE_BLOCK_TOKENS}",
         of.records.source),
        ("bytes of a record", f"{RECORD_BYTES}, in a message {of.wire.value:.1f}",
         f"`RECORD_BYTES`; {of.wire.source}"),
        ("the coordinator's core", f"{of.coordinator}, {MEASURED_ENGINES} engines",
         of.coordinator.source),
        ("what a busy scheduler loses", f"{of.apply}", of.apply.source),
        ("an engine that is new", f"{of.join.value * 1e6:.2f} µs an entry", of.join.source),
    ]  # fmt: skip
    limits = [
        (limit.name, f"{size(limit.most, '')} ({limit.source})",
         *(f"{limit.used(node, each) / limit.most:.0%}"
           for node, each in zip(NODES, took, strict=True)), limit.beyond)
        for limit in LIMITS
    ]  # fmt: skip
    parts = [
        "### What was measured\n",
        table(("what", "number", "source"), inputs),
        "### What it takes\n",
        table((f"in blocks of {BLOCK_TOKENS} tokens", *names, "how"), sizes),
        "### How much of each limit\n",
        table(("limit", "at", *names, "behind it"), limits),
        "### The first limit\n",
        *(_first(node, each) for node, each in zip(NODES, took, strict=True)),
    ]
    return "\n".join(parts)


def _first(node: Node, of: Mapping[str, float]) -> str:
    limit, share = reached(node, of)[0]
    passed = [other.name for other, used in reached(node, of)[1:] if used > 1]
    also = f" Passed, too: {', '.join(passed)}." if passed else ""
    verb = "is passed" if share > 1 else "would be the first"
    return (
        f"- **{node.name}**: *{limit.name}* {verb}, at {share:.0%}. What would move it: "
        f"{limit.moves}.{also}\n"
    )
