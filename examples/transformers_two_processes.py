"""Two processes serve one model with transformers; the second imports what the first has computed.

    python examples/transformers_two_processes.py [--model DIRECTORY]

The first computes some prompts.  Then the second answers them from imported blocks, and the first
once more from its own cache: both must agree in every bit.  Prints where the tokens of the prompts
came from; ends with 1 if nothing was imported or an answer differs.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
from contextlib import contextmanager
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from local_node import Node

PAGE_SIZE = 64
PROMPT_TOKENS = 1000
PATIENCE_S = 60.0


def engine(model_path: str, environment: dict[str, str], pipe: Connection) -> None:
    """One process: answer each prompt that comes out of the pipe, until it is closed."""
    os.environ.update(environment)
    import torch
    from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

    from kvshm.hooks.transformers import node_of, share, stats_of

    torch.set_num_threads(1)  # both alike: answers are compared bit for bit
    model = AutoModelForCausalLM.from_pretrained(model_path, attn_implementation="sdpa")
    generation = GenerationConfig(do_sample=False, eos_token_id=-1)
    config = ContinuousBatchingConfig(
        page_size=PAGE_SIZE, num_blocks=256, max_batch_tokens=1024, return_logprobs=True
    )
    # The one line that brings kvshm in:
    manager = share(model.init_continuous_batching(generation, config))
    manager.warmup()
    manager.start()
    node = node_of(manager)
    assert node is not None, "the log says why it does not share"
    assert node.wait_joined(PATIENCE_S)
    pipe.send("ready")
    while (message := pipe.recv()) is not None:
        prompt, elsewhere = message
        keys = node.keys(prompt)[: (len(prompt) - 1) // PAGE_SIZE]
        if elsewhere:  # only so that this program need not guess how long the news takes
            node.wait_for(keys, PATIENCE_S)
        manager.add_request(prompt, max_new_tokens=16)
        while (output := manager.get_result(timeout=1)) is None:
            pass
        pipe.send((output.generated_tokens, output.logprobs, stats_of(manager)))
    manager.stop()


class Process:
    """An engine in a process of its own."""

    def __init__(self, model_path: str, environment: dict[str, str]) -> None:
        context = get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=engine, args=(model_path, environment, theirs))
        self._process.start()

    def wait_ready(self) -> None:
        self._pipe.recv()

    def ask(self, prompt: list[int], elsewhere: bool = False) -> tuple[Any, dict[str, int]]:
        """Return the answer, its tokens and their log-probabilities, and the engine's counters.
        ``elsewhere``: another engine has the prompt; wait until this one has heard of it."""
        self._pipe.send((prompt, elsewhere))
        tokens, logprobs, stats = self._pipe.recv()
        return (tokens, logprobs), stats

    def stop(self) -> None:
        self._pipe.send(None)
        self._process.join()


@contextmanager
def model_of(options: argparse.Namespace) -> Any:
    """The model asked for, or a tiny one with random weights."""
    if options.model:
        yield options.model
        return
    from tiny_model import write_model

    with tempfile.TemporaryDirectory(prefix="kv-") as directory:
        yield str(write_model(Path(directory)))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", help="a model of full attention; default: tiny, random")
    parser.add_argument("--prompts", type=int, default=4)
    options = parser.parse_args()
    drawn = random.Random(1)
    prompts = [
        [drawn.randrange(10, 600) for _ in range(PROMPT_TOKENS)] for _ in range(options.prompts)
    ]
    with model_of(options) as model_path, Node() as node:
        node.start_coordinator()
        first, second = (Process(model_path, node.environment) for _ in range(2))
        for process in (first, second):
            process.wait_ready()
        for prompt in prompts:
            first.ask(prompt)
        answers = [second.ask(prompt, elsewhere=True) for prompt in prompts]
        hits = [first.ask(prompt)[0] for prompt in prompts]
        for process in (first, second):
            process.stop()
    equal = [mine == theirs for (mine, _), theirs in zip(answers, hits, strict=True)]
    tokens, total = answers[-1][1]["imported_tokens"], sum(map(len, prompts))
    print(f"the second process imported {tokens} of {total} tokens, computed {total - tokens}")
    print(f"{sum(equal)} of {len(equal)} of its answers equal those of a local hit in every bit")
    return 0 if tokens and all(equal) else 1


if __name__ == "__main__":
    sys.exit(main())
