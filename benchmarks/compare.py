"""Two kvshm beside each other, round by round: what did a change make slower?

    PYTHONPATH=examples python benchmarks/compare.py --against OTHER_TREE/.venv/bin/python

Each of the two has a node of its own with two engines; so has vLLM without kvshm, whose engines
share nothing and are asked the same. ``--unshared`` says which these are: ``plain`` (the default),
``idle`` (with a connector that does nothing: what any connector costs), both, or none.
``--alone`` adds engines of this kvshm without a peer: each has a node and a coordinator of its own.

``--watched`` adds a node of this kvshm with everything switched on by which it can be watched
(watchers.py: ``kvshm top``, metrics that are scraped, trace spans, a log file with JSON); these
run during its own rounds only.

All of them live at the same time (3 GB for an engine) and one request is under way at a time, so a
machine whose speed drifts slows all of them. Printed is the median of the rounds' ratios, this
kvshm over the others, with the 95 % interval of that median; an interval that lies above 1 is a
loss. Where an engine's memory happens to lie makes it faster or slower by percents for as long as
it lives: hence several starts, and an interval over starts and rounds. What two checkouts of one
commit differ by (``--against`` such a one) says how far to trust it.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, nullcontext
from itertools import chain
from pathlib import Path
from typing import Any, Self

VOCABULARY = 1500
WARM_UP = 8
"""Rounds until every block of the caches was in use once."""
ROOM_PROMPTS = 6
RESAMPLES = 2000
DECODED = 48
DECODED_EXPORTING = 16
ASLEEP_SECONDS = 1.2
"""vLLM's processes wait for each other by spinning, for a second after they have last heard
something: until then the engines of one arm take the cores from those of the next."""
AWAKE_TOKENS = 20
"""Of what wakes them.  vLLM 0.32's CPU worker dies (SIGILL) of a prompt of one token."""
BLOCK_SIZE = 128
IDLE_CONNECTOR = json.dumps(
    {
        "kv_connector": "IdleConnector",
        "kv_connector_module_path": "idle_connector",
        "kv_role": "kv_both",
    }
)

UNSHARED = ("plain", "idle")
ALONE = "alone"
WATCHED = "watched"
KINDS = (*UNSHARED, ALONE, WATCHED)
Times = dict[str, float]
"""What was asked -> milliseconds."""


def _prompt(number: int, tokens: int) -> list[int]:
    drawn = random.Random(number)
    return [drawn.randrange(VOCABULARY) for _ in range(tokens)]


# -- one arm: a process that runs with one of the two kvshm, and its examples/


