"""vLLM offline, sharing its prefix cache with the other engines of this machine.

    python examples/offline.py [--model MODEL]

Run it twice at the same time, with a coordinator (``kvshm-coordinator``): a prefix that one
engine has prefilled is imported by the other.  Alone it shows the local hit that an import equals.
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
from pathlib import Path

from tiny_model import write_model

# This is all there is to it.  It has to be set before vLLM reads its plugins.
os.environ["KVSHM_ENABLE"] = "1"
# And this is for a model so tiny that computing is as fast as importing.
os.environ.setdefault("KVSHM_MIN_PREFIX_TOKENS", "0")

PREFIX = "the same long beginning of every prompt " * 20
QUESTIONS = ("what comes first", "what comes second")


def ask(model: str) -> None:
    """Send prompts with one prefix, one after the other; print what was not prefilled."""
    from vllm import LLM, SamplingParams  # only now: it reads the environment

    # Engines share if they would compute the same bytes, so give both the same arguments.  Of the
    # memory, a GPU's or the CPU's, each takes nearly all unless its part is given.
    llm = LLM(
        model=model,
        dtype="bfloat16",
        max_model_len=4096,
        enforce_eager=True,
        gpu_memory_utilization=0.3,
    )
    greedy = SamplingParams(temperature=0, max_tokens=8)
    for question in QUESTIONS:
        (answer,) = llm.generate(PREFIX + question, greedy, use_tqdm=False)
        tokens = len(answer.prompt_token_ids)
        print(f"{question}: {answer.num_cached_tokens} of {tokens} prompt tokens were cached")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", help="a model of vLLM's; default: tiny, random weights")
    model = parser.parse_args().model
    # No TemporaryDirectory: its finalizer, if it is a process's first, makes Python wait at exit
    # for vLLM's engine before vLLM has ended it.
    directory = Path(tempfile.mkdtemp(prefix="kv-"))
    try:
        ask(model or str(write_model(directory)))
    finally:
        shutil.rmtree(directory)


if __name__ == "__main__":  # vLLM starts further processes, which import this file
    main()
