"""One frame of ``kvshm top``: lines of text that fit a width and a height.  Uses rich.

node line           always, over as many lines as it needs
table of engines    up to half of the rest, those that are not well first if some do not fit
keepers             up to a quarter of the rest
matrix              up to half of what is then left
faults              all that is left, at least FAULTS_SHOWN lines
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence

from rich.text import Text

from kvshm._base.copy_path import slowest

from ..node.health import State
from ..output import clean
from .copies import Copies
from .faults import Fault
from .grid import GAP, Column, cut, flow, table
from .view import Engine, Keeper, Tokens, View

FAULTS_SHOWN = 3
OTHERS, UNKNOWN = "others", "-"
CELL_WIDTH = 17
""""999 MB/s same_gpu!"""
_STYLES = {State.HEALTHY: "green", State.DEGRADED: "yellow", State.DOWN: "bold red"}
_STATE_WIDTH = 22
_LABEL_WIDTH, _MATRIX_LABEL_WIDTH = 24, 20

Name = Callable[[str, str], str]
"""The name of an engine of a namespace on the screen."""


def frame(view: View, width: int, height: int | None) -> list[Text]:
    """Return the lines of a frame.  ``height``: most lines (None: any number)."""
    several = len(view.namespaces) > 1

    def name(space: str, label: str) -> str:
        return clean(f"{space}/{label}" if several else label)

    lines = list(flow(list(_node(view)), width))
    left = (height - len(lines)) if height is not None else 1000
    faults = min(len(view.faults), FAULTS_SHOWN)
    matrix_rows = len({(pair.namespace, pair.importer) for pair in view.copies})
    parts = sum(map(bool, (matrix_rows, view.keepers, faults)))
    spare = left - 2 - 2 * parts - faults  # heads, empty lines
    keeper_rows = min(len(view.keepers), max(spare // 4, 1))
    spare -= keeper_rows
    engine_rows = max(min(len(view.engines), max(spare // 2, spare - matrix_rows)), 1)
    lines += [Text(), *_engines(view, name, width, engine_rows)]
    lines += _section(list(_keepers(view.keepers, name, width, keeper_rows)))
    lines += _section(list(_matrix(view.copies, name, width, max(spare - engine_rows, 1))))
    room = height - len(lines) - 2 if height is not None else 1000
    lines += _section(list(_faults(view.faults, width, room)))
    return lines[:height]


def _section(lines: Sequence[Text]) -> list[Text]:
    return [Text(), *lines] if lines else []


# -- node line


def _node(view: View) -> Iterator[Text]:
    yield Text("kvshm top", "bold")
    yield Text(time.strftime("%H:%M:%S", time.localtime(view.time)))
    for space in view.namespaces:
        style = "" if space.live == space.engines else "yellow"
        yield Text(f"{clean(space.namespace)}: engines {space.live}/{space.engines}", style)
        well = space.coordinator is State.HEALTHY
        what = "ok" if well else clean(space.coordinator_reason.partition(":")[0])
        yield Text(f"coordinator {what}", "" if well else "yellow")
    node = view.node
    lag = node.worst_lag_seconds
    yield Text(f"lag {duration(lag * 1e9 if lag is not None else None)}")
    yield Text(_hits(node.tokens))
    yield Text(f"not prefilled {number(node.not_prefilled_per_second)} tok/s")
    paths = ", ".join(f"{path} {rate(speed)}" for path, speed in node.bytes_per_second.items())
    yield Text(f"copies {paths or 'none'}")
    discarded = f"{number(node.discarded_per_second)}/s"
    yield Text(f"discarded {discarded} ({number(node.discarded_since_start)} in all)")
    published, distinct = number(node.published_blocks), number(node.distinct_blocks)
    yield Text(f"published {published}, distinct {distinct}")
    reused = node.reused
    duplicates = number(reused.duplicates_per_second)
    last_copies = number(reused.last_copies_per_second)
    yield Text(f"reused duplicates {duplicates}/s, last copies {last_copies}/s")


def _hits(tokens: Tokens) -> str:
    local, peer = tokens.share(tokens.local), tokens.share(tokens.peer)
    both = tokens.share(tokens.local + tokens.peer)
    return f"hit tokens {percent(both)} %: local {percent(local)}, peer {percent(peer)}"


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
    def numbers(head: str, rank: int, text: Callable[[Engine], str]) -> Column:
        return Column(head, [Text(text(engine)) for engine in engines], rank)

    def texts(head: str, rank: int, cells: list[Text], least: int) -> Column:
        return Column(head, cells, rank, right=False, at_least=least)

    labels = [Text(name(e.namespace, e.engine)) for e in engines]
    yield texts("ENGINE", 0, labels, _LABEL_WIDTH)
    yield texts("STATE", 0, [_state(e) for e in engines], _STATE_WIDTH)
    yield numbers("PUB", 1, lambda e: number(e.published_blocks))
    yield numbers("DUP", 9, lambda e: number(e.duplicate_blocks))
    yield numbers("LAST", 5, lambda e: number(e.last_copy_blocks))
    yield numbers("DUP/s", 12, lambda e: number(e.reused.duplicates_per_second))
    yield numbers("LAST/s", 12, lambda e: number(e.reused.last_copies_per_second))
    yield numbers("HIT%", 3, lambda e: percent(e.tokens.share(e.tokens.local + e.tokens.peer)))
    yield numbers("PEER%", 4, lambda e: percent(e.tokens.share(e.tokens.peer)))
    yield numbers("IN", 2, lambda e: rate(e.in_bytes_per_second))
    yield numbers("OUT", 2, lambda e: rate(e.out_bytes_per_second))
    yield numbers("LEASED", 6, lambda e: number(e.leased_blocks))
    yield numbers("DRAIN p99", 7, lambda e: duration(e.drain_p99_ns))
    yield numbers("HOOK", 8, lambda e: duration(e.hook_mean_ns))
    yield numbers("HOOK p99", 10, lambda e: duration(e.hook_p99_ns))
    yield texts("MODEL", 11, [Text(clean(e.model)) for e in engines], _LABEL_WIDTH)


def _state(engine: Engine) -> Text:
    """A mark takes the place of "healthy", since both are as long."""
    mark = "keeper" if engine.keeps else "in drain" if engine.in_drain else ""
    healthy = engine.state is State.HEALTHY
    words = [mark] if mark and healthy else [engine.state, mark]
    style = "yellow" if healthy and engine.in_drain else _STYLES[engine.state]
    reason = f": {engine.reasons[0]}" if engine.reasons else ""
    return Text(clean(f"{', '.join(filter(None, words))}{reason}"), style)


# -- keepers


def _keepers(keepers: Sequence[Keeper], name: Name, width: int, rows: int) -> Iterator[Text]:
    if not keepers:
        return
    shown = keepers if len(keepers) <= rows else keepers[: max(rows - 1, 1)]
    yield from table(list(_keeper_columns(shown, name)), width)
    if more := len(keepers) - len(shown):
        yield cut(Text(f"and {more} more keepers", "dim"), width)


def _keeper_columns(keepers: Sequence[Keeper], name: Name) -> Iterator[Column]:
    def numbers(head: str, rank: int, text: Callable[[Keeper], str]) -> Column:
        return Column(head, [Text(text(keeper)) for keeper in keepers], rank)

    labels = [Text(name(keeper.namespace, keeper.engine)) for keeper in keepers]
    yield Column("KEEPER", labels, 0, False, _LABEL_WIDTH)
    yield numbers("FULL%", 1, lambda k: percent(k.filled_share))
    yield numbers("IN", 3, lambda k: rate(k.in_bytes_per_second))
    yield numbers("OUT", 3, lambda k: rate(k.out_bytes_per_second))
    yield numbers("OUT/IN", 1, lambda k: ratio(k.hit_rate))
    yield numbers("DROPS AFTER", 2, lambda k: age(k.dropped_after_seconds))
    models = [Text(clean(keeper.model)) for keeper in keepers]
    yield Column("MODEL", models, 4, False, _LABEL_WIDTH)


# -- which engine copies from which: rows import, columns export


def _matrix(copies: Sequence[Copies], name: Name, width: int, rows: int) -> Iterator[Text]:
    """Yield a head and at most ``rows`` rows; engines that do not fit are "others" together."""
    if not copies or rows < 1:
        return
    to = _named([(name(p.namespace, p.importer), p) for p in copies], rows)
    room = (width - _MATRIX_LABEL_WIDTH) // (CELL_WIDTH + GAP)
    of = _named([(name(p.namespace, p.exporter), p) for p in copies], max(room, 1))
    cells: defaultdict[tuple[str, str], list[Copies]] = defaultdict(list)
    for pair in copies:
        row, column = name(pair.namespace, pair.importer), name(pair.namespace, pair.exporter)
        cells[row if row in to else OTHERS, column if column in of else OTHERS].append(pair)
    labels = Column("TO \\ FROM", [Text(label) for label in to], 0, False, _MATRIX_LABEL_WIDTH)
    columns = [
        Column(exporter, [_copied(cells[row, exporter]) for row in to], 0, at_least=CELL_WIDTH)
        for exporter in of
    ]
    yield from table([labels, *columns], width)


def _named(pairs: Sequence[tuple[str, Copies]], room: int) -> list[str]:
    """The names that get a row or column: with slow paths, then those that copy most."""
    weights: defaultdict[str, tuple[int, float, int]] = defaultdict(lambda: (0, 0.0, 0))
    for label, pair in pairs:
        slow, now, total = weights[label]
        now += pair.bytes_per_second or 0.0
        weights[label] = slow or int(bool(pair.slow)), now, total + pair.total_bytes
    if len(weights) <= room:
        return sorted(weights)
    chosen = sorted(weights, key=lambda label: weights[label], reverse=True)[: room - 1]
    return [*sorted(chosen), OTHERS]


def _copied(pairs: Sequence[Copies]) -> Text:
    """The rate, and the slowest path in use, with ``!`` if it is slow."""
    if not pairs:
        return Text()
    using = [pair for pair in pairs if pair.bytes_per_second] or pairs
    speed = sum(pair.bytes_per_second or 0.0 for pair in pairs)
    slow = [pair for pair in pairs if pair.slow]
    path = slowest(pair.path for pair in slow or using)
    text = f"{rate(speed) if speed else '0'} {path}{'!' if slow else ''}"
    return Text(text, "bold red" if slow else "" if speed else "dim")


# -- faults


def _faults(faults: Sequence[Fault], width: int, rows: int) -> Iterator[Text]:
    if not faults or rows < 1:
        return
    yield cut(Text("FAULTS, those of now first", "bold"), width)
    shown = faults if len(faults) <= rows else faults[: max(rows - 1, 0)]
    for fault in shown:
        when = "now" if fault.age_seconds is None else age(fault.age_seconds)
        times = f" ({fault.times} times)" if fault.kind == "log" and fault.times > 1 else ""
        labels = ", ".join(clean(label) for label in fault.engines)
        text = f"{labels}: {fault.text}" if labels else fault.text
        style = {"slow": "bold red", "state": "yellow", "alone": "yellow"}.get(fault.kind, "")
        yield cut(Text(f"{when:>6}  {clean(text)}{times}", style), width)
    if more := len(faults) - len(shown):
        yield cut(Text(f"{'':6}  and {more} more", "dim"), width)


# -- numbers


def number(value: float | None) -> str:
    """A number in at most four characters: ``999``, ``1.2k``, ``48k``, ``3.1M``."""
    return UNKNOWN if value is None else _scaled(value, ("", "k", "M", "G", "T"))


def rate(value: float | None) -> str:
    """Bytes a second: ``3.1 GB/s``."""
    if value is None:
        return UNKNOWN
    text = _scaled(value, (" ", " k", " M", " G", " T"))
    return f"{text}B/s"


def percent(share: float | None) -> str:
    """A share of 0 to 1: ``71.4``."""
    return UNKNOWN if share is None else f"{share * 100:.1f}"


def ratio(value: float | None) -> str:
    """How many times: ``0.62``, ``12``."""
    return f"{value:.2f}" if value is not None and value < 9.995 else number(value)


def duration(nanoseconds: float | None) -> str:
    """A time: ``0``, ``41 us``, ``1.3 ms``, ``12 s``."""
    if nanoseconds is None:
        return UNKNOWN
    for unit, size in (("s", 1e9), ("ms", 1e6), ("us", 1e3)):
        if nanoseconds >= size:
            return f"{_short(nanoseconds / size)} {unit}"
    return f"{nanoseconds:.0f} ns" if nanoseconds else "0"


def age(seconds: float | None) -> str:
    """How long ago something was: ``12 s``, ``5 min``, ``3 h``, ``2 d``."""
    if seconds is None:
        return UNKNOWN
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"


def _scaled(value: float, units: tuple[str, ...]) -> str:
    for unit in units[:-1]:
        if value < 999.5:
            return f"{_short(value) if value < 99.95 and unit.strip() else f'{value:.0f}'}{unit}"
        value /= 1000
    return f"{_short(value)}{units[-1]}"


def _short(value: float) -> str:
    return f"{value:.1f}" if value < 9.95 else f"{value:.0f}"
