"""Renders the report as text for people.  Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import groupby
from operator import itemgetter

from kvshm._base.log import engine_name

from .output import Columns, Json
from .output import table as any_table

CHAINS_SHOWN = 20
_IF_ANY = ("group", "held", "held for")
_HASH_DIGITS = 16


def render(report: Json, *, everything: bool = False, selected: bool = False) -> Iterator[str]:
    """Yield the report as lines; without ``everything``, long lists of chains are cut.
    ``selected``: the report may leave engines out."""
    for space in report["namespaces"]:
        yield from _namespace(space, everything, selected)


def name_of(engine: Json) -> str:
    return engine_name(int(engine["epoch"], 16), engine["engine"] or "", engine["pid"] or 0)


def _namespace(space: Json, everything: bool, selected: bool) -> Iterator[str]:
    without = "" if space["coordinator"] else ": no coordinator runs"
    yield f"namespace {space['namespace']}{without}"
    if not (space["engines"] or space["unreadable"]):
        yield f"\n  no engine {'that was asked for ' if selected else ''}is in it"
    yield from _engines(space["engines"])
    for engine in space["engines"]:
        yield from _engine_details(engine, everything)
    for replica in space["replicas"]:
        entries = f"{replica['count']} of {replica['capacity']} entries"
        yield f"\n  replica of {name_of(replica)}: {entries}"
        yield from _table(_ROWS, replica["rows"])
        yield from _table(_ENTRIES, replica["entries"])
    for broken in space["unreadable"]:
        yield f"\n  unreadable: {broken['segment']}\n    {broken['problem']}"
    yield from (f"\n  {line}" for line in ended(space))
    yield ""


def ended(space: Json) -> Iterator[str]:
    return (leftover(engine["epoch"], space["coordinator"]) for engine in space["ended"])


def leftover(epoch: str, coordinated: bool, name: str = "") -> str:
    """The line for an engine that has ended and left its socket.  ``name``: if it is known."""
    end = "the coordinator clears up" if coordinated else "run `kvshm clean` or start a coordinator"
    return f"engine {engine_name(int(epoch, 16), name)}: its process has ended; {end}"


def _engines(engines: list[Json]) -> Iterator[str]:
    """One table for each fingerprint, then one of imports."""
    groups = [list(group) for _, group in groupby(engines, key=itemgetter("fingerprint"))]
    for group in groups:
        if len(groups) > 1:
            number = "1 engine" if len(group) == 1 else f"{len(group)} engines"
            yield f"\n  fingerprint {group[0]['fingerprint'][:12]}: {number}"
        yield from _table(_ENGINES, group)
    if counting := [engine for engine in engines if "lookups" in engine["counters"]]:
        yield "\n  imports"
        yield from _table(_IMPORTS, counting)


def _engine_details(engine: Json, everything: bool) -> Iterator[str]:
    name = name_of(engine)
    shown = engine["chains"] if everything else engine["chains"][:CHAINS_SHOWN]
    counters = [{"counter": label, "value": n} for label, n in engine["counters"].items()]
    yield from _titled(f"blocks of {name}", _BLOCKS, engine["blocks"])
    yield from _titled(f"chains of {name}", _CHAINS, shown)
    if more := len(engine["chains"]) - len(shown):
        yield f"  and {more} shorter ones (--entries shows all)"
    yield from _titled(f"counters of {name}", {"counter": "counter", "value": "value"}, counters)
    yield from _titled(f"errors of {name}", {"times": "times", "error": "text"}, engine["errors"])
    for problem in engine["problems"]:
        yield f"\n  wrong in {name}: {problem}"


# -- columns


def _process(engine: Json) -> str:
    if not engine["alive"]:
        return "dead"
    return "a rank is dead" if engine["died"] else "alive"


def _life(engine: Json) -> str:
    life = engine["life"]
    return f"{life.count('valid')}/{len(life)}" + (" retired" if engine["retired"] else "")


def _state(state: str) -> Callable[[Json], object]:
    return lambda engine: engine["states"][state]


def _counted(counter: str) -> Callable[[Json], int]:
    return lambda engine: engine["counters"].get(counter, 0)


def _holders(block: Json) -> str:
    return "; ".join(map(_holder, block["holders"])) or "-"


def _holder(holder: Json) -> str:
    if holder["epoch"] is None:
        return f"unknown (bit {holder['bit']})"
    return name_of(holder) + ("" if holder["alive"] else ", dead")


_ENGINES: Columns = {
    "engine": "engine",
    "pid": "pid",
    "process": _process,
    "epoch": "epoch",
    "model": lambda engine: (engine["model"] or "-") + (" (keeper)" if engine["keeps"] else ""),
    "fingerprint": lambda engine: engine["fingerprint"][:12],
    "block size": "block_size",
    **{state: _state(state) for state in ("empty", "ready", "draining", "leased", "held")},
    "bit": "lease_bit",
    "life": _life,
    "beats": "heartbeat",
}
_IMPORTS: Columns = {
    "engine": "engine",
    "lookups": _counted("lookups"),
    "hits": _counted("lookup_hits"),
    "loads": _counted("loads_started"),
    "failed": _counted("loads_failed"),
    "tokens": _counted("imported_tokens"),
    "bytes": _counted("bytes_copied"),
}
_BLOCKS: Columns = {
    "block": "block_id",
    "hash": lambda block: block["block_hash"][:_HASH_DIGITS],
    **{key: key for key in ("generation", "state", "depth", "group", "references")},
    "leased by": _holders,
    "held for": lambda block: f"{block['held_seconds']} s" if block["held_seconds"] else None,
}
_CHAINS: Columns = {
    "last block": "tip",
    "hash": lambda chain: chain["block_hash"][:_HASH_DIGITS],
    "group": "group",
    "blocks": "length",
    "begins at depth": lambda chain: chain["depth"] + 1 - chain["length"],
}
_ROWS: Columns = {
    "of engine": "engine",
    "epoch": "epoch",
    "state": "state",
    "blocks": "num_blocks",
    "entries": "entries",
}
_ENTRIES: Columns = {
    "hash": "hash_prefix",
    "epoch": "epoch",
    "block": "block_id",
    "generation": "generation",
    "depth": "depth",
    "group": "group",
}


def _titled(title: str, columns: Columns, rows: list[Json]) -> Iterator[str]:
    if rows:
        yield f"\n  {title}"
        yield from _table(columns, rows)


def _table(columns: Columns, rows: list[Json]) -> Iterator[str]:
    return any_table(columns, rows, _IF_ANY)
