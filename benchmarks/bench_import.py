"""Time to first token: prefix imported from another engine, hit locally, or computed.

    PYTHONPATH=examples python benchmarks/bench_import.py [--rounds 30] [--tokens 3500]

Every round draws a new prompt, has engine A compute it, and asks engine B twice: the first
time B imports the prefix, the second time it hits it locally.  So the three are interleaved
and a busy machine slows all of them.  Before either, B was idle while A computed a prompt: an
engine that has just served the same prompt answers some milliseconds sooner, whatever it does.
Every block was in use before the first round that counts:
the first touch of memory costs as much again, whether its contents are computed or imported.
One engine serves one request at a time.
"""

from __future__ import annotations

import argparse
import random

from local_node import EngineSpec
from measurement import percentiles, report
from sharing_node import BLOCK_SIZE, SharingNode, observe
from tiny_model import write_model

ROOM_PROMPTS = 6
"""Prompts that fit into an engine's KV cache: from then on blocks are reused."""
WARM_UP = ROOM_PROMPTS + 3
VOCABULARY = 1500


def main() -> None:
    """Command line: print one line of JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--tokens", type=int, default=3500)
    args = parser.parse_args()
    blocks = (args.tokens - 1) // BLOCK_SIZE
    room = ROOM_PROMPTS * (blocks + 2)
    ways: dict[str, list[float]] = {"computed": [], "imported": [], "local_hit": []}
    with SharingNode() as node:
        model = write_model(node.run_dir / "model")
        node.start_coordinator()
        a, b = node.start_engines(
            EngineSpec("a", model, core=0, num_blocks=room),
            EngineSpec("b", model, core=1, num_blocks=room),
        )
        node.wait_joined(a, b)
        for number in range(args.rounds + WARM_UP):
            drawn = random.Random(number)
            prompt = [drawn.randrange(VOCABULARY) for _ in range(args.tokens)]
            with node.sharing(a, blocks):
                answers = {"computed": a.complete(prompt, max_tokens=2)}
            with observe(node, b) as seen:
                answers["imported"] = b.complete(prompt, max_tokens=2)
            a.complete([drawn.randrange(VOCABULARY) for _ in range(args.tokens)], max_tokens=2)
            with observe(node, b):  # its look at the metrics wakes B's server before either
                answers["local_hit"] = b.complete(prompt, max_tokens=2)
            if seen.tokens.imported != blocks * BLOCK_SIZE:
                raise SystemExit(f"round {number}: {seen.tokens.imported} tokens were imported")
            if number >= WARM_UP:
                for way, answer in answers.items():
                    ways[way].append(answer.ttft_s * 1000)
    times = {f"{way}_ms": percentiles(values) for way, values in ways.items()}
    ratio = times["imported_ms"]["p50"] / times["local_hit_ms"]["p50"]
    report("import", tokens=args.tokens, imported_tokens=blocks * BLOCK_SIZE, **times,
           imported_over_local_hit_p50=round(ratio, 2))  # fmt: skip


if __name__ == "__main__":
    main()
