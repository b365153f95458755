"""How long a lookup takes in kvshm's index, in a dict, in Mooncake and in LMCache, asked in turns.

    PYTHONPATH=examples .venv/bin/python benchmarks/bench_peer_lookups.py \\
        --lmcache .venv/lmcache --mooncake .venv/mooncake [--keys 64 512 4096]

kvshm: ``LoadPlanner.lookup`` among eight engines with a million blocks in all, with vLLM's list of
hashes.  The dict is what one Python process could do for itself: a million hashes, one after the
other until one is not there.  Mooncake: ``batch_is_exist`` of its master.  LMCache: a lookup and
its answer by its own client, with chunks as long as a block (peer_clients.py).

A question is a chain of blocks: ``hit`` if all are there, ``miss`` if the first one is not.  All
are asked of one thread on core 0, their servers are on core 1, in a network of which only
loopback is up; ``--host-network`` leaves them in the machine's.  In each turn all are asked, in an
order that changes; an answer of another length than the chain's ends the run.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from bench_lookup import digest, node
from measurement import end_what_is_started, percentiles, report
from peer_clients import Client, lmcache, mooncake, without_network

from kvshm._engine.scheduler_half import SchedulerHalf

ENGINES, ENTRIES = 8, 1_000_000
CHAINS = 3
"""Of each length, for the peers; kvshm and the dict have as many as they have entries."""
OTHERS = 20_000
"""Blocks that the peers hold beside them."""
KEYS = (64, 512, 4096)
MOST_HASHES = 1 << 19
"""In all questions of one length."""
NOBODYS = 1 << 22
"""Number of a block that nobody has; LMCache takes token ids of 32 bits."""
BURST = 10
"""Questions that each is asked in a turn: behind the first one its own code is warm again."""
CLIENT_CORE, SERVER_CORE = 0, 1


def turns(keys: int) -> int:
    """How many turns there are: fewer where each takes long."""
    return max(8, min(40, 12_000 // keys))


class Kvshm:
    """An engine that knows of the others' blocks; all chains lie in one engine each, anywhere."""

    def __init__(self, cache: SchedulerHalf, of_each: int) -> None:
        self._cache, self._of_each = cache, of_each

    def question(self, chain: Sequence[int]) -> list[bytes]:
        return [digest(f"{n // self._of_each} {n % self._of_each}") for n in chain]

    def store(self, chain: Sequence[int]) -> None:
        """They are there."""

    def ask(self, question: list[bytes]) -> int:
        plan = self._cache.planner.lookup(question, 0, len(question))
        return plan.num_blocks if plan is not None else 0

    def asked(self, question: list[bytes]) -> None:
        """A lookup takes nothing."""


class Dict(Kvshm):
    """Where a Python process keeps for itself what the engines hold."""

    def __init__(self, entries: int, of_each: int) -> None:
        self._of_each = of_each
        self._places = {each: n for n, each in enumerate(self.question(range(entries)))}

    def ask(self, question: list[bytes]) -> int:
        found = 0
        for each in question:
            if self._places.get(each) is None:
                break
            found += 1
        return found


@contextmanager
def kvshm(entries: int) -> Iterator[Kvshm]:
    """An engine beside ENGINES others, which hold all entries together."""
    of_each = entries // ENGINES
    with node(ENGINES, of_each) as (cache, _):
        yield Kvshm(cache, of_each)


class Question(NamedTuple):
    """What a cache is asked, and what it must find."""

    asked: Any
    found: int


def chains(keys: int, entries: int, dice: random.Random, number: int = CHAINS) -> list[list[int]]:
    """Draw chains of so many blocks, each anywhere within one engine."""
    of_each = entries // ENGINES
    drawn = []
    for _ in range(number):
        first = dice.randrange(ENGINES) * of_each + dice.randrange(of_each - keys + 1)
        drawn.append([*range(first, first + keys)])
    return drawn


def questions(client: Client, drawn: Sequence[Sequence[int]], hit: bool) -> list[Question]:
    """Return what to ask for chains; a miss begins with a block that nobody has."""
    if hit:
        return [Question(client.question(chain), len(chain)) for chain in drawn]
    return [
        Question(client.question([NOBODYS + n, *chain[1:]]), 0) for n, chain in enumerate(drawn)
    ]