def serve_arm(tokens: int, kind: str) -> None:
    """Start engines, then answer each line on stdin, the number of a round, with its times.
    ``kind``: one of KINDS, or empty."""
    enabled, idle = kind not in UNSHARED, kind == "idle"
    shared = enabled and kind != ALONE
    import kvshm

    sys.path.insert(0, str(Path(kvshm.__file__).parents[1] / "examples"))
    from local_node import EngineSpec
    from sharing_node import SharingNode
    from tiny_model import write_model
    from watchers import TRACED, Watchers, trace_collector

    room = ROOM_PROMPTS * ((tokens - 1) // BLOCK_SIZE + 2)
    # An older kvshm does not know ``auto``; what is compared is the import, not when to do it.
    settings = {"KVSHM_MIN_PREFIX_TOKENS": "0"} if enabled else {"KVSHM_ENABLE": "0"}
    arguments = ("--kv-transfer-config", IDLE_CONNECTOR) if idle else ()
    if idle:
        settings["PYTHONPATH"] = str(Path(__file__).parent)
    with ExitStack() as running:
        if kind == WATCHED:
            traced, endpoint = running.enter_context(trace_collector())
            settings |= {"KVSHM_LOG_FORMAT": "json", "KVSHM_LOG_FILE": os.devnull, **traced}
            arguments = (*arguments, *endpoint)
        node = running.enter_context(SharingNode(settings))
        # ``python -m`` looks for modules where it is started: beside a kvshm it would take that.
        os.chdir(node.run_dir)
        model = write_model(node.run_dir / "model")
        specs = (
            EngineSpec("a", model, core=0, num_blocks=room, arguments=arguments),
            EngineSpec("b", model, core=1, num_blocks=room, arguments=arguments),
        )
        nodes = [node]
        if kind == ALONE:
            nodes.append(running.enter_context(SharingNode(settings)))
        for each in nodes if enabled else ():
            each.start_coordinator()
        if kind == ALONE:
            a, b = (*nodes[0].start_engines(specs[0]), *nodes[1].start_engines(specs[1]))
        else:
            a, b = node.start_engines(*specs)
        if enabled:
            _check_loaded((a, b), Path(kvshm.__file__).parent)
        if shared:
            node.wait_joined(a, b)
        watching: Callable[[], AbstractContextManager[None]] = nullcontext
        if kind == WATCHED:
            watchers = Watchers(node.run_dir, node.namespace)
            running.callback(watchers.close)
            watchers.wait_ready()
            watching, a.headers, b.headers = watchers.watching, TRACED, TRACED
        print("ready", flush=True)
        for line in sys.stdin:
            with watching():
                times = _round(node, a, b, _prompt(int(line), tokens), shared)
            print(json.dumps(times), flush=True)


def _check_loaded(engines: Sequence[Any], package: Path) -> None:
    """Make sure that it is this kvshm that the engines run with, not one that they found first."""
    for engine in engines:
        mapped = [Path(f"/proc/{pid}/maps").read_text() for pid in engine.processes()]
        if not any(f"{package}/_native" in maps for maps in mapped):
            raise SystemExit(f"{engine!r} does not run with {package}")


def _round(node: Any, a: Any, b: Any, prompt: list[int], shared: bool) -> Times:
    time.sleep(ASLEEP_SECONDS)
    for engine in (b, a):  # which now sleep, too: who wakes up answers some milliseconds later
        engine.complete(_prompt(0, AWAKE_TOKENS), max_tokens=2)
    readable = node.sharing(a, (len(prompt) - 1) // BLOCK_SIZE) if shared else nullcontext()
    with readable:
        times = {"computed": a.complete(prompt, max_tokens=2).ttft_s * 1000}
    first = b.complete(prompt, max_tokens=2).ttft_s * 1000
    if shared:
        times["imported"] = first
    # Before the import this engine was idle for as long as the other one computed.
    other = [*prompt[1:], 0]
    a.complete(other, max_tokens=2)
    times["local_hit_after_a_pause"] = b.complete(prompt, max_tokens=2).ttft_s * 1000
    begin = time.perf_counter()
    hit = b.complete(prompt, max_tokens=DECODED)
    total = time.perf_counter() - begin
    times["local_hit"] = hit.ttft_s * 1000
    times["decode"] = (total - hit.ttft_s) * 1000 / (DECODED - 1)
    if not shared:
        b.complete(other, max_tokens=2)
    a.complete(prompt, max_tokens=2)  # awake, however long that took
    times["exporting"] = _exporting(a, prompt, b, other)
    return times


def _exporting(exporter: Any, prompt: list[int], importer: Any, other: list[int]) -> float:
    """Milliseconds of a request to an engine while its peer, asked for another prompt that the
    engine has, imports it, or has it itself: then it is as busy, and copies nothing."""

    def request() -> float:
        begin = time.perf_counter()
        exporter.complete(prompt, max_tokens=DECODED_EXPORTING)
        return (time.perf_counter() - begin) * 1000

    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(request)
        importer.complete(other, max_tokens=2)
        return asked.result()


# -- the comparison


class Arm:
    """An arm as its comparer sees it.  A context manager: leaving it ends its engines."""

    def __init__(self, name: str, python: str, tokens: int) -> None:
        own = [python, str(Path(__file__)), "--tokens", str(tokens), "--arm"]
        self._process = subprocess.Popen(
            [*own, name if name in KINDS else ""],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def _line(self) -> str:
        assert self._process.stdout is not None
        if not (line := self._process.stdout.readline()):
            raise SystemExit(f"an arm has ended with status {self._process.wait()}")
        return line

    def wait_ready(self) -> None:
        """Block until its engines serve."""
        self._line()

    def measure(self, number: int) -> Times:
        """Have it go through one round."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{number}\n")
        self._process.stdin.flush()
        return dict(json.loads(self._line()))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def ratio(mine: Sequence[Sequence[float]], others: Sequence[Sequence[float]]) -> dict[str, float]:
    """Return the median of the ratios round by round, with its 95 % interval (bootstrap, first of
    the starts, then of the rounds of each).  Both by start."""
    starts = [
        [a / b for a, b in zip(*both, strict=True)] for both in zip(mine, others, strict=True)
    ]
    drawn = random.Random(1)

    def resampled() -> list[float]:
        some = drawn.choices(starts, k=len(starts))
        return [each for pairs in some for each in drawn.choices(pairs, k=len(pairs))]

    medians = sorted(statistics.median(resampled()) for _ in range(RESAMPLES))
    low, high = medians[RESAMPLES // 40], medians[-RESAMPLES // 40]
    found = statistics.median([each for pairs in starts for each in pairs])
    return {"median": round(found, 3), "low": round(low, 3), "high": round(high, 3)}


def measure(arms: dict[str, Arm], rounds: int) -> dict[str, list[Times]]:
    """Go round by round through all arms, in an order that changes."""
    times: dict[str, list[Times]] = {name: [] for name in arms}
    for number in range(rounds + WARM_UP):
        order = list(arms)
        random.Random(number).shuffle(order)
        for name in order:
            measured = arms[name].measure(number)
            if number >= WARM_UP:
                times[name].append(measured)
    return times


def results(starts: Sequence[dict[str, list[Times]]]) -> dict[str, Any]:
    """What all starts together say of the arms and their ratios."""
    from measurement import percentiles

    def of(name: str, way: str) -> list[list[float]]:
        return [[each[way] for each in times[name]] for times in starts]

    ways = {name: list(each[0]) for name, each in starts[0].items()}
    found: dict[str, Any] = {
        f"{name}_ms": {way: percentiles([*chain(*of(name, way))]) for way in of_it}
        for name, of_it in ways.items()
    }
    pairs = [("this", name) for name in ways if name != "this"]
    pairs += [(ALONE, name) for name in UNSHARED if {ALONE, name} <= set(ways)]
    for one, other in pairs:
        both = [way for way in ways[one] if way in ways[other]]
        found[f"{one}_over_{other}"] = {w: ratio(of(one, w), of(other, w)) for w in both}
    for hit in ("local_hit", "local_hit_after_a_pause"):
        found[f"imported_over_{hit}"] = {
            name: ratio(of(name, "imported"), of(name, hit))
            for name, of_it in ways.items()
            if "imported" in of_it
        }
    return found


def start(pythons: dict[str, str], rounds: int, tokens: int) -> dict[str, list[Times]]:
    """Start all arms, in an order that changes, measure, and end them."""
    with ExitStack() as running:
        arms = {
            name: running.enter_context(Arm(name, python, tokens))
            for name, python in random.sample(sorted(pythons.items()), len(pythons))
        }
        for arm in arms.values():
            arm.wait_ready()
        return measure({name: arms[name] for name in pythons}, rounds)


def main() -> None:
    """Command line: print one line of JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--against", help="the Python of an environment with the other kvshm")
    parser.add_argument("--starts", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=20, help="after each start")
    parser.add_argument("--tokens", type=int, default=3500)
    parser.add_argument("--arm", help=argparse.SUPPRESS)
    parser.add_argument("--alone", action="store_true", help="add engines that have no peer")
    parser.add_argument("--watched", action="store_true", help="add a node that is watched")
    parser.add_argument(
        "--unshared", nargs="*", choices=UNSHARED, default=["plain"], help="engines without kvshm"
    )
    args = parser.parse_args()
    if args.arm is not None:
        serve_arm(args.tokens, args.arm)
        return
    from measurement import report

    pythons = dict.fromkeys(("this", *args.unshared), sys.executable)
    if args.against:
        pythons["against"] = args.against
    if args.alone:
        pythons[ALONE] = sys.executable
    if args.watched:
        pythons[WATCHED] = sys.executable
    measured = [start(pythons, args.rounds, args.tokens) for _ in range(args.starts)]
    report(
        "compare", tokens=args.tokens, starts=args.starts, rounds=args.rounds, **results(measured)
    )


if __name__ == "__main__":
    main()
