"""Time to first token: a long prefix imported from another engine, hit locally, or computed; the
same with LMCache's server and vLLM's own offloading; and the length from which importing pays.

    PYTHONPATH=examples python benchmarks/bench_import.py [--rounds 15] [--starts 3]
        [--arms kvshm,lmcache,offload+copies,offload --lmcache FOLDER]

An arm (load_arms.py) is two engines.  In each of its rounds, for a prompt of each length, the
second engine is asked three times:

imported    what the first engine has computed; of an arm that offloads, what the second one has
            computed itself and has left in host memory only
local_hit   the same again
computed    a prompt that is new to all; every other round it is the first of the three

Before each of them the second engine was idle while the first one computed a prompt of that length:
an engine that has just served a prompt answers the next one some milliseconds sooner, whatever it
does.  Arms and lengths follow each other in every round, so a busy machine slows all of them; the
engines of the other arms sleep meanwhile (compare.py).  Every block was in use before the first
round that counts: the first touch of memory costs as much again, whatever is written there.  A
round in which a prompt came from elsewhere is left out, and counted.

A prompt is a prefix of whole blocks and TAIL_TOKENS that are computed in any case.  The model's
prefill takes more than a second; its weights are random.
"""

from __future__ import annotations

import argparse
import math
import random
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from compare import ASLEEP_SECONDS, AWAKE_TOKENS, RESAMPLES, ratio
from load_arms import KINDS, Arm, Setting, started, why
from local_node import Engine, wait_until
from measurement import percentiles, report
from sharing_node import BLOCK_SIZE
from tiny_model import write_model

SIZES = {"hidden_size": 512, "intermediate_size": 1408, "num_attention_heads": 8}
BYTES_PER_BLOCK = 262_144
"""Of the KV cache of this model: keys and values of four layers, 256 bytes each for a token."""
TAIL_TOKENS = 44
ROOM_PROMPTS = 4
"""Prompts that fit into an engine's KV cache: from then on blocks are reused."""
WARM_UP = 3
VOCABULARY = range(300, 1500)
WAYS = ("imported", "local_hit", "computed")
STORED_SECONDS = 60.0
PAUSE_SECONDS = 0.1
"""Before each question: by then the engine that has computed does nothing behind its answer."""

Times = dict[str, float | None]
"""Way -> milliseconds, or None if the prompt did not come from where it should."""


class Prompts:
    """Prompts that no engine has seen."""

    def __init__(self, seed: int) -> None:
        self._drawn = random.Random(seed)

    def new(self, tokens: int) -> list[int]:
        """Return a prompt with a prefix of so many tokens."""
        return self._drawn.choices(VOCABULARY, k=tokens + TAIL_TOKENS)


# -- one arm


def bring(kind: str, arm: Arm, prompt: list[int], other: list[int]) -> None:
    """Have a prompt lie where the second engine has to load it from, while that one is idle for as
    long as the first engine computes."""
    first, second = arm.engines
    blocks = len(prompt) // BLOCK_SIZE
    if KINDS[kind].shares:
        with arm.node.sharing(first, blocks):
            first.complete(prompt, max_tokens=2)
    elif arm.store:
        before = _stored(arm)
        first.complete(prompt, max_tokens=2)
        for _ in wait_until("LMCache has stored the prompt", STORED_SECONDS):
            if _stored(arm) >= before + blocks:
                break
    else:
        second.complete(prompt, max_tokens=4)  # blocks are offloaded in the steps after
        second.request("/reset_prefix_cache", post=True)
        first.complete(other, max_tokens=2)


def _stored(arm: Arm) -> int:
    assert arm.store is not None
    status = arm.store.status()
    return status["total_object_count"] - status["staging_object_count"]


def timed(engine: Engine, prompt: list[int], source: str) -> float | None:
    """Return the milliseconds to the first token; None if the prefix is not of that source."""
    time.sleep(PAUSE_SECONDS)
    before = engine.prompt_tokens()  # wakes the server
    took = engine.complete(prompt, max_tokens=2).ttft_s * 1000
    used = engine.prompt_tokens() - before
    return took if getattr(used, source) >= len(prompt) - TAIL_TOKENS else None


def ask(kind: str, arm: Arm, tokens: int, prompts: Prompts, computed_first: bool) -> Times:
    """Ask the second engine for a prefix of so many tokens in each way."""
    (first, second), prompt, times = arm.engines, prompts.new(tokens), dict[str, float | None]()

    def compute() -> None:
        first.complete(prompts.new(tokens), max_tokens=2)
        times["computed"] = timed(second, prompts.new(tokens), "computed")

    def load() -> None:
        bring(kind, arm, prompt, prompts.new(tokens))
        times["imported"] = timed(second, prompt, "imported")
        first.complete(prompts.new(tokens), max_tokens=2)
        times["local_hit"] = timed(second, prompt, "local_hit")

    for part in (compute, load) if computed_first else (load, compute):
        part()
    return times