def in_turns(
    clients: Mapping[str, Client], asked: Mapping[str, Sequence[Question]], rounds: int
) -> dict[str, dict[str, float]]:
    """Ask each BURST questions in each turn, after one that does not count; return each one's
    microseconds.  SystemExit if one finds what is not there or does not find what is."""
    times: dict[str, list[float]] = {name: [] for name in clients}
    for number in range(rounds):
        for name in random.Random(number).sample([*clients], len(clients)):
            for place in range(number * BURST - 1, (number + 1) * BURST):
                question = asked[name][place % len(asked[name])]
                begin = time.perf_counter_ns()
                found = clients[name].ask(question.asked)
                taken = (time.perf_counter_ns() - begin) / 1000
                clients[name].asked(question.asked)
                if found != question.found:
                    raise SystemExit(f"{name} has found {found} of {question.found} blocks")
                times[name].append(taken)
            del times[name][-BURST - 1]
    return {name: percentiles(each) for name, each in times.items()}


def measure(clients: Mapping[str, Client], options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Fill the peers, ask, and yield what is found for each length."""
    dice = random.Random(1)
    drawn = {keys: chains(keys, options.entries, dice) for keys in options.keys}
    others = [NOBODYS * 2 + n for n in range(options.others)]
    for client in clients.values():
        for chain in (*(one for each in drawn.values() for one in each), others):
            client.store(chain)
    for keys in options.keys:
        # All that kvshm and the dict are asked lies somewhere else, as far as memory allows.
        many = chains(keys, options.entries, dice, min(turns(keys) * BURST, MOST_HASHES // keys))
        found: dict[str, Any] = {"keys": keys}
        for kind in ("hit", "miss"):
            asked = {
                name: questions(
                    client, many if isinstance(client, Kvshm) else drawn[keys], kind == "hit"
                )
                for name, client in clients.items()
            }
            found[kind] = in_turns(clients, asked, turns(keys))
        yield found


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--lmcache", type=Path, required=True, help="folder in which LMCache is installed")
    add("--mooncake", type=Path, required=True, help="folder in which Mooncake is installed")
    add("--keys", type=int, nargs="+", default=[*KEYS], help="blocks of a chain")
    add("--entries", type=int, default=ENTRIES, help="of kvshm's index and the dict")
    add("--others", type=int, default=OTHERS, help="blocks that the peers hold beside the chains")
    add("--host-network", action="store_true", help="stay in the machine's network")
    options = parser.parse_args()
    for name in ("lmcache", "mooncake"):
        folder = getattr(options, name)
        if not (folder / name).is_dir():
            parser.error(f"--{name} {folder}: {name} is not installed there")
    if min(options.keys) < 1 or max(options.keys) > options.entries // ENGINES:
        parser.error(f"--keys: a chain has from 1 to {options.entries // ENGINES} blocks")
    return options


def main() -> None:
    """Command line: print a line of JSON for each length of chains."""
    options = _options()
    if not options.host_network:
        without_network()
    end_what_is_started()
    sys.path += [str(folder.resolve()) for folder in (options.lmcache, options.mooncake)]
    with ExitStack() as stack:
        os.sched_setaffinity(0, {SERVER_CORE})
        peers: dict[str, Client] = {
            "mooncake": stack.enter_context(mooncake(options.mooncake)),
            "lmcache": stack.enter_context(lmcache(options.lmcache.resolve())),
        }
        os.sched_setaffinity(0, {CLIENT_CORE})
        ours = stack.enter_context(kvshm(options.entries))
        dictionary = Dict(options.entries, options.entries // ENGINES)
        found = [*measure({"kvshm": ours, "dict": dictionary, **peers}, options)]
    for one in found:
        report(
            "peer-lookups",
            unit="us",
            entries=options.entries,
            engines=ENGINES,
            others=options.others,
            network="host" if options.host_network else "loopback",
            **one,
        )


if __name__ == "__main__":
    main()
