"""The digest of quantized weights and of the scales of an fp8 cache, as vLLM loads and repacks
them: equal checkpoints have equal ones, and one other scale or weight shows."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from subprocess import PIPE, Popen
from typing import Any

import pytest

pytest.importorskip("vllm")

import torch

from kvshm._base import fingerprint as names
from kvshm.hooks.vllm.identity import fields as fields_module
from kvshm.hooks.vllm.identity.experts import NO_EXPERTS

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[2]
NEED_AVX512 = () if torch.cpu._is_avx512_supported() else ("mxfp4",)
KINDS = ("fp8", "w4a16", "wNa8o8", "gptq", "awq", "fp8 cache", "mxfp4")


def said_by(*commands: list[str]) -> list[Any]:
    """What each of these programs says, which run at the same time."""
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "examples")])}
    environ |= {"OMP_NUM_THREADS": "1"}  # two programs at a time may have two cores
    environ |= {"VLLM_CPU_INT4_W4A8": "0"}  # vLLM's kernel for AMX refuses wNa8o8
    how: dict[str, Any] = {"cwd": ROOT, "env": environ, "stdout": PIPE, "stderr": PIPE}
    begin = [sys.executable, "-m", "tests.vllm.quantized"]
    running = [Popen([*begin, *command], text=True, **how) for command in commands]
    ended = [each.communicate(timeout=300) for each in running]
    for each, (_, errors) in zip(running, ended, strict=True):
        assert each.returncode == 0, errors[-2000:]
    return [json.loads(out.splitlines()[-1]) for out, _ in ended]


@pytest.fixture(scope="module")
def digests(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """By kind: of two loads, of one with another scale, of one with another weight."""
    found: dict[str, list[str]]
    (found,) = said_by([str(tmp_path_factory.mktemp("quantized"))])
    assert {*found, *NEED_AVX512} == {*KINDS, "int8"}
    return found


AMX = torch.cpu._is_amx_tile_supported()
"""Then vLLM's kernel for int8 leaves the weight in the layer."""


@pytest.mark.parametrize("kind", [*KINDS, *(["int8"] if AMX else [])])
def test_equal_checkpoints_have_equal_digests_and_others_never(
    digests: dict[str, list[str]], kind: str
) -> None:
    if kind in NEED_AVX512:
        pytest.skip("vLLM has no kernel for this CPU that takes such weights")
    first, again, other_scale, other_weight = digests[kind]
    assert len(first) == 64, first
    assert first == again
    assert len({first, other_scale, other_weight}) == 3


@pytest.mark.skipif(AMX, reason="with AMX no kernel of vLLM's for CPUs keeps a quantized weight")
def test_what_a_kernel_keeps_for_itself_is_refused_by_name(digests: dict[str, list[str]]) -> None:
    (said,) = set(digests["int8"])
    assert said == "unknown: vLLM keeps model.layers.0.mlp.down_proj.weight where it cannot be read"


def test_of_several_ranks_each_has_its_part_and_each_counts(tmp_path: Path) -> None:
    """Two processes, as two ranks of tensor parallelism.  The other scale is of a part that only
    the second one loads."""
    ranks = said_by(*([str(tmp_path), rank, "2"] for rank in ("0", "1")))
    one, again, other = zip(*ranks, strict=True)
    assert one == again
    assert len(set(one)) == 2
    assert (one[0] == other[0], one[1] == other[1]) == (True, False)

    def weights(instance: tuple[str, ...]) -> str:
        fields = [{names.WEIGHTS: d, names.EXPERTS: NO_EXPERTS.hex()} for d in instance]
        return fields_module._joined(fields)[names.WEIGHTS]

    assert weights(one) == weights(again)
    assert weights(one) not in (weights(other), weights(one[::-1]))
