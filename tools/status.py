"""``kvshm status``: one line per engine, and an exit status that says how the node is."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator

from kvshm._base.ids import Epoch
from kvshm._base.log import engine_name
from kvshm.errors import ConfigError, KvshmError

from .node.health import (
    Code,
    CoordinatorHealth,
    DeclinedHealth,
    EngineHealth,
    Limits,
    NodeHealth,
    Reason,
    State,
    judge_node,
)
from .node.reader import NodeReader
from .node.reading import NamespaceReading
from .options import NoSuchEngine, add_selection, find_place, number, select
from .output import Columns, Json, cleaned, note, say, show, table
from .render import leftover, name_of

HELP = "one line per engine: healthy, degraded or down"
EXIT_STATUS = {State.HEALTHY: 0, State.DEGRADED: 1, State.DOWN: 3}
EXIT_NO = 1
MOST_LINES = 20
"""Engines without a table that are listed one by one."""
PROBES = ("live", "ready", "progress", "serving", "coordinator")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Say how each engine is, from shared memory alone. live: its process runs and has handed "
        "out its slot table; ready: it has joined, and others can read its blocks; progress: each "
        "of its loops has gone round lately, unless nothing waits for it (-: it is not known)."
    )
    parser.epilog = (
        "exit status: 0 everything is healthy; 1 something is degraded (engines serve, but do not "
        "share as they should); 2 wrong command line or setting; 3 something is down, or nothing "
        "of kvshm runs; 4 no engine has that name. With --probe: 0 yes, 1 no (also: no engine has "
        "that name), 2 as above"
    )
    add_selection(parser)
    add = parser.add_argument
    add("--here", action="store_true", help="only engines of this container (pid namespace)")
    add(
        "--probe",
        choices=PROBES,
        help="for systemd and Kubernetes: print nothing but a failure. serving fails only where an "
        "engine is down, so that nothing stops one that does not share: not where there is no "
        "engine, or where the run directory cannot be used; for the others both are failures",
    )
    limits, seconds = Limits(), number(float, lambda x: x > 0, "of more than 0 seconds")
    stalled = "seconds after which a loop that should go round counts as stalled"
    add(
        "--scheduler-seconds",
        type=seconds,
        default=limits.scheduler,
        metavar="S",
        help=f"{stalled}: the scheduler's, while requests wait ({limits.scheduler:g})",
    )
    add(
        "--loop-seconds",
        type=seconds,
        default=limits.loop,
        metavar="S",
        help=f"{stalled}: all others ({limits.loop:g})",
    )


def run(asked: argparse.Namespace) -> int:
    try:
        return _run(asked)
    except (KvshmError, OSError) as exc:
        # An engine that cannot use the run directory serves unshared: no reason to stop it.
        mistyped = isinstance(exc, ConfigError) and (asked.namespace or asked.run_dir)
        if asked.probe != "serving" or mistyped:
            raise
        say("status", f"nothing is known of the engines: {exc}")
        return 0


def _run(asked: argparse.Namespace) -> int:
    run_dir, namespace = find_place(asked)
    with NodeReader(run_dir, namespace) as reader:
        whole = reader.read()
    try:
        reading = select(whole, asked.engine, here=asked.here)
    except NoSuchEngine as exc:
        if not asked.probe:
            raise
        say("status", str(exc))
        return EXIT_NO
    health = judge_node(reading, Limits(scheduler=asked.scheduler_seconds, loop=asked.loop_seconds))
    if asked.probe:
        return _probe(asked.probe, health)
    found = as_json(health)
    show(found, lambda: _lines(cleaned(found)), as_json=asked.json)
    if not (reading.namespaces or asked.json):
        where = "in this container" if asked.here and whole.namespaces else f"in {run_dir}"
        note(f"nothing of kvshm runs {where}")
    return EXIT_STATUS[health.state]


def as_json(health: NodeHealth) -> Json:
    return {
        "state": health.state,
        "namespaces": [
            {
                "namespace": space.reading.name,
                "coordinator": _coordinator(space.coordinator),
                "engines": [_engine(each) for each in space.engines],
                "declined": [_declined(each) for each in space.declined],
                "ended": [_unknown(space.reading, epoch) for epoch in space.reading.ended],
                "unreadable": [
                    _unknown(space.reading, epoch) | _reasons([space.unknown[epoch]])
                    for epoch in space.reading.unreadable
                ],
            }
            for space in health.namespaces
        ],
    }


def _reasons(reasons: Iterable[Reason]) -> Json:
    return {"reasons": [r.text for r in reasons], "codes": [r.code for r in reasons]}


def _coordinator(health: CoordinatorHealth) -> Json:
    code = health.reason.code if health.reason else None
    return {"state": health.state, "reason": health.text, "code": code}


def _engine(health: EngineHealth) -> Json:
    engine = health.engine
    return {
        "engine": engine.label,
        "epoch": f"{engine.epoch:016x}",
        "pid": engine.pid,
        "model": engine.model,
        "block_size": engine.block_size,
        "keeps": engine.keeps,
        "in_drain": engine.in_drain,
        "state": health.state,
        "live": health.live,
        "ready": health.ready,
        "progress": health.progress,
        "published": engine.blocks.ready,
        "peers": sum(not peer.suspected for peer in engine.peers),
        "imported_tokens": engine.counters["imported_tokens"],
        **_reasons(health.reasons),
    }


def _unknown(space: NamespaceReading, epoch: Epoch) -> Json:
    """What other engines and the kernel show of an engine whose table is not known."""
    peer, pid = space.peer(epoch), space.pids_here.get(epoch)
    return {"epoch": f"{epoch:016x}", "engine": peer.name if peer else None, "pid": pid}


def _declined(health: DeclinedHealth) -> Json:
    record = health.record
    return {
        "engine": record.engine,
        "pid": record.pid,
        "model": record.model,
        "state": health.state,
        **_reasons([health.reason]),
        "since": record.since,
    }


_YES = {True: "yes", False: "no", None: "-"}
_COLUMNS: Columns = {
    "engine": "engine",
    "kind": lambda row: "keeper" if row.get("keeps") else None,
    "drain": lambda row: "yes" if row.get("in_drain") else None,
    "state": "state",
    **{
        column: lambda row, column=column: _YES[row.get(column)]  # type: ignore[misc]
        for column in ("live", "ready", "progress")
    },
    "peers": lambda row: row.get("peers"),
    "published": lambda row: row.get("published"),
    "imported tokens": lambda row: row.get("imported_tokens"),
    "what is wrong": lambda row: "; ".join(row["reasons"]) or "-",
}


def _lines(found: Json) -> Iterator[str]:
    for space in found["namespaces"]:
        coordinator = space["coordinator"]
        yield f"namespace {space['namespace']}: {coordinator['reason'] or 'coordinator healthy'}"
        yield from table(
            _COLUMNS, [*space["engines"], *space["declined"]], if_any=("kind", "drain")
        )
        coordinated = coordinator["code"] != Code.NO_COORDINATOR
        others = [leftover(e["epoch"], coordinated, e["engine"] or "") for e in space["ended"]]
        others += [f"engine {name_of(e)}: {'; '.join(e['reasons'])}" for e in space["unreadable"]]
        yield from (f"    {line}" for line in others[:MOST_LINES])
        if len(others) > MOST_LINES:
            yield f"    and {len(others) - MOST_LINES} more (--json lists all)"


def _probe(probe: str, health: NodeHealth) -> int:
    answers = list(_answers(probe, health))
    failures = [why for good, why in answers if not good]
    if not answers and probe != "serving":
        failures = ["there is no coordinator" if probe == "coordinator" else "there is no engine"]
    note(*failures)
    return EXIT_NO if failures else 0


def _answers(probe: str, health: NodeHealth) -> Iterator[tuple[bool, str]]:
    for space in health.namespaces:
        reading, coordinator = space.reading, space.coordinator
        if probe == "coordinator":
            why = f"namespace {reading.name}: {coordinator.text}"
            yield coordinator.state is State.HEALTHY, why
            continue
        for each in space.engines:
            if each.progress is None and probe in ("progress", "serving"):
                note(f"{each.engine.log_name}: {each.texts[-1]}")
            yield _passes(probe, each), f"{each.engine.log_name}: {'; '.join(each.texts)}"
        for epoch, (code, why) in space.unknown.items():
            text = " has ended" if code is Code.ENDED else f": {why}"
            yield False, f"{reading.name_of(epoch)}{text}"
        for declined in space.declined:  # nothing of kvshm is in it that could hang
            name = engine_name(name=declined.record.engine, pid=declined.record.pid)
            yield probe != "ready", f"{name}: {declined.reason.text}"


def _passes(probe: str, health: EngineHealth) -> bool:
    return {
        "live": health.live,
        "ready": health.ready,
        "progress": health.progress is not False,
        "serving": health.state is not State.DOWN,
    }[probe]
