"""Several engines of one process, of the many that one namespace has.

    python -m tests.multiprocess.many_toys RUN_DIR NAMESPACE FIRST NUMBER

Engine ``i`` of the namespace publishes prompt ``i``, of one block, out of its block ``i``.  Told a
number on standard input, each engine imports as many prompts; then its bytes are compared.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import kvshm

from .joined import Toy
from .processes import PATIENCE_SECONDS, wait_until

KIND = "many"


def prompt_of(toy: Toy, engine: int) -> list[bytes]:
    return toy.prompt(1, salt=bytes([engine]))


def publish(toy: Toy, engine: int) -> None:
    assert toy.compute(prompt_of(toy, engine), [engine]) == 1


def import_all(toy: Toy, others: Iterable[int]) -> list[int]:
    """Import these engines' prompts, each into the block of its number; returns those that came
    with wrong bytes.  Raises unless all come: a load may be a miss, and is then tried again."""
    wrong = []
    for other in others:
        keys = prompt_of(toy, other)
        wait_until(lambda keys=keys, into=other: arrives(toy, keys, into), f"prompt {other} comes")
        if toy.holds([other], keys) != [True]:
            wrong.append(other)
    return wrong


def arrives(toy: Toy, keys: list[bytes], into: int) -> bool:
    load = toy.node.load(toy.node.wait_for(keys, PATIENCE_SECONDS), [into])
    return load.wait(PATIENCE_SECONDS) is kvshm.LoadState.DONE


def main(run_dir: str, namespace: str, first: str, number: str) -> None:
    place: Any = SimpleNamespace(run_dir=run_dir, namespace=namespace)
    numbers = range(int(first), int(first) + int(number))
    with ExitStack() as ends:
        toys = {}
        for engine in numbers:
            toys[engine] = Toy(place, f"toy-{engine}", KIND, wait=PATIENCE_SECONDS)
            ends.callback(toys[engine].close)
            publish(toys[engine], engine)
        print(json.dumps([toy.table.lease_bit for toy in toys.values()]), flush=True)
        for line in sys.stdin:
            wanted = range(int(line))
            wrong = {
                engine: import_all(toy, [other for other in wanted if other != engine])
                for engine, toy in toys.items()
            }
            print(json.dumps({e: w for e, w in wrong.items() if w}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
