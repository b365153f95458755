"""Any byte of a segment may be wrong: whoever reads it gets an exception or a miss."""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kvshm._base.ids import Epoch, Fingerprint, LeaseBit
from kvshm._replica.index import Replica
from kvshm._shm.layout import ENTRY_BYTES, INDEX_HEADER_BYTES, NUM_BLOCKS_OFFSET
from kvshm._shm.own_slot_table import TableSpec
from kvshm.errors import CorruptSegment

from .replicas import found, packed
from .served import AnyTable

FUZZER = Path(__file__).with_name("segment_fuzzer.py")
SEED = 20260725
PARTS = 2
"""Processes that share the bytes of one segment."""


class Outcome:
    def __init__(self, ended: subprocess.CompletedProcess[str]) -> None:
        lines = ended.stdout.splitlines()
        flips = [line for line in lines if re.fullmatch(r"\d+ \^ 0x[0-9a-f]+", line)]
        self.tried = [int(line.split()[0]) for line in flips]
        self.wrong = [line for line in lines if line.startswith("  ")]
        if ended.returncode or lines[-1] != "done":
            last = flips[-1] if flips else "nothing"
            self.wrong.append(f"status {ended.returncode} after {last}:\n{ended.stderr}")


def fuzz(subject: str, part: int, *, parts: int = PARTS, program: Path = FUZZER) -> Outcome:
    with tempfile.TemporaryDirectory(prefix="kv-") as run_dir:
        place = ("--run-dir", run_dir, "--seed", str(SEED), "--part", str(part), str(parts))
        argv = [sys.executable, str(program), subject, *place]
        return Outcome(subprocess.run(argv, capture_output=True, text=True, check=False))


@pytest.mark.parametrize("subject", ["table", "index"])
def test_of_forty_flipped_bytes_one_is_an_exception_or_a_miss(subject: str) -> None:
    outcome = fuzz(subject, 0, parts=40)
    assert outcome.wrong == []
    assert len(outcome.tried) > 250


@pytest.mark.nightly  # the one before flips a byte of forty of the same
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("subject", "header_bytes", "rest"),
    [("table", 8192, 1000 + 24576 // 97 + 1), ("index", 8192, 1000)],
)
def test_every_flipped_byte_is_an_exception_or_a_miss(
    subject: str, header_bytes: int, rest: int
) -> None:
    with ThreadPoolExecutor(PARTS) as pool:
        outcomes = list(pool.map(lambda part: fuzz(subject, part), range(PARTS)))
    assert [line for outcome in outcomes for line in outcome.wrong] == []
    tried = {offset for outcome in outcomes for offset in outcome.tried}
    assert tried >= set(range(header_bytes))
    assert len([offset for offset in tried if offset >= header_bytes]) == rest


# -- found by it, or by thinking about it


def test_a_scan_ends_though_the_table_lost_blocks(namespace: str) -> None:
    spec = TableSpec(namespace, "a", 64, 16, 1, Fingerprint(bytes(32)))
    table = AnyTable.create(spec, Epoch(1))
    try:
        table._segment.buffer[NUM_BLOCKS_OFFSET] = 8
        with pytest.raises(CorruptSegment, match="64 blocks, now only 8"):
            table.scan()
    finally:
        table.close()


def test_growing_leaves_spoiled_entries_behind(namespace: str) -> None:
    replica = Replica.create(namespace, "b", Epoch(2), 16)
    row = replica.add_row(Epoch(1), "a", 64, LeaseBit(0))
    replica.apply(row, packed(range(8)))
    for offset, wrong in zip(_owners_of_used_entries(replica), (60, 66, 255), strict=False):
        replica._segment.buffer[offset] = wrong
    replica.apply(row, packed(range(8, 40)))
    assert replica.capacity > 16
    assert len([n for n in range(40) if found(replica, n)]) == 40 - 3
    replica.close()


def _owners_of_used_entries(replica: Replica) -> list[int]:
    buffer = replica._segment.buffer
    places = range(INDEX_HEADER_BYTES + 11, buffer.nbytes, ENTRY_BYTES)
    return [offset for offset in places if buffer[offset]]


def test_a_crash_a_hang_and_an_exception_would_be_seen(tmp_path: Path) -> None:
    """The fuzzer's own eyes: the same program, with readers that fail on purpose."""
    seen = {}
    for how in ("os.abort()", "1 / 0"):
        program = tmp_path / "spoiled.py"
        program.write_text(
            f"import os, runpy, sys\nsys.path.insert(0, {str(FUZZER.parent)!r})\n"
            "import fuzz_subjects\n"
            f"fuzz_subjects.dump = lambda _: {how}\n"
            f"runpy.run_path({str(FUZZER)!r}, run_name='__main__')\n"
        )
        seen[how] = fuzz("table", 0, parts=4000, program=program).wrong
    assert re.match(r"status -6 after 0 \^ 0x1:\n", seen["os.abort()"][0])
    assert seen["1 / 0"] == ["  dump: ZeroDivisionError: division by zero"] * 3
