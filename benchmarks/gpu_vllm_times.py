"""Runs that measure: first tokens, steps per import, and an exporter beside imports."""

from __future__ import annotations

import argparse
import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path

from completions import Result
from gpu_vllm_pair import TAIL_TOKENS, Pair, pair, result, rounds, tokens_of
from gpu_vllm_tally import Tally, judged
from local_node import Engine
from measurement import percentiles
from sharing_node import observe

GOAL_TOKENS, GOAL_MS = 10_000, 25.0
"""The first token of a prefix of so many tokens of an 8B's shape."""
GOAL = {"p99_imports_over_hits": 1.1}
"""What imports add to the exporter's p99 inter-token latency: hits have the same forward passes of
the importer on the same GPU, and resting has none."""
PLAYED_STEPS = {"at_once": 2, "asynchronous": 4}
"""On a played clock, from a request's arrival to its first token."""
SCHEDULED_AND_ANSWERED = 2
"""Steps of a request that waits for nothing: with asynchronous scheduling its own, and the next,
during which its output arrives."""
STREAM_TOKENS = 200
STREAM_NUMBER = 1 << 30
"""Of the first of their prompts: no other has it.  -1 would draw the same tokens as 1."""
STEPS_FILE = "COUNTED_STEPS"
"""Of counted_steps_connector.py, whose import would load vLLM."""
WAITING = "importer_load_at_once"
FIRST_TOKENS = "time_to_first_token_seconds"
WAYS = ("computed", "imported", "local_hit")


@dataclass
class Times:
    """Of one length of prefix and one way, in milliseconds."""

    client: list[float] = field(default_factory=list)
    """As the client sees it, HTTP and the prompt's JSON included."""
    engine: list[float] = field(default_factory=list)
    """As vLLM counts it, from the request's arrival in the server on."""


def first_tokens(options: argparse.Namespace) -> bool:
    """Time to first token by length of the prefix, in turn computed, imported and hit."""
    times = {(tokens, way): Times() for tokens in options.lengths for way in WAYS}
    tallies = {tokens: Tally() for tokens in options.lengths}
    number = 1
    with pair(options, graphs=True) as both:
        for _ in rounds(options):
            for tokens in options.lengths:
                one = one_length(both, tokens_of(number, tokens + TAIL_TOKENS), tallies[tokens])
                number += 1
                for way, (client, engine) in one.items():
                    times[tokens, way].client.append(client)
                    times[tokens, way].engine.append(engine)
    wrong = []
    for tokens, tally in tallies.items():
        told = {way: of_way(times[tokens, way]) for way in WAYS}
        faults = tally.faults(f"{tokens} tokens")
        result(options, "first-tokens", prefix_tokens=tokens, **asdict(tally), wrong=faults,
               goal=f"{GOAL_TOKENS} tokens of 8b imported: {GOAL_MS} ms", **told)  # fmt: skip
        wrong += faults
    return judged(wrong)


def one_length(both: Pair, prompt: Sequence[int], tally: Tally) -> dict[str, tuple[float, float]]:
    """Measure one prompt all three ways: milliseconds at the client and in the engine.  Nothing if
    the importer did not import all that it could, or then did not hit it."""
    found = {"computed": timed(both.exporter, lambda: both.let_compute(prompt, max_tokens=2))}
    with observe(both.node, both.importer) as seen:
        found["imported"] = timed(both.importer, lambda: ask(both.importer, prompt))
    before = both.importer.prompt_tokens()
    found["local_hit"] = timed(both.importer, lambda: ask(both.importer, prompt))
    hit = (both.importer.prompt_tokens() - before).local_hit
    return found if tally.add(both.cached_tokens(prompt), seen.tokens.imported, hit) else {}


def ask(engine: Engine, prompt: Sequence[int]) -> Result:
    """Ask for two tokens: one ends before a step without a model could be missed."""
    return engine.complete(prompt, max_tokens=2)


def timed(engine: Engine, answer: Callable[[], Result]) -> tuple[float, float]:
    """Return the milliseconds to the first token, at the client and as the engine counts them."""
    before = sum_of(engine.metrics(), FIRST_TOKENS)
    client = answer().ttft_s
    counted = sum_of(engine.metrics(), FIRST_TOKENS) - before
    return client * 1e3, counted * 1e3


def sum_of(metrics: Mapping[str, float], histogram: str) -> float:
    """Return the sum of all values of one of vLLM's histograms."""
    return sum(value for name, value in metrics.items() if f":{histogram}_sum{{" in name)


