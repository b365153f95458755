"""The copy kernel without a GPU: run by triton's interpreter, and compiled for real hardware."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

if any(importlib.util.find_spec(name) is None for name in ("torch", "triton")):
    pytest.skip("the kernel needs torch and triton", allow_module_level=True)

INTERPRETED = """
import json, random, sys
from array import array
from kvshm import _native
from kvshm.transport.cuda_kernel import launch

def run(word, nbytes, gap, programs, stop):
    stride, count = nbytes + gap, 12
    packed = random.Random(nbytes).randbytes(count * stride)
    source, target = bytearray(packed), bytearray(count * stride)
    here, there = _native.address(source), _native.address(target)
    first, second = nbytes // word // 2 * word or nbytes, nbytes
    rows = array("q", [here, there, stride, stride, first])
    rows.extend([here, there, stride, stride, second])
    ids = array("q", [3, 1, 7, 3, 0, 5, 2, 9])
    flag = array("i", [stop] * 4)
    launch(_native.address(rows), _native.address(ids), _native.address(flag), 4, 2,
           block_bytes=nbytes, word=word, programs=programs)
    wanted = bytearray(count * stride)
    for one, other in zip(ids[:4], ids[4:]) if not stop else ():
        wanted[other * stride : other * stride + nbytes] = packed[one * stride :][:nbytes]
    return target == wanted

print(json.dumps(run(*json.loads(sys.argv[1]))))
"""

COMPILED = """
import json, sys
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from kvshm.transport import cuda_kernel

word, arch = json.loads(sys.argv[1])
types = dict(table="i64", ids="i64", stop="i64", pairs="i32", regions="i32", chunks="i32")
source = ASTSource(
    fn=cuda_kernel._copy_kernel,
    signature={**types, "WORD": "constexpr", "TILE": "constexpr"},
    constexprs={"WORD": word, "TILE": cuda_kernel.TILE_BYTES // min(word, 8)},
)
options = {"num_warps": cuda_kernel.WARPS}
ptx = compile(source, target=GPUTarget("cuda", arch, 32), options=options).asm["ptx"]
print(json.dumps([line.split()[0:2] for line in ptx.splitlines() if ".global" in line]))
"""


def answer(program: str, arguments: object, tmp_path: Path, **environment: str) -> object:
    """Run a program with a fresh cache; what it printed."""
    ran = subprocess.run(
        [sys.executable, "-c", program, json.dumps(arguments)],
        env={**os.environ, "TRITON_CACHE_DIR": str(tmp_path), **environment},
        capture_output=True, text=True, timeout=110, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout)


@pytest.mark.parametrize(
    ("word", "nbytes", "gap"),
    [(16, 64, 0), (16, 48, 32), (16, 40960, 16), (4, 36, 8), (1, 63, 7)],
)
def test_exactly_the_named_fragments_are_copied(
    word: int, nbytes: int, gap: int, tmp_path: Path
) -> None:
    assert answer(INTERPRETED, [word, nbytes, gap, 3, 0], tmp_path, TRITON_INTERPRET="1") is True


def test_a_stopped_kernel_writes_nothing(tmp_path: Path) -> None:
    assert answer(INTERPRETED, [16, 64, 0, 3, 1], tmp_path, TRITON_INTERPRET="1") is True


def test_aligned_fragments_are_moved_16_bytes_at_a_time(tmp_path: Path) -> None:
    """Read off the code compiled for Hopper: the widest access there is, loads before stores."""
    found = answer(COMPILED, [16, 90], tmp_path)
    assert isinstance(found, list)
    moves = [" ".join(words) for words in found if "v2.b64" in " ".join(words)]
    assert sum("ld.global.v2.b64" in move for move in moves) == 4
    assert sum("st.global.v2.b64" in move for move in moves) == 4