# -- all arms

Measured = dict[str, dict[int, list[Times]]]
"""Arm -> tokens of the prefix -> each round."""


def measure(
    arms: dict[str, Arm], lengths: Sequence[int], rounds: int, failed: dict[str, str]
) -> Measured:
    """Go round by round through all arms, in an order that changes.  An arm that breaks off is
    left out of what is returned, and ``failed`` says why."""
    prompts = Prompts(seed=len(failed))
    found: Measured = {kind: {tokens: [] for tokens in lengths} for kind in arms}
    for number in range(-WARM_UP, rounds):
        for kind in random.Random(number).sample(list(found), len(found)):
            try:
                for tokens in lengths if number >= 0 else [max(lengths)]:
                    _wake(arms[kind])
                    times = ask(kind, arms[kind], tokens, prompts, number % 2 == 0)
                    if number >= 0:
                        found[kind][tokens].append(times)
            except (RuntimeError, OSError) as error:
                failed[kind] = why(error)
                del found[kind]
    return found


def _wake(arm: Arm) -> None:
    time.sleep(ASLEEP_SECONDS)  # those of the arm before
    for engine in reversed(arm.engines):
        engine.complete([VOCABULARY[0]] * AWAKE_TOKENS, max_tokens=2)


def start(
    kinds: Sequence[str], setting: Setting, lengths: Sequence[int], rounds: int
) -> tuple[Measured, dict[str, str]]:
    """Start all arms, measure, and end them.  Returned with it: why arms failed."""
    arms, failed = dict[str, Arm](), dict[str, str]()
    with ExitStack() as running:
        for kind in kinds:
            try:
                arms[kind] = running.enter_context(started(KINDS[kind], setting))
            except (RuntimeError, OSError) as error:
                failed[kind] = why(error)
        return measure(arms, lengths, rounds, failed), failed


# -- results

Starts = list[list[dict[str, float]]]
"""Start by start, the rounds in which every way was taken."""


def complete(starts: Sequence[Measured], kind: str, tokens: int) -> Starts:
    """Return the rounds of an arm and length in which every prompt came from where it should."""
    rounds = [each[kind][tokens] for each in starts if kind in each]
    return [
        [
            {way: ms for way, ms in times.items() if ms is not None}
            for times in each
            if _whole(times)
        ]
        for each in rounds
    ]


def _whole(times: Times) -> bool:
    return all(times[way] is not None for way in WAYS)


def of_length(starts: Starts, left_out: int) -> dict[str, Any]:
    """Return what all starts say of one arm and length."""
    kept = [rounds for rounds in starts if rounds]
    if sum(map(len, kept)) < 2:
        return {"rounds_left_out": left_out}

    def by_start(way: str) -> list[list[float]]:
        return [[times[way] for times in rounds] for rounds in kept]

    found: dict[str, Any] = {f"{way}_ms": percentiles([*chain(*by_start(way))]) for way in WAYS}
    for other in ("local_hit", "computed"):
        found[f"imported_over_{other}"] = ratio(by_start("imported"), by_start(other))
    pairs = [(times["imported"], times["local_hit"]) for rounds in kept for times in rounds]
    return {**found, "imported_over_local_hit_p99": tails(pairs), "rounds_left_out": left_out}


