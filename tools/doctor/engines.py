"""Checks of the engines in the run directory, and of their coordinator."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from kvshm._node.incompatible import differing_field
from kvshm._node.leftovers import left_by_engines
from kvshm.version import __version__

from ..node.health import Limits, State, judge, judge_coordinator
from ..top.copies import find_copies
from ..top.rates import measure
from .facts import Facts
from .findings import Check, Told, absent, ok, problem, warning

NO_ENGINE = "no engine is in the run directory"
LAG_SECONDS = 5.0
"""An engine hears of new blocks within a tenth of a second."""


def _coordinator(facts: Facts) -> Iterator[Told]:
    spaces = facts.reading.namespaces
    if not spaces:
        yield absent(NO_ENGINE)
    for space in spaces:
        state, reason = judge_coordinator(space, facts.reading.at_ns, Limits())
        if state is State.HEALTHY:
            yield ok(f"namespace {space.name}: it serves and goes round")
        elif not space.coordinated:
            start = f"kvshm-coordinator --run-dir {facts.run_dir} --namespace {space.name}"
            yield problem(f"namespace {space.name}: {reason}", f"start one: {start}")
        else:
            yield problem(f"namespace {space.name}: {reason}", "look at its log, restart it")


def _versions(facts: Facts) -> Iterator[Told]:
    found = False
    for space in facts.reading.namespaces:
        for epoch, why in space.unreadable.items():
            if "layout" in why or "version" in why.lower():
                found = True
                remedy = "upgrade whichever is older; this command is of kvshm " + __version__
                yield problem(f"engine of epoch {epoch:016x}: {why}", remedy)
    if not found:
        yield ok(f"everything that could be read is of this kvshm's layout ({__version__})")


def _engines(facts: Facts) -> Iterator[Told]:
    reading = facts.reading
    if not any(space.engines or space.unreadable for space in reading.namespaces):
        yield absent(NO_ENGINE)
    for space in reading.namespaces:
        for engine in space.engines:
            health = judge(engine, space, reading.at_ns, Limits())
            text = f"{engine.label}: {'; '.join(health.reasons) or 'lives, ready, goes round'}"
            if health.state is State.HEALTHY:
                yield ok(text)
            elif health.state is State.DOWN:
                yield problem(text, "look at its log; restart it")
            else:
                yield warning(text, "look at its log")
        for epoch, why in space.unreadable.items():
            yield problem(f"engine of epoch {epoch:016x}: {why}", "look at that engine")


def _declined(facts: Facts) -> Iterator[Told]:
    declined = [told for space in facts.reading.namespaces for told in space.declined]
    for told in declined:
        text = f"{told.engine} shares nothing: {told.reason}"
        if told.on_purpose:
            yield ok(text)
        else:
            yield problem(text, "docs/operations.md, Why an engine does not share")
    if not declined:
        yield ok("no engine has declined to share")


def _fingerprints(facts: Facts) -> Iterator[Told]:
    told = set[frozenset[str]]()
    for space in facts.reading.namespaces:
        models = {engine.name: engine.model for engine in space.engines}
        for engine in space.engines:
            for error in engine.errors:
                other, field = differing_field(error.text) or ("", "")
                pair = frozenset((space.name, engine.name, other))
                if other not in models or pair in told:
                    continue  # another error, that engine has ended, or it has said so itself
                told.add(pair)
                text = f"{engine.label}: {error.text}"
                if models[other] == engine.model:
                    yield problem(text, f"make {field} equal: docs/fingerprint.md")
                else:
                    yield ok(f"{text} (another model)")
    if not told:
        yield ok("no two engines differ")


def _leftovers(facts: Facts) -> Iterator[Told]:
    spaces = [space for space in facts.reading.namespaces if facts.run_dir.is_dir()]
    left = False
    for space in spaces:
        files = left_by_engines(facts.run_dir, space.name)
        if files and not space.coordinated:
            left = True
            text = f"namespace {space.name}: {len(files)} files of processes that have ended"
            yield warning(text, f"kvshm clean --namespace {space.name}, or start a coordinator")
    if not left:
        yield ok("no file of an ended process is left that nobody clears up")


def _pids(facts: Facts) -> Iterator[Told]:
    engines = list(facts.reading.engines)
    hidden = [engine for engine in engines if engine.answers and not engine.pid_here]
    if not engines:
        yield absent(NO_ENGINE)
    elif not hidden:
        yield ok("all engines are in this command's pid namespace, or in one below it")
    else:
        names = ", ".join(engine.label for engine in hidden)
        remedy = "on CPUs nothing; CUDA's IPC handles want one pid namespace (--pid=host)"
        yield warning(f"in other pid namespaces: {names}", remedy)
    for pid, times in Counter(engine.pid for engine in engines if engine.answers).items():
        if times > 1 and len({e.pid_here for e in engines if e.pid == pid}) > 1:
            remedy = "on CPUs nothing; CUDA takes two processes of one pid for one (--pid=host)"
            yield warning(f"{times} engines have pid {pid} in their containers", remedy)


def _paths(facts: Facts) -> Iterator[Told]:
    since_start = measure(None, facts.reading)
    pairs = find_copies(facts.reading, since_start, since_start)
    between = [pair for pair in pairs if pair.between_engines]
    if not between:
        yield absent("no engine has copied from another one yet")
    for pair in between:
        speed = f" at {pair.speed / 1e9:.2g} GB/s" if pair.speed else ""
        who = f"{pair.importer} copies from {pair.exporter} by {pair.path}{speed}"
        if pair.slow:
            remedy = "run both on one GPU, or on GPUs that reach each other: docs/gpu.md"
            yield warning(f"{who}: slow: {pair.slow}", remedy)
        else:
            yield ok(who)


def _lag(facts: Facts) -> Iterator[Told]:
    late = False
    engines = list(facts.reading.engines)
    for engine in engines:
        for peer in engine.peers:
            if (peer.lag_seconds or 0.0) > LAG_SECONDS:
                late = True
                text = f"{engine.label} lacks {peer.lacking} blocks of {peer.name}"
                remedy = "start a coordinator if there is none; else look at this engine's log"
                yield warning(f"{text}, the oldest for {peer.lag_seconds:.0f} s", remedy)
    if not engines:
        yield absent(NO_ENGINE)
    elif not late:
        yield ok("every index has what other engines have published")


CHECKS = (
    Check("coordinator", "whether it runs, answers and goes round", _coordinator),
    Check("versions", "engines of another version of kvshm", _versions),
    Check("engines", "whether each lives, is ready and goes round", _engines),
    Check("declined", "engines that share nothing, and why", _declined),
    Check("fingerprints", "engines that cannot share, and the field that differs", _fingerprints),
    Check("leftovers", "files of ended processes that nobody clears up", _leftovers),
    Check("pid namespaces", "engines in other containers, and equal pids in them", _pids),
    Check("copy paths", "on which path each pair copies, how fast, and which are slow", _paths),
    Check("replica lag", "blocks that an engine's index has lacked for long", _lag),
)
