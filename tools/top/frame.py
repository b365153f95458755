"""One frame of ``kvshm top``: lines of text that fit a width and a height.  Uses rich.

node line           always, over as many lines as it needs
table of engines    up to half of the rest, those that are not well first if some do not fit
matrix              up to half of what is then left
faults              all that is left, at least FAULTS_SHOWN lines
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

from rich.text import Text

from ..node.health import State
from ..output import clean
from . import wording
from .faults import Fault
from .grid import Cell, Column, cut, fitted, flow, table
from .matrix import Name, matrix
from .view import Engine, Tokens, View

FAULTS_SHOWN = 3
_STYLES = {State.HEALTHY: "green", State.DEGRADED: "yellow", State.DOWN: "bold red"}
_STATE_WIDTH = 22
_LABEL_WIDTH = 24


def frame(view: View, width: int, height: int | None) -> list[Text]:
    """Return the lines of a frame.  ``height``: at most so many (None: any number)."""
    name = _namer(view)
    lines = list(flow(list(_node(view)), width))
    left = (height - len(lines)) if height is not None else 1000
    faults = min(len(view.faults), FAULTS_SHOWN)
    matrix_rows = len({(pair.namespace, pair.importer) for pair in view.copies})
    spare = left - 2 - bool(matrix_rows) * 2 - bool(faults) * 2 - faults  # heads, empty lines
    engine_rows = max(min(len(view.engines), max(spare // 2, spare - matrix_rows)), 1)
    lines += [Text(""), *_engines(view, name, width, engine_rows)]
    lines += _section(list(matrix(view.copies, name, width, max(spare - engine_rows, 1))))
    room = height - len(lines) - 2 if height is not None else 1000
    lines += _section(list(_faults(view.faults, name, width, room)))
    return lines[:height]


def _section(lines: Sequence[Text]) -> list[Text]:
    return [Text(""), *lines] if lines else []


def _namer(view: View) -> Name:
    several = len(view.namespaces) > 1
    return lambda space, label: clean(f"{space}/{label}" if several else label)


# -- node line


def _node(view: View) -> Iterator[Cell]:
    yield Cell("kvshm top", "bold")
    yield Cell(time.strftime("%H:%M:%S", time.localtime(view.time)))
    for space in view.namespaces:
        style = "" if space.live == space.engines else "yellow"
        yield Cell(f"{clean(space.namespace)}: engines {space.live}/{space.engines}", style)
        well = space.coordinator is State.HEALTHY
        what = "ok" if well else clean(space.coordinator_reason.partition(":")[0])
        yield Cell(f"coordinator {what}", "" if well else "yellow")
    node = view.node
    lag = node.worst_lag_seconds
    yield Cell(f"lag {wording.duration(lag * 1e9 if lag is not None else None)}")
    yield Cell(_hits(node.tokens))
    yield Cell(f"not prefilled {wording.number(node.not_prefilled_per_second)} tok/s")
    paths = ", ".join(f"{path} {wording.rate(r)}" for path, r in node.bytes_per_second.items())
    yield Cell(f"copies {paths or 'none'}")
    discarded = f"{wording.number(node.discarded_per_second)}/s"
    yield Cell(f"discarded {discarded} ({wording.number(node.discarded_since_start)} in all)")
    published, distinct = map(wording.number, (node.published_blocks, node.distinct_blocks))
    yield Cell(f"published {published}, distinct {distinct}")


def _hits(tokens: Tokens) -> str:
    local, peer = tokens.share(tokens.local), tokens.share(tokens.peer)
    both = tokens.share(tokens.local + tokens.peer)
    return (
        f"hit tokens {wording.percent(both)} %: local {wording.percent(local)}, "
        f"peer {wording.percent(peer)}"
    )


# -- engines


def _engines(view: View, name: Name, width: int, rows: int) -> Iterator[Text]:
    shown = list(view.engines)
    if len(shown) > rows:
        shown.sort(key=lambda engine: engine.state is State.HEALTHY)
        shown = shown[: max(rows - 1, 1)]
    yield from table(list(_columns(shown, name)), width)
    if more := len(view.engines) - len(shown):
        yield cut(Text(f"and {more} more engines", "dim"), width)


def _columns(engines: Sequence[Engine], name: Name) -> Iterator[Column]:
    def numbers(head: str, rank: int, cells: Iterator[str]) -> Column:
        return Column(head, [Cell(cell) for cell in cells], rank)

    labels = [Cell(name(e.namespace, e.engine)) for e in engines]
    yield Column("ENGINE", labels, 0, False, _LABEL_WIDTH)
    yield Column("STATE", [_state(e) for e in engines], 0, False, _STATE_WIDTH)
    yield numbers("PUB", 1, (wording.number(e.published_blocks) for e in engines))
    yield numbers("LAST", 5, (wording.number(e.last_copy_blocks) for e in engines))
    hits = (wording.percent(e.tokens.share(e.tokens.local + e.tokens.peer)) for e in engines)
    yield numbers("HIT%", 3, hits)
    peers = (wording.percent(e.tokens.share(e.tokens.peer)) for e in engines)
    yield numbers("PEER%", 4, peers)
    yield numbers("IN", 2, (wording.rate(e.in_bytes_per_second) for e in engines))
    yield numbers("OUT", 2, (wording.rate(e.out_bytes_per_second) for e in engines))
    yield numbers("LEASED", 6, (wording.number(e.leased_blocks) for e in engines))
    yield numbers("DRAIN p99", 7, (wording.duration(e.drain_p99_ns) for e in engines))
    yield numbers("HOOK", 8, (wording.duration(e.hook_mean_ns) for e in engines))
    yield numbers("HOOK p99", 9, (wording.duration(e.hook_p99_ns) for e in engines))
    models = [Cell(clean(e.model)) for e in engines]
    yield Column("MODEL", models, 10, False, _LABEL_WIDTH)


def _state(engine: Engine) -> Cell:
    reason = f": {engine.reasons[0]}" if engine.reasons else ""
    return Cell(clean(f"{engine.state}{reason}"), _STYLES[engine.state])


# -- faults


def _faults(faults: Sequence[Fault], name: Name, width: int, rows: int) -> Iterator[Text]:
    if not faults or rows < 1:
        return
    yield Text("FAULTS, those of now first", "bold")
    shown = faults if len(faults) <= rows else faults[: max(rows - 1, 0)]
    for fault in shown:
        when = "now" if fault.age_seconds is None else wording.age(fault.age_seconds)
        times = f" ({fault.times} times)" if fault.kind == "log" and fault.times > 1 else ""
        who = ", ".join(clean(label) for label in fault.engines)
        text = f"{who}: {fault.text}" if who else fault.text
        style = {"slow": "bold red", "state": "yellow", "alone": "yellow"}.get(fault.kind, "")
        yield cut(Text(f"{fitted(when, 6, right=True)}  {clean(text)}{times}", style), width)
    if more := len(faults) - len(shown):
        yield cut(Text(f"{'':6}  and {more} more", "dim"), width)
