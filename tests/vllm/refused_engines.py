"""vLLM engines that kvshm stays out of, one after the other in one process; run by tests only."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import sys
from typing import Any
from unittest import mock

PROMPT = {"prompt_token_ids": list(range(10, 310))}


def answer(arguments: dict[str, Any]) -> int:
    """Make an engine, ask it, end it; returns how many numbers it has answered."""
    from vllm import LLM, SamplingParams

    llm = LLM(
        dtype="bfloat16",
        enforce_eager=True,
        max_model_len=1024,
        num_gpu_blocks_override=64,
        **arguments,
    )
    if arguments.get("runner") == "pooling":
        (embedded,) = llm.embed([PROMPT], use_tqdm=False)
        return len(embedded.outputs.embedding)
    greedy = SamplingParams(temperature=0, ignore_eos=True, max_tokens=16)
    (answered,) = llm.generate([PROMPT], greedy, use_tqdm=False)
    return len(answered.outputs[0].token_ids)


def wanting(needs: str) -> contextlib.AbstractContextManager[object]:
    """Have kvshm need something of vLLM's block pool that this version does not have."""
    from kvshm.hooks.vllm.exports import pool_watch

    if not needs:
        return contextlib.nullcontext()
    return mock.patch.object(pool_watch, needs, ("of_another_version",))


def main(cases: str) -> None:
    for name, arguments, environment, needs in json.loads(cases):
        print(json.dumps({"made": name}), flush=True)
        with mock.patch.dict(os.environ, environment), wanting(needs):
            answered = answer(arguments)
        gc.collect()  # ends the engine
        print(json.dumps({"answered": answered}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