def tails(pairs: Sequence[tuple[float, float]]) -> dict[str, float]:
    """Return how the two sides' p99 are to each other, with the 95 % interval (bootstrap)."""

    def over(some: Sequence[tuple[float, float]]) -> float:
        mine, others = (percentiles(side)["p99"] for side in zip(*some, strict=True))
        return mine / others

    drawn = random.Random(1)
    found = sorted(over(drawn.choices(pairs, k=len(pairs))) for _ in range(RESAMPLES))
    low, high = found[RESAMPLES // 40], found[-RESAMPLES // 40]
    return {"ratio": round(over(pairs), 3), "low": round(low, 3), "high": round(high, 3)}


def pays_from(by_length: dict[int, dict[str, Any]]) -> int | None:
    """Return the least length from which on, as far as it was measured, importing is faster than
    computing: the whole interval of the ratio is below 1.  None: at no length."""
    pays: int | None = None
    for tokens in sorted(by_length, reverse=True):
        if by_length[tokens].get("imported_over_computed", {"high": 1.0})["high"] >= 1.0:
            break
        pays = tokens
    return pays


def against(starts: Sequence[Measured], mine: str, other: str, tokens: int) -> dict[str, float]:
    """Return the ratio of two arms' imports, round by round; empty without two rounds."""
    sides: tuple[list[list[float]], list[list[float]]] = ([], [])
    for each in (each for each in starts if mine in each and other in each):
        rounds = zip(each[mine][tokens], each[other][tokens], strict=True)
        both = [(a["imported"], b["imported"]) for a, b in rounds]
        kept = [(a, b) for a, b in both if a is not None and b is not None]
        if kept:
            sides[0].append([a for a, _ in kept])
            sides[1].append([b for _, b in kept])
    return ratio(*sides) if sum(map(len, sides[0])) > 1 else {}


def results(
    starts: Sequence[Measured], arms: Sequence[str], lengths: Sequence[int]
) -> dict[str, Any]:
    """Return what is printed: of the longest prefix all, of the others what says where importing
    begins to pay."""
    found: dict[str, Any] = {"arms": {}, "lengths": {}, "pays_from_tokens": {}}
    for arm in (arm for arm in arms if any(arm in each for each in starts)):
        asked = sum(len(each[arm][lengths[0]]) for each in starts if arm in each)
        by_length = {}
        for tokens in lengths:
            rounds = complete(starts, arm, tokens)
            by_length[tokens] = of_length(rounds, asked - sum(map(len, rounds)))
        found["pays_from_tokens"][arm] = pays_from(by_length)
        found["arms"][arm] = by_length.pop(max(lengths))
        found["lengths"][arm] = by_length
    others = [arm for arm in found["arms"] if arm != arms[0]]
    longest = max(lengths)
    over = {f"{arms[0]}_over_{arm}": against(starts, arms[0], arm, longest) for arm in others}
    return {**found, "imported": over}


# -- command line


def _listed(text: str) -> list[int]:
    return [int(each) for each in text.split(",")]


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--arms", default="kvshm", help=f"the first one is compared with the others: {[*KINDS]}")
    add("--rounds", type=int, default=15, help="of each arm after each start")
    add("--starts", type=int, default=1)
    add("--tokens", type=int, default=3456, help="of the longest prefix")
    add("--lengths", type=_listed, default=[128, 256, 512, 1024, 2048], help="of other prefixes")
    add("--lmcache", type=Path, help="folder in which LMCache is installed")
    options = parser.parse_args()
    options.arms = options.arms.split(",")
    _check(parser, options)
    return options


def _check(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Refuse now what would fail after minutes."""
    if unknown := set(options.arms) - set(KINDS) | ({"plain"} & set(options.arms)):
        parser.error(f"--arms {','.join(sorted(unknown))}: nothing that loads a prefix")
    if min(options.rounds - 1, options.starts) < 1:
        parser.error("--rounds: below 2, or --starts: below 1")
    for tokens in (options.tokens, *options.lengths):
        if tokens < BLOCK_SIZE or tokens % BLOCK_SIZE:
            parser.error(f"a prefix of {tokens} tokens: not whole blocks of {BLOCK_SIZE}")
    if max(options.lengths) >= options.tokens:
        parser.error(f"--lengths: not all are below --tokens {options.tokens}")
    stores = any(KINDS[arm].stores for arm in options.arms)
    if stores and not (options.lmcache and (options.lmcache / "lmcache").is_dir()):
        parser.error("LMCache needs --lmcache FOLDER, into which it was installed")


def _setting(options: argparse.Namespace, model: Path) -> Setting:
    blocks = (options.tokens + sum(options.lengths)) // BLOCK_SIZE
    stored = 5 * blocks * (options.rounds + WARM_UP) * BYTES_PER_BLOCK
    room = ROOM_PROMPTS * (options.tokens // BLOCK_SIZE + 2)
    longest = options.tokens + TAIL_TOKENS + 16
    extra_gb = math.ceil(1.5 * stored / (1 << 30))  # nothing is evicted there
    always = {"KVSHM_MIN_PREFIX_TOKENS": "0"}
    return Setting(model, 2, room, extra_gb, options.lmcache, longest, always)


def main() -> None:
    """Command line: print one line of JSON."""
    options = _options()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    lengths = [*sorted(options.lengths), options.tokens]
    with TemporaryDirectory(prefix="import-") as directory:
        model = write_model(Path(directory) / "model", **SIZES)
        setting = _setting(options, model)
        runs = [
            start(options.arms, setting, lengths, options.rounds) for _ in range(options.starts)
        ]
    report(
        "import",
        imported_tokens=options.tokens,
        tail_tokens=TAIL_TOKENS,
        starts=options.starts,
        rounds=options.rounds,
        **results([measured for measured, _ in runs], options.arms, lengths),
        failed={arm: reason for _, failed in runs for arm, reason in failed.items()},
    )


if __name__ == "__main__":
    main()