def of_way(times: Times) -> dict[str, dict[str, float]]:
    """Summarise one way; empty if it was measured less than twice."""
    if len(times.client) < 2:
        return {}
    return {"client_ms": percentiles(times.client), "engine_ms": percentiles(times.engine)}


def steps(options: argparse.Namespace) -> bool:
    """How many steps of the importer an import takes, beside a request that runs there."""
    waited: dict[str, list[int]] = {kind: [] for kind in (*PLAYED_STEPS, "local_hit")}
    transfer = {"kv_connector": "CountedStepsConnector", "kv_role": "kv_both",
                "kv_connector_module_path": "counted_steps_connector"}  # fmt: skip
    tallies = {tokens: Tally() for tokens in options.lengths}
    written = options.scratch / "steps.jsonl"
    of_importer = {
        "arguments": ("--kv-transfer-config", json.dumps(transfer)),
        "environment": {"KVSHM_ENABLE": "", STEPS_FILE: str(written), "PYTHONPATH": with_this()},
    }
    with pair(options, graphs=True, of_importer=of_importer) as both, streams(both.importer, 1):
        for number in rounds(options):
            tokens = options.lengths[number % len(options.lengths)]
            prompt = tokens_of(number, tokens + TAIL_TOKENS)
            both.let_compute(prompt, max_tokens=2)
            known = len(lines_of(written))
            with observe(both.node, both.importer) as seen:
                ask(both.importer, prompt)
            ask(both.importer, prompt)
            # The stream's own requests, which are shorter, write lines too.
            lines = [one for one in lines_of(written)[known:] if one["prompt"] == len(prompt)]
            imported, *_, hit = lines  # a load that failed is asked for again
            tally, expected = tallies[tokens], both.cached_tokens(prompt)
            if tally.add(expected, imported["imported"], hit["hit"]):
                kind = "at_once" if seen.loads_at_once else "asynchronous"
                waited[kind].append(imported["waited"])
                waited["local_hit"].append(hit["waited"])
    taken = {
        kind: sorted(SCHEDULED_AND_ANSWERED + count for count in counts)
        for kind, counts in waited.items()
    }
    wrong = [fault for tokens, one in tallies.items() for fault in one.faults(f"{tokens} tokens")]
    result(options, "steps", steps_to_first_token=taken, on_a_played_clock=PLAYED_STEPS,
           wrong=wrong)  # fmt: skip
    return judged(wrong)


def with_this() -> str:
    """The module path on which engines find this folder's connector."""
    return os.pathsep.join(filter(None, [str(Path(__file__).parent), os.environ.get("PYTHONPATH")]))


def lines_of(written: Path) -> list[dict[str, int]]:
    """Return the lines that the connector has written so far."""
    return (
        [json.loads(line) for line in written.read_text().splitlines()] if written.exists() else []
    )


class Streams:
    """Requests that decode on an engine without end, and when each of their tokens arrived."""

    def __init__(self, engine: Engine, count: int) -> None:
        self._engine, self._ended = engine, threading.Event()
        self._pool = ThreadPoolExecutor(count)
        self._running = [self._pool.submit(self._decode, number) for number in range(count)]

    def _decode(self, number: int) -> list[tuple[float, ...]]:
        prompt, found = tokens_of(STREAM_NUMBER + number, 40), []
        while not self._ended.is_set():
            found.append(self._engine.complete(prompt, max_tokens=STREAM_TOKENS).arrivals)
        return found

    def end(self) -> list[tuple[float, ...]]:
        """Let the requests end; returns the arrivals of each of them."""
        self._ended.set()
        return [arrivals for one in self._running for arrivals in one.result()]

    def give_up(self) -> None:
        """Wait until the requests have ended, however they do."""
        self._ended.set()
        wait(self._running)


@contextmanager
def streams(engine: Engine, count: int) -> Iterator[Streams]:
    """Keep requests decoding on an engine while the context lasts."""
    running = Streams(engine, count)
    try:
        yield running
    except BaseException:
        running.give_up()  # what has failed first is what is told
        raise
    running.end()


@dataclass
class Phase:
    """Spans of time in which the other engine did one thing, and what that cost."""

    spans: list[tuple[float, float]] = field(default_factory=list)
    hooks_ns: dict[str, int] = field(default_factory=dict)
    """Nanoseconds of both engines' hooks, by hook."""
    requests: int = 0


