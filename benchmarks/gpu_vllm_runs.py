"""What only two real vLLM engines on one GPU show, each run within eight minutes.

    python benchmarks/gpu_vllm_runs.py equal --device cuda
    python benchmarks/gpu_vllm_runs.py first-tokens --device cpu --lengths 1024,2048 --rounds 3

PYTHONPATH need not be set: see gpu_vllm_path.py.

equal, equal-graphs  answers after an import against local hits, bit for bit, KVSHM_VERIFY=1
first-tokens         time to first token by length of the prefix: computed, imported, local hit
steps                engine steps per import, against the played clock's of tests/vllm/test_steps.py
beside               inter-token latency of the exporter while the other imports; cost of the hooks
killed               either engine is killed mid-import; the other serves on with right answers

Each run prints lines of JSON and appends them to files in KVSHM_GPU_RESULTS if that is set.  Ends
with 1 if an answer was wrong, or if less was imported, hit or measured than should be, each named;
with 2 if it cannot begin, with 124 at its time limit; never because something was slow.
KVSHM_FAULT=zero lets the second engine import wrongly, and equal must fail.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import gpu_vllm_path

gpu_vllm_path.find_all()

# Only now are there the modules that these import.
# ruff: noqa: E402
from gpu_vllm_answers import equal, killed
from gpu_vllm_limits import end_in_time
from gpu_vllm_pair import SHAPES, TINY, try_results_folder
from gpu_vllm_times import beside, first_tokens, steps

RUNS: dict[str, Callable[[argparse.Namespace], bool]] = {
    "equal": partial(equal, graphs=False),
    "equal-graphs": partial(equal, graphs=True),
    "first-tokens": first_tokens,
    "steps": steps,
    "beside": beside,
    "killed": killed,
}
LENGTHS = (1000, 2000, 4000, 8000, 10_000, 16_000, 32_000)


def main() -> int:
    options = arguments()
    options.begun, options.nodes = time.monotonic(), []
    try:
        try_results_folder(options.run)
    except OSError as exc:
        print(f"KVSHM_GPU_RESULTS cannot be written to: {exc}", file=sys.stderr)
        return 2
    end_in_time(options.limit_s, options.nodes)
    with tempfile.TemporaryDirectory(prefix="kv-") as scratch:
        options.scratch = Path(scratch)
        good = RUNS[options.run](options)
    print(f"{options.run}: {'passed' if good else 'FAILED'}", flush=True)
    return 0 if good else 1


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("run", choices=RUNS)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--shape", choices=(TINY, *SHAPES), default=TINY,
                        help="tiny: with weights; the others have dummy weights")  # fmt: skip
    parser.add_argument("--gpus", default="0,0", help="the GPU of each engine")
    parser.add_argument("--cache-gib", type=float, help="KV cache per engine on CUDA")
    parser.add_argument("--lengths", type=numbers, default=LENGTHS, help="tokens of prefixes")
    parser.add_argument("--max-tokens", type=int, help="of a prompt with its answer")
    parser.add_argument("--rounds", type=int, default=30, help="repetitions, in turn")
    parser.add_argument("--seconds", type=float, default=330,
                        help="since the start of the run, after which no round begins")  # fmt: skip
    parser.add_argument("--limit-s", type=float, default=440,
                        help="then the run has failed, and its engines end; 0: none")  # fmt: skip
    parser.add_argument("--streams", type=int, default=8, help="requests that decode meanwhile")
    parser.add_argument("--batch", type=int, default=8, help="imports per phase of 'beside'")
    options = parser.parse_args()
    if options.cache_gib is None:
        # Of an 8B about 98,000 tokens; small models would have more blocks than can be looked at.
        options.cache_gib = 0.5 if options.shape in (TINY, "small") else 12
    if options.max_tokens is None:
        # The tiny model has no more positions.
        options.max_tokens = 8192 if options.shape == TINY else max(options.lengths) + 1024
    return options


def numbers(text: str) -> tuple[int, ...]:
    """Parse "1000,2000"."""
    return tuple(map(int, text.split(",")))


if __name__ == "__main__":
    sys.exit(main())
