"""What ``kvshm serve`` costs a node: itself, its engines and their coordinator.

    PYTHONPATH=examples:. python benchmarks/bench_console.py [--engines 8] [--rounds 2]

Engines without a model, each in a process of its own, publish and look up once a second.  In turns
no console runs, one without a page, one with a page, and one with eight.  A page is a client that
reads the events as a browser does; what the browser takes, it takes elsewhere.

percent   of a core, that is how long the threads of a process ran, in each turn: of the console, of
          an engine on average, of the coordinator
rss_mb    the console's memory at the end of each turn
"""

from __future__ import annotations

import argparse
import io
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, redirect_stdout
from itertools import islice
from pathlib import Path

from bench_events import ran_seconds
from measurement import end_what_is_started, percentiles, report

from kvshm.tools.serve.hour import POINT_SECONDS
from tests.multiprocess import toys
from tests.multiprocess.consoles import Console
from tests.multiprocess.processes import PATIENCE_SECONDS, Managed, Node, fresh_node, wait_until

ARMS: dict[str, int | None] = {"none": None, "no page": 0, "a page": 1, "8 pages": 8}
"""How many pages are open; None: no console runs."""
SETTLE_SECONDS = 1.0
"""After the first look of a console, before anything is measured."""
Seconds = dict[str, float]


def open_page(console: Console) -> None:
    """Read the events in a thread, for as long as they come; returns when the first ones have."""
    came = threading.Event()

    def read() -> None:
        with closing(console.events()) as events:
            for _ in islice(events, 2):
                pass
            came.set()
            for _ in events:
                pass

    threading.Thread(target=read, daemon=True).start()
    assert came.wait(PATIENCE_SECONDS), "no events came"


@contextmanager
def console_of(node: Node, pages: int | None) -> Iterator[Console | None]:
    """Yield a console that has looked, and has so many pages."""
    if pages is None:
        yield None
        return
    console = Console(node)
    wait_until(lambda: console.ask("/readyz").status == 200, "the console has looked")
    for _ in range(pages):
        open_page(console)
    time.sleep(SETTLE_SECONDS)  # what opening pages takes is not counted
    yield console
    console.process.terminate()
    node.processes.forget_ended()


def work(engines: Sequence[Managed], seconds: float) -> float:
    """Have all publish and look up once a second; returns the seconds that it took."""
    begun = time.monotonic()
    while (passed := time.monotonic() - begun) < seconds:
        toys.all_more(list(engines))
        # The rate of work is what is given: once a second.
        time.sleep(max(0.0, min(seconds, passed + 1) - (time.monotonic() - begun)))
    return passed


def percent(before: Seconds, after: Seconds, seconds: float) -> dict[str, float]:
    """Return how much of a core each has used."""
    return {name: 100 * (after[name] - before[name]) / seconds for name in before}


def turn(
    node: Node, engines: Sequence[Managed], coordinator: Managed, pages: int | None, seconds: float
) -> dict[str, float]:
    """Return what each part has used in a turn, and what memory the console has."""
    with console_of(node, pages) as console:

        def ran() -> Seconds:
            found = {"engine": sum(ran_seconds(each.pid) for each in engines) / len(engines)}
            found["coordinator"] = ran_seconds(coordinator.pid)
            return found | ({"console": ran_seconds(console.process.pid)} if console else {})

        before = ran()
        took = work(engines, seconds)
        found = percent(before, ran(), took)
        return found | ({"rss_mb": rss_mb(console.process.pid)} if console else {})


def rss_mb(pid: int) -> float:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("VmRSS:")[2].split()[0]) / 1024


def summed_up(turns: dict[str, list[dict[str, float]]]) -> dict[str, dict[str, dict[str, float]]]:
    """Return the distribution of each value of each arm."""
    return {
        arm: {name: percentiles([each[name] for each in of_arm]) for name in of_arm[0]}
        for arm, of_arm in turns.items()
    }


def measured(number: int, rounds: int, seconds: float) -> dict[str, list[dict[str, float]]]:
    """Return what each turn of each arm has found, beside so many engines."""
    found: dict[str, list[dict[str, float]]] = {arm: [] for arm in ARMS}
    with fresh_node() as node:
        coordinator = node.coordinator()
        few = ("--requests", "3", "--peers", "1")
        engines = [toys.start(node, seed, *few) for seed in range(number)]
        for engine in engines:
            toys.result(engine)
        for _ in range(rounds):
            for arm, pages in ARMS.items():
                rest = POINT_SECONDS if pages == 0 else seconds
                found[arm].append(turn(node, engines, coordinator, pages, rest))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--engines", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=2, help="of all arms in turn")
    parser.add_argument(
        "--seconds", type=float, default=15.0, help="of a turn; without a page it is as long as "
        "the console rests between two looks",
    )  # fmt: skip
    options = parser.parse_args()
    if options.rounds < 2 or options.engines < 2:
        parser.error("wanted are at least 2 rounds and 2 engines")
    end_what_is_started()
    with redirect_stdout(io.StringIO()):  # what engines have printed, which are no results
        found = measured(options.engines, options.rounds, options.seconds)
    report("console", engines=options.engines, rounds=options.rounds, percent=summed_up(found))


if __name__ == "__main__":
    main()
