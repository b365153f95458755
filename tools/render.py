"""The report as text for people.  Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from operator import itemgetter
from typing import Any

Json = dict[str, Any]

CHAINS_SHOWN = 20
_HASH_DIGITS = 16


def render(report: Json, *, everything: bool = False) -> str:
    """Return the report as tables; without ``everything``, long lists of chains are cut."""
    return "\n".join(
        line for space in report["namespaces"] for line in _namespace(space, everything)
    )


def _namespace(space: Json, everything: bool) -> Iterator[str]:
    without = "" if space["coordinator"] else ": no coordinator runs"
    yield f"namespace {space['namespace']}{without}"
    if not (space["engines"] or space["unreadable"]):
        yield "\n  no engine that was asked for is in it"
    yield from _engines(space["engines"])
    for engine in space["engines"]:
        yield from _engine_details(engine, everything)
    for replica in space["replicas"]:
        yield from _replica(replica)
    for broken in space["unreadable"]:
        yield f"\n  unreadable: {broken['segment']}\n    {broken['problem']}"
    yield from (f"\n  {line}" for line in ended(space))
    yield ""


def ended(space: Json) -> Iterator[str]:
    """A line for each engine of a namespace of which nothing is left but its socket."""
    return (leftover(engine["epoch"], space["coordinator"]) for engine in space["ended"])


def leftover(epoch: str, coordinated: bool) -> str:
    """What to say of an engine that has left its socket."""
    end = "the coordinator clears up" if coordinated else "run `kvshm clean` or start a coordinator"
    return f"engine {epoch}: its process has ended; {end}"


def _engines(engines: list[Json]) -> Iterator[str]:
    """One table for each group that shares; with several groups each has a heading."""
    groups = [list(group) for _, group in groupby(engines, key=itemgetter("fingerprint"))]
    for group in groups:
        if len(groups) > 1:
            yield f"\n  fingerprint {group[0]['fingerprint'][:12]}: {len(group)} engines"
        yield from _table(
            "engine|pid|process|epoch|model|fingerprint|block size|empty|ready|draining|leased|"
            "bit|life|beats",
            [_engine(engine) for engine in group],
        )


def _engine(engine: Json) -> Sequence[object]:
    states, life = engine["states"], engine["life"]
    lives = f"{life.count('valid')}/{len(life)}" + (" retired" if engine["retired"] else "")
    return (
        engine["engine"],
        engine["pid"],
        _process(engine),
        engine["epoch"],
        engine["model"] or "-",
        engine["fingerprint"][:12],
        engine["block_size"],
        *(states[state] for state in ("empty", "ready", "draining", "leased")),
        _or_dash(engine["lease_bit"]),
        lives,
        engine["heartbeat"],
    )


def _engine_details(engine: Json, everything: bool) -> Iterator[str]:
    who = f"{engine['engine']} ({engine['epoch']})"
    if engine["blocks"]:
        yield f"\n  blocks of {who}"
        yield from _table(
            "block|hash|generation|state|depth|references|held by",
            [_block(block) for block in engine["blocks"]],
        )
    if engine["chains"]:
        yield from _chains(engine["chains"], who, everything)
    if engine["counters"]:
        yield f"\n  counters of {who}"
        yield from _table("counter|value", engine["counters"].items())
    if engine["errors"]:
        yield f"\n  errors of {who}"
        yield from _table("times|error", [(e["times"], e["text"]) for e in engine["errors"]])
    for problem in engine["problems"]:
        yield f"\n  wrong in {who}: {problem}"


def _block(block: Json) -> Sequence[object]:
    return (
        block["block_id"],
        block["block_hash"][:_HASH_DIGITS],
        block["generation"],
        block["state"],
        block["depth"],
        block["references"],
        ", ".join(map(_holder, block["holders"])) or "-",
    )


def _chains(chains: list[Json], who: str, everything: bool) -> Iterator[str]:
    shown = chains if everything else chains[:CHAINS_SHOWN]
    yield f"\n  chains of {who}"
    yield from _table(
        "last block|hash|blocks|begins at depth",
        [(c["tip"], c["block_hash"][:_HASH_DIGITS], c["length"], _begin(c)) for c in shown],
    )
    if len(shown) < len(chains):
        yield f"  and {len(chains) - len(shown)} shorter ones (--entries shows all)"


def _begin(chain: Json) -> int:
    begin: int = chain["depth"] + 1 - chain["length"]
    return begin


def _replica(replica: Json) -> Iterator[str]:
    yield ""
    yield (
        f"  replica of {replica['engine']} (pid {replica['pid']}): "
        f"{replica['count']} of {replica['capacity']} entries"
    )
    if replica["rows"]:
        columns = ("engine", "epoch", "state", "num_blocks", "entries")
        yield from _table(
            "of engine|epoch|state|blocks|entries",
            [[row[column] for column in columns] for row in replica["rows"]],
        )
    if replica["entries"]:
        columns = ("hash_prefix", "epoch", "block_id", "generation", "depth")
        yield from _table(
            "hash|epoch|block|generation|depth",
            [[_or_dash(entry[column]) for column in columns] for entry in replica["entries"]],
        )


def _process(engine: Json) -> str:
    if not engine["alive"]:
        return "dead"
    return "a rank is dead" if engine["died"] else "alive"


def _holder(holder: Json) -> str:
    if holder["pid"] is None:
        return f"unknown (bit {holder['bit']})"
    dead = "" if holder["alive"] else ", dead"
    return f"{holder['engine'] or 'unnamed'} (pid {holder['pid']}{dead})"


def _or_dash(value: object) -> object:
    return "-" if value is None else value


def _table(header: str, rows: Iterable[Sequence[object]]) -> Iterator[str]:
    """Yield aligned lines: columns of numbers to the right, all others to the left."""
    lines = [header.split("|"), *([str(value) for value in row] for row in rows)]
    columns = [_aligned(column) for column in zip(*lines, strict=True)]
    for line in zip(*columns, strict=True):
        yield f"    {'  '.join(line)}".rstrip()


def _aligned(column: Sequence[str]) -> list[str]:
    width = max(map(len, column))
    numbers = all(cell.isdecimal() or cell == "-" for cell in column[1:])
    return [cell.rjust(width) if numbers else cell.ljust(width) for cell in column]
