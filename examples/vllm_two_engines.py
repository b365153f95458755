"""Two vLLM engines, the same requests twice: first cold, then with what the other has computed.

    python examples/vllm_two_engines.py --device cuda --model Qwen/Qwen2.5-1.5B-Instruct
    python examples/vllm_two_engines.py --device cpu

Each phase sends the same prompts to one engine after the other, once without and once with
kvshm, and prints latency, throughput and where the prompt tokens came from: the first engine is
cold, the second one warm if it imports.  Then the second engine answers fresh prompts over prefixes
that the first has computed, and the first answers them from its own cache.  Ends with 1 if the
second engine imported nothing; on CPU, where both round alike, also if these answers differ in a
bit.  (How requests met in batches changes rounding too, so the answers of the phases only agree.)
"""

from __future__ import annotations

import argparse
import random
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from completions import Result
from local_node import Engine, EngineSpec, Node, PromptTokens

SETTLE_SECONDS = 1.0
"""For the last publications to arrive; sharing does not depend on it, the numbers do."""

BLOCKS = 512
"""KV blocks of 128 tokens per engine on CPU."""


@dataclass(frozen=True)
class Phase:
    """What one engine did with all prompts."""

    results: list[Result]
    seconds: float
    tokens: PromptTokens

    def __str__(self) -> str:
        firsts = sorted(result.ttft_s * 1e3 for result in self.results)
        rate = len(self.results) / self.seconds
        return (
            f"first token p50 {firsts[len(firsts) // 2]:8.1f} ms, max {firsts[-1]:8.1f} ms, "
            f"{rate:6.2f} requests/s; prompt tokens: {self.tokens.computed} computed, "
            f"{self.tokens.local_hit} hit, {self.tokens.imported} imported"
        )


@dataclass(frozen=True)
class Outcome:
    """What two engines did, with or without kvshm."""

    cold: Phase
    """The first engine."""
    warm: Phase
    """The second one, with the same prompts."""
    equal: list[bool]
    """Of the answers from imported blocks: whether they equal those from a local hit."""


def main() -> int:
    options = arguments()
    with model_of(options) as model:
        plain = outcome(options, model, {"KVSHM_ENABLE": "0"})
        shared = outcome(options, model, {"KVSHM_ENABLE": "1"})
    for name, both in (("without kvshm", plain), ("with kvshm", shared)):
        print(f"{name:14} first engine : {both.cold}")
        print(f"{name:14} second engine: {both.warm}")
    answers = zip(plain.warm.results, shared.warm.results, strict=True)
    agreement = mean([one.agreement(other) for one, other in answers])
    print(f"second engine with and without kvshm: {agreement:.1%} of the tokens agree")
    print(f"{sum(shared.equal)} of {len(shared.equal)} answers from imported blocks equal a hit's")
    if not shared.warm.tokens.imported:
        print("FAILED: the second engine imported nothing")
        return 1
    return 0 if all(shared.equal) or options.device == "cuda" else 1


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


@contextmanager
def model_of(options: argparse.Namespace) -> Iterator[str]:
    """The model asked for, or a tiny one with random weights."""
    if options.model:
        yield options.model
        return
    from tiny_model import write_model

    with tempfile.TemporaryDirectory(prefix="kv-") as directory:
        yield str(write_model(Path(directory)))


def outcome(options: argparse.Namespace, model: str, environment: dict[str, str]) -> Outcome:
    """Send all prompts to the first engine, then to the second; then compare some answers."""
    with Node(environment) as node:
        end_with_this(node)
        node.start_coordinator()
        a, b = node.start_engines(*(spec(options, model, i) for i in range(2)))
        prompts = list(prompts_of(options))
        for engine in (a, b):
            engine.complete(prompts[0][:40], max_tokens=2)  # compiles what it will run
        first = run(a, prompts, options)
        time.sleep(SETTLE_SECONDS)
        second = run(b, prompts, options)
        equal = list(comparisons(a, b, options)) if environment["KVSHM_ENABLE"] == "1" else []
        return Outcome(first, second, equal)


def end_with_this(node: Node) -> None:
    """Let SIGTERM, as of a time limit, end all engines at once, which would keep the GPU."""

    def ended(*_: object) -> None:
        for engine in node.engines:
            engine.signal(signal.SIGKILL)
        sys.exit("ended by SIGTERM")

    signal.signal(signal.SIGTERM, ended)


def comparisons(a: Engine, b: Engine, options: argparse.Namespace) -> Iterator[bool]:
    """Whether ``b`` answers fresh prompts, their prefixes imported, as ``a`` does on a local hit.
    One request at a time: both compute the same tail over the same blocks."""
    numbers = random.Random(2)
    for _ in range(options.prefixes):
        prefix = [numbers.randrange(10, 600) for _ in range(options.tokens)]
        a.complete(prefix, max_tokens=1)
        time.sleep(SETTLE_SECONDS)
        before = b.prompt_tokens().imported
        prompt = [*prefix, *(numbers.randrange(10, 600) for _ in range(40))]
        imported = b.complete(prompt)
        yield b.prompt_tokens().imported > before and imported == a.complete(prompt)


def spec(options: argparse.Namespace, model: str, number: int) -> EngineSpec:
    """The engines differ in nothing but their GPU, if there are two to use."""
    name = f"engine-{number}"
    if options.device == "cpu":
        return EngineSpec(name, Path(model), core=number, num_blocks=BLOCKS)
    return EngineSpec(
        name, Path(model), core=number, cache_bytes=round(options.cache_gib * 2**30),
        environment={"CUDA_VISIBLE_DEVICES": options.gpus.split(",")[number]},
    )  # fmt: skip


def prompts_of(options: argparse.Namespace) -> Iterator[list[int]]:
    """Prompts of token ids: a few long prefixes, many tails."""
    numbers = random.Random(1)
    prefixes = [
        [numbers.randrange(10, 600) for _ in range(options.tokens)] for _ in range(options.prefixes)
    ]
    for number in range(options.requests):
        tail = [numbers.randrange(10, 600) for _ in range(40)]
        yield prefixes[number % options.prefixes] + tail


def run(engine: Engine, prompts: list[list[int]], options: argparse.Namespace) -> Phase:
    """Send the prompts, so many at a time."""
    before, begun = engine.prompt_tokens(), time.perf_counter()
    with ThreadPoolExecutor(options.parallel) as pool:
        results = list(pool.map(lambda prompt: engine.complete(prompt, max_tokens=16), prompts))
    seconds = time.perf_counter() - begun
    return Phase(results, seconds, engine.prompt_tokens() - before)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cpu")
    parser.add_argument("--model", default="", help="a model of vLLM's; default: tiny, random")
    parser.add_argument("--gpus", default="0,0", help="the GPU of each engine")
    parser.add_argument("--cache-gib", type=float, default=2, help="KV cache per engine on CUDA")
    parser.add_argument("--tokens", type=int, default=2048, help="tokens of a prefix")
    parser.add_argument("--prefixes", type=int, default=4, help="how many prefixes")
    parser.add_argument("--requests", type=int, default=16, help="how many requests")
    parser.add_argument("--parallel", type=int, default=4, help="requests at a time")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
