"""Engines, keepers and the coordinator of one node under random faults, for as long as one likes.

    python -m tests.multiprocess.chaos --seconds 3600 --seed 1 [--without truncate,punch]

Toy engines, each with ranks in processes of their own, serve random requests: they publish,
retract, import and begin new epochs, and compare every byte that they import, from each other and
from keepers, with what the block's hash says.  Keepers have memory for many blocks, or for a few.
Meanwhile a schedule (chaos_schedule.py; the same for the same seed) kills and stops them all, at
sync points too, drains engines, cuts memory, takes descriptors and puts strange files in their way.
Afterwards the node must become whole, hold no lease, pass ``kvshm dump --check``, end in good
order and leave nothing.  Prints what was found in words, then in one line of JSON; status 1
if a byte was wrong, an invariant broken, a bystander ended, or something was left.

``--fault`` (a built-in wrong copy, without verification, of engines or of keepers) and ``--murder``
(one engine is killed that the schedule does not know of) show that it can fail.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from kvshm.errors import SegmentError

from .chaos_faults import Faults
from .chaos_node import UNANSWERED_SECONDS, ChaosNode, Member
from .chaos_schedule import WEIGHTS, schedule
from .processes import start_reaper

LOOK_SECONDS = 0.05
WHOLE_SECONDS = 90.0
"""How long the node may take to become whole; longer than a quarantine."""
END_SECONDS = 30.0
UNDO_TRIES = 1200
MORE_DESCRIPTORS = 16
MORE_MIB = 100
LEFT_IN_ORDER = re.compile(r".*\.lock")
SIZES = (
    "engine_fds",
    "rank_fds",
    "keeper_fds",
    "keeper_mib",
    "coordinator_fds",
    "coordinator_mib",
)


def main() -> int:
    options = _parser().parse_args()
    if unknown := {*options.only, *options.without} - set(WEIGHTS):
        _parser().error(f"no fault is called {', '.join(unknown)}; there are {', '.join(WEIGHTS)}")
    if not options.keepers and any(kind.startswith("keeper-") for kind in options.only):
        _parser().error("these faults need --keepers")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(2))
    start_reaper()
    settings = {"KVSHM_FAULT": options.fault, "KVSHM_VERIFY": "0"} if options.fault else {}
    node = ChaosNode(options.ranks, options.seed, **{options.faulty: settings})
    faults = Faults(node)
    with ExitStack() as last:
        last.callback(shutil.rmtree, node.node.run_dir, ignore_errors=True)
        last.callback(node.processes.reap)
        last.callback(_kill_ranks, node)
        last.callback(faults.undo, everything=True)
        print(f"chaos in {node.node.run_dir}, namespace {node.node.namespace}", flush=True)
        node.start(options.engines, options.keepers)
        found = run(node, faults, options)
    return tell(found, options)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="chaos")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--engines", type=int, default=3)
    parser.add_argument("--keepers", type=int, default=2)
    parser.add_argument("--ranks", type=int, default=1, help="of each engine")
    parser.add_argument("--only", type=_kinds, default=[], help="kinds of faults: a,b")
    parser.add_argument(
        "--each", action="store_true", help="go on until each kind of --only was really done"
    )
    parser.add_argument("--without", type=_kinds, default=[], help="kinds of faults: a,b")
    parser.add_argument("--fault", default="", help="have engines copy wrongly: see faults.py")
    parser.add_argument(
        "--faulty", choices=("engine", "keeper"), default="engine", help="whom --fault has do so"
    )
    parser.add_argument("--murder", type=float, help="kill an engine off the schedule, then")
    return parser


def _kinds(text: str) -> list[str]:
    return [kind for kind in text.split(",") if kind]


# -- the run


def run(node: ChaosNode, faults: Faults, options: argparse.Namespace) -> dict[str, Any]:
    """Have the schedule done and the node end; return all that was found."""
    problems = Counter[str]()
    if not become_whole(node):
        problems["not whole before the faults"] += 1
    before, began = sizes(node), time.monotonic()
    for fault in schedule(options.seed, options.only, options.without):
        if fault.at >= options.seconds and not (options.each and faults.missing(options.only)):
            break
        _watch_until(began + fault.at, node, faults)
        if options.murder and fault.at >= options.murder:
            node.engines[0].process.signal(signal.SIGKILL)
            options.murder = None
        faults.do(fault)
    for _ in range(UNDO_TRIES):
        if not faults.undo(everything=True):
            break
        time.sleep(LOOK_SECONDS)
    replace(node)
    whole_after = time.monotonic()
    if not become_whole(node):
        problems["not whole after the faults"] += 1
    whole_after = time.monotonic() - whole_after
    invariants = check_invariants(node)
    after = sizes(node)
    end(node, problems)
    return {
        "seconds": round(time.monotonic() - began, 1),
        **node.totals,
        "bystanders": node.bystanders,
        "violations": node.violations[:20] + invariants,
        "leaks": leaks(node, before, after),
        "problems": dict(problems),
        "faults": dict(sorted(faults.done.items())),
        "missing": sorted(faults.missing(options.only)),
        "drains": dict(sorted(faults.drains.items())),
        "points": dict(sorted(node.reached.items())),
        "not_undone": faults.not_undone,
        "spoilt": faults.spoilt[:50],
        "whole_after_s": round(whole_after, 2),
        "before": before,
        "after": after,
    }


def _watch_until(end: float, node: ChaosNode, faults: Faults) -> None:
    """Look once at least: also on a machine that is so busy that faults come late."""
    while True:
        faults.undo()
        node.look()
        node.ping()
        if time.monotonic() >= end:
            return
        time.sleep(LOOK_SECONDS)


def become_whole(node: ChaosNode) -> bool:
    marks: dict[str, tuple[int, int]] = {}
    deadline = time.monotonic() + WHOLE_SECONDS
    while time.monotonic() < deadline:
        node.look()
        node.ping()
        for engine in node.engines:
            marks.setdefault(engine.name, _imports(engine))
        if all(_is_whole(engine, marks[engine.name], node) for engine in node.engines):
            return True
        time.sleep(LOOK_SECONDS)
    for engine in node.engines:
        print(f"{engine.name}: {engine.said}", *engine.last_lines(), sep="\n   ", file=sys.stderr)
    return False


def _imports(engine: Member) -> tuple[int, int]:
    return engine.said.get("imported", 0), engine.said.get("from_keepers", 0)


def _is_whole(engine: Member, marks: tuple[int, int], node: ChaosNode) -> bool:
    """Whether it knows all others, and imports, from keepers too."""
    imported, from_keepers = (now - then for now, then in zip(_imports(engine), marks, strict=True))
    peers = len(node.engines) - 1 + len(node.keepers)
    imports = imported > 0 and (from_keepers > 0 or not node.keepers)
    return imports and engine.said.get("peers") == peers


def replace(node: ChaosNode) -> None:
    """Have those begin anew whose memory was cut, since the invariants do not speak of it, and
    those that are still to stop or die at a sync point."""
    coordinator = [node.coordinator] if node.coordinator else []
    for member in [*node.engines, *node.keepers, *coordinator]:
        member.successor_point, member.successor_at = "", 0.0
        if member.damaged or member.point:
            node.kill(member)
    node.look()


# -- what is looked at in the end


def check_invariants(node: ChaosNode) -> list[str]:
    """What ``kvshm dump --check`` says while the engines stand still, and leases that are left."""
    for engine in node.engines:
        engine.order("pause")
    deadline = time.monotonic() + END_SECONDS
    while busy := [e.name for e in node.engines if not e.said.get("paused")]:
        if time.monotonic() > deadline:
            return [f"does not pause: {', '.join(busy)}"]
        node.look()
        time.sleep(LOOK_SECONDS)
    deadline = time.monotonic() + END_SECONDS
    while (left := _leases(node)) and time.monotonic() < deadline:
        node.ping()
        time.sleep(LOOK_SECONDS)
    return [f"leases are left: {left}"] if left else _dump(node)


def _leases(node: ChaosNode) -> object:
    try:
        return dict(node.leases())
    except SegmentError as exc:
        return repr(exc)


def _dump(node: ChaosNode) -> list[str]:
    argv = ("-m", "kvshm.tools.cli", "dump-index", "--check", "--namespace", node.node.namespace)
    environ = {**os.environ, "KVSHM_RUN_DIR": str(node.node.run_dir)}
    command = [sys.executable, "-P", *argv]
    try:
        done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60)
    except subprocess.TimeoutExpired:
        return ["the check hangs"]
    return (done.stdout + done.stderr).splitlines()[:20] if done.returncode else []


def sizes(node: ChaosNode) -> dict[str, int]:
    """The most descriptors that an engine, a rank, a keeper and the coordinator have, and the most
    MiB of the last two."""
    found = dict.fromkeys(SIZES, 0)

    def most(what: str, pid: int) -> None:
        with suppress(OSError):
            found[what] = max(found[what], len(os.listdir(f"/proc/{pid}/fd")))

    for engine in node.engines:
        most("engine_fds", engine.process.pid)
        for rank in engine.ranks:
            most("rank_fds", rank.pid)
    for kind, members in (("keeper", node.keepers), ("coordinator", [node.coordinator])):
        for pid in (member.process.pid for member in members if member is not None):
            most(f"{kind}_fds", pid)
            found[f"{kind}_mib"] = max(found[f"{kind}_mib"], _mib(pid))
    return found


def _mib(pid: int) -> int:
    with suppress(OSError, AttributeError):  # it has ended
        status = Path(f"/proc/{pid}/status").read_text()
        return int(re.search(r"VmRSS:\s+(\d+)", status)[1]) // 1024  # type: ignore[index]
    return 0


def end(node: ChaosNode, problems: Counter[str]) -> None:
    for engine in node.engines:
        engine.doomed = {0}
        engine.order("end")
    for keeper in node.keepers:
        node.kill(keeper, signal.SIGTERM)
    _await_end(node, [*node.engines, *node.keepers], problems)
    coordinator = node.coordinator
    if coordinator is not None:
        hear_coordinator(node, coordinator)
        node.kill(coordinator, signal.SIGTERM)
        _await_end(node, [coordinator], problems)
    for rank in node.everybody:
        rank.doomed = True
    node.look_at_orphans()


def hear_coordinator(node: ChaosNode, coordinator: Member) -> None:
    """Ask it, since no one has for a while, for as long as it may be silent."""
    deadline = time.monotonic() + UNANSWERED_SECONDS
    while coordinator.silence > LOOK_SECONDS and time.monotonic() < deadline:
        node.ping()
        time.sleep(LOOK_SECONDS / 5)


def _await_end(node: ChaosNode, members: list[Member], problems: Counter[str]) -> None:
    deadline = time.monotonic() + END_SECONDS
    while any(m.process.status is None for m in members) and time.monotonic() < deadline:
        for engine in node.engines:
            node.take_in(engine)
        time.sleep(LOOK_SECONDS)
    for member in members:
        if member.process.status is None:
            problems[f"{member.name} does not end"] += 1
            member.process.kill()
        elif member in node.keepers:
            node.judge_keeper(member)
        elif member.process.status not in member.doomed:
            node.bystander(member.name, member.process.status, member.last_lines())


def leaks(node: ChaosNode, before: dict[str, int], after: dict[str, int]) -> list[str]:
    """What is left after all have ended, and who had grown by then."""
    left = [p.name for p in node.node.run_dir.iterdir() if not LEFT_IN_ORDER.fullmatch(p.name)]
    left += [f"process {rank.pid} of a rank" for rank in node.everybody if rank.runs]
    left += [f"process {pid}" for pid in node.strays()]
    for what, allowed in (("_fds", MORE_DESCRIPTORS), ("_mib", MORE_MIB)):
        grown = [name for name in after if name.endswith(what)]
        left += [
            f"{name}: {before[name]} before, {after[name]} after"
            for name in grown
            if after[name] > before[name] + allowed
        ]
    return left


def _kill_ranks(node: ChaosNode) -> None:
    for rank in node.everybody:
        rank.signal(signal.SIGKILL)


# -- the report


def tell(found: dict[str, Any], options: argparse.Namespace) -> int:
    kinds = ("bystanders", "violations", "leaks", "problems", "not_undone")
    bad = {kind: found[kind] for kind in kinds}
    print(
        f"{found['requests']} requests, {found['loads']} loads, {found['imported']} blocks "
        f"imported, {found['from_keepers']} of them from keepers, {found['wrong']} wrong bytes; "
        f"whole {found['whole_after_s']} s after the last fault"
    )
    for counts in (found["faults"], found["drains"], found["points"]):
        for kind, count in counts.items():
            print(f"  {count:6d} {kind}")
    for what, things in bad.items():
        print(f"{what}: {len(things)}")
        for thing in things.items() if isinstance(things, dict) else things:
            print(f"  {thing}")
    given = {
        name: getattr(options, name)
        for name in ("seed", "engines", "keepers", "ranks", "only", "without")
    }
    print(json.dumps({"chaos": given, **found}), flush=True)
    return int(bool(found["wrong"] or any(bad.values())))


if __name__ == "__main__":
    sys.exit(main())
