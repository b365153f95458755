"""docs/models.jsonl says of each architecture what the installed vLLM plans and what kvshm answers.

In a process of its own: the program plays a machine."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("vllm")

ROOT = Path(__file__).parents[2]
SAMPLE = (
    "LlamaForCausalLM",  # one group
    "Gemma4ForCausalLM",  # windows, blocks of several sizes
    "Llama4ForConditionalGeneration",  # chunks; made of a text and a vision model
    "DeepseekV32ForCausalLM",  # latents and an indexer's keys
    "DeepseekV4ForCausalLM",  # windows of latents, compressed ones
    "FalconH1ForCausalLM",  # states
    "MambaForCausalLM",  # states, reused if asked
    "HrmTextForCausalLM",  # nothing that vLLM reuses
    "WhisperForConditionalGeneration",  # refused for its kind
    "BeeForConditionalGeneration",  # no configuration
)


def check(*names: str) -> str:
    """What the program says to these architectures, to all if none is named."""
    command = [sys.executable, str(ROOT / "docs/model_plans.py"), "--check", *names]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "docs")])}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=300)
    lines = done.stdout.strip().splitlines()
    assert done.returncode == 0, "\n".join([*lines, done.stderr[-2000:]])
    return lines[-1]


def test_some_of_each_kind_are_planned_as_was_written() -> None:
    assert check(*SAMPLE) == f"{len(SAMPLE)} architectures are planned as was written"


@pytest.mark.long
def test_all_of_the_registry_are_planned_as_was_written() -> None:
    """Else: `python docs/model_plans.py` with each vLLM, then `make docs`."""
    (count,) = re.findall(r"^(\d+) architectures are planned as was written$", check())
    assert int(count) > 200
