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
from kvshm.transport.cuda import kernel
from kvshm.transport.cuda.driver import TILE_BYTES

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
    kernel._copy_kernel[(programs,)](
        _native.address(rows), _native.address(ids), _native.address(flag), 4, 2,
        -(-nbytes // TILE_BYTES), WORD=word, TILE=TILE_BYTES // min(word, 8))
    wanted = bytearray(count * stride)
    for one, other in zip(ids[:4], ids[4:]) if not stop else ():
        wanted[other * stride : other * stride + nbytes] = packed[one * stride :][:nbytes]
    return target == wanted

print(json.dumps(run(*json.loads(sys.argv[1]))))
"""

COMPILED = """
import json, re, sys
from kvshm.transport.cuda import kernel

word, arch = json.loads(sys.argv[1])
compiled = kernel.compile_for(arch, word)
ptx = compiled.asm["ptx"]
entry = re.search(r"[.]entry (\\w+)[(](.*?)[)]", ptx, re.DOTALL)
print(json.dumps({
    "name": [entry[1], compiled.metadata.name],
    "parameters": re.findall(r"[.]param [.](\\w+)", entry[2]),
    "threads": re.findall(r"[.](?:req|max)ntid (\\d+)", ptx),
    "cubin": compiled.asm["cubin"][:4].hex(),
    "moves": [line.split()[0:2] for line in ptx.splitlines() if ".global" in line],
}))
"""


def answer(program: str, arguments: object, tmp_path: Path, **environment: str) -> object:
    ran = subprocess.run(
        [sys.executable, "-c", program, json.dumps(arguments)],
        env={**os.environ, "TRITON_CACHE_DIR": str(tmp_path), **environment},
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout)


@pytest.mark.parametrize(
    ("word", "nbytes", "gap"),
    [(16, 64, 0), (16, 48, 32), (16, 40960, 16), (4, 36, 8), (1, 63, 7)],
)
def test_exactly_the_named_fragments_are_copied_when_interpreted(
    word: int, nbytes: int, gap: int, tmp_path: Path
) -> None:
    assert answer(INTERPRETED, [word, nbytes, gap, 3, 0], tmp_path, TRITON_INTERPRET="1") is True


def test_a_stopped_kernel_writes_nothing_when_interpreted(tmp_path: Path) -> None:
    assert answer(INTERPRETED, [16, 64, 0, 3, 1], tmp_path, TRITON_INTERPRET="1") is True


def test_aligned_fragments_are_moved_16_bytes_at_a_time(tmp_path: Path) -> None:
    """Read off the code compiled for Hopper: the widest access there is, loads before stores."""
    found = answer(COMPILED, [16, 90], tmp_path)
    assert isinstance(found, dict)
    moves = [" ".join(words) for words in found["moves"] if "v2.b64" in " ".join(words)]
    assert sum("ld.global.v2.b64" in move for move in moves) == 4
    assert sum("st.global.v2.b64" in move for move in moves) == 4


@pytest.mark.parametrize(("word", "arch"), [(16, 80), (16, 90), (4, 90), (1, 90), (16, 100)])
def test_the_machine_code_takes_what_the_launcher_gives(
    word: int, arch: int, tmp_path: Path
) -> None:
    """Name, threads and parameters: the kernel's own, then scratch memories it does not use."""
    found = answer(COMPILED, [word, arch], tmp_path)
    assert isinstance(found, dict)
    assert found["name"] == ["_copy_kernel"] * 2
    assert found["cubin"] == b"\x7fELF".hex()
    assert found["threads"] == ["256"]
    own = ["u64"] * 3 + ["u32"] * 3
    assert found["parameters"][: len(own)] == own
    assert len(found["parameters"]) <= len(own) + 4
    assert set(found["parameters"][len(own) :]) <= {"u64"}