def beside(options: argparse.Namespace) -> bool:
    """The exporter's inter-token latency while the importer rests, imports, and hits locally."""
    phases = {name: Phase() for name in ("alone", "imports", "hits")}
    tokens, tally = options.lengths[-1], Tally()
    with pair(options, graphs=True) as both, streams(both.exporter, options.streams) as running:
        for number in rounds(options):
            numbers = range(number * options.batch, (number + 1) * options.batch)
            prompts = [tokens_of(one, tokens + TAIL_TOKENS) for one in numbers]
            for prompt in prompts:
                both.let_compute(prompt, max_tokens=2)
            before = both.importer.prompt_tokens()
            took = during(both, phases["imports"], prompts)
            between = both.importer.prompt_tokens()
            during(both, phases["hits"], prompts)
            hit = (both.importer.prompt_tokens() - between).local_hit
            expected = sum(map(both.cached_tokens, prompts))
            tally.add(expected, (between - before).imported, hit)
            rest(both, phases["alone"], took)
        arrivals = running.end()
    gaps = {name: list(gaps_in(arrivals, phase.spans)) for name, phase in phases.items()}
    latency = {name: percentiles(found) for name, found in gaps.items() if len(found) > 1}
    wrong = tally.faults(f"{tokens} tokens")
    wrong += [f"no time between two tokens while {name}" for name in phases if name not in latency]
    result(
        options, "beside", prefix_tokens=tokens, streams=options.streams,
        imports=phases["imports"].requests, **asdict(tally), wrong=wrong, inter_token_ms=latency,
        p99_imports_over_hits=ratio(latency, "hits"), goal=GOAL,
        p99_imports_and_their_forward_passes_over_alone=ratio(latency, "alone"),
        hooks_us_per_request={name: per_request(phase) for name, phase in phases.items()},
        hooks_us_per_import=per_import(phases["imports"], phases["hits"]),
    )  # fmt: skip
    return judged(wrong)


def during(both: Pair, phase: Phase, prompts: Sequence[Sequence[int]]) -> float:
    """Have the importer answer prompts, one at a time; returns the seconds."""
    before, start = hooks_of(both), time.perf_counter()
    for prompt in prompts:
        ask(both.importer, prompt)
    end = time.perf_counter()
    count(phase, before, hooks_of(both), start, end)
    phase.requests += len(prompts)
    return end - start


def rest(both: Pair, phase: Phase, seconds: float) -> None:
    """Let the importer do nothing, as long as it imported, and for a second at least."""
    before, start = hooks_of(both), time.perf_counter()
    time.sleep(max(seconds, 1.0))
    count(phase, before, hooks_of(both), start, time.perf_counter())


def count(
    phase: Phase, before: Mapping[str, int], after: Mapping[str, int], start: float, end: float
) -> None:
    """Add one span to a phase."""
    phase.spans.append((start, end))
    for hook, spent in after.items():
        phase.hooks_ns[hook] = phase.hooks_ns.get(hook, 0) + spent - before[hook]


def hooks_of(both: Pair) -> dict[str, int]:
    """Nanoseconds of kvshm's hooks so far, by engine and hook."""
    engines = {"exporter": both.exporter, "importer": both.importer}
    return {
        f"{name}_{hook}": spent
        for name, engine in engines.items()
        for hook, spent in both.hook_ns(engine).items()
    }


def per_request(phase: Phase) -> dict[str, float]:
    """Microseconds of the hooks per request of the phase; in all if it had none."""
    return {
        hook: round(spent / 1e3 / max(phase.requests, 1), 1)
        for hook, spent in phase.hooks_ns.items()
        if spent
    }


def per_import(imports: Phase, hits: Phase) -> dict[str, float]:
    """Microseconds that the hooks take more for an import than for a hit, by engine.  The wait for
    what a step needs at once, in which the copy runs, counts on its own."""
    found = {"exporter": 0.0, "importer": 0.0, "importer_waits": 0.0}
    before = per_request(hits)
    for hook, spent in per_request(imports).items():
        name = "importer_waits" if hook == WAITING else hook.partition("_")[0]
        found[name] += spent - before.get(hook, 0.0)
    return {name: round(spent, 1) for name, spent in found.items()}


def gaps_in(
    arrivals: Sequence[tuple[float, ...]], spans: Sequence[tuple[float, float]]
) -> Iterator[float]:
    """Yield the milliseconds between two tokens of a request that both came within one span."""
    for start, end in spans:
        for times in arrivals:
            for one, other in pairwise(times):
                if start <= one and other <= end:
                    yield (other - one) * 1e3


def ratio(latency: Mapping[str, Mapping[str, float]], other: str) -> float | None:
    """p99 beside imports over p99 beside something else; None if either is unknown."""
    if "imports" not in latency or other not in latency:
        return None
    return round(latency["imports"]["p99"] / latency[other]["p99"], 3)
