"""The digest of quantized weights and of the scales of an fp8 cache, as vLLM loads and repacks
them: equal checkpoints have equal ones, and one other scale or weight shows."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("vllm")

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[2]
KINDS = ("fp8", "w4a16", "gptq", "awq", "fp8 cache")


@pytest.fixture(scope="module")
def digests(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """By kind: of two loads, of one with another scale, of one with another weight."""
    folder = tmp_path_factory.mktemp("quantized")
    command = [sys.executable, "-m", "tests.vllm.quantized", str(folder)]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "examples")])}
    done = subprocess.run(
        command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, list[str]] = json.loads(done.stdout.splitlines()[-1])
    assert set(found) == {*KINDS, "int8"}
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_equal_checkpoints_have_equal_digests_and_others_never(
    digests: dict[str, list[str]], kind: str
) -> None:
    first, again, other_scale, other_weight = digests[kind]
    assert len(first) == 64, first
    assert first == again
    assert len({first, other_scale, other_weight}) == 3


def test_what_a_kernel_keeps_for_itself_is_refused_by_name(digests: dict[str, list[str]]) -> None:
    (said,) = set(digests["int8"])
    assert said == "unknown: vLLM keeps model.layers.0.mlp.down_proj.weight where it cannot be read"
