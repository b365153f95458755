"""The offset of a process's clock, as the kernel tells it, and times of processes with others."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from kvshm._base.time_namespace import clock_offset_ns, on_own_clock

SECOND = 1_000_000_000


def proc(
    at: Path, reported: str | None, namespace: str = "time:[7]", children: str = "time:[7]"
) -> Path:
    (at / "ns").mkdir(parents=True)
    if reported is not None:
        (at / "timens_offsets").write_text(reported)
    if namespace:
        (at / "ns/time").symlink_to(namespace)
        (at / "ns/time_for_children").symlink_to(children)
    return at


@pytest.mark.parametrize(
    ("reported", "offset"),
    [
        ("monotonic           0         0\nboottime            0         0\n", 0),
        ("monotonic        -200         0\nboottime         -100         0\n", -200 * SECOND),
        ("monotonic       40000        25\nboottime            0         0\n", 40000 * SECOND + 25),
        ("monotonic          -3 500000000\nboottime            0         0\n", -2_500_000_000),
        ("1 12 5\n7 0 0\n", 12 * SECOND + 5),
        ("boottime            0         0\n", None),
        ("nonsense", None),
        ("monotonic many 0\n", None),
        ("", None),
    ],
)  # fmt: skip
def test_the_offset_is_what_the_kernel_tells(
    tmp_path: Path, reported: str, offset: int | None
) -> None:
    assert clock_offset_ns(proc(tmp_path / "self", reported)) == offset


def test_where_it_is_not_shown(tmp_path: Path) -> None:
    zero = "monotonic 0 0\nboottime 0 0\n"
    assert clock_offset_ns(proc(tmp_path / "old kernel", None, namespace="")) == 0
    assert clock_offset_ns(proc(tmp_path / "hidden", None)) is None
    assert clock_offset_ns(tmp_path / "not mounted") is None
    unshared = proc(tmp_path / "unshared", zero, children="time:[8]")
    assert clock_offset_ns(unshared) is None, "these are the offsets of its children"


def test_this_process_is_reported() -> None:
    offset = clock_offset_ns()
    assert offset is not None
    program = "from kvshm._base.time_namespace import clock_offset_ns as f; print(f())"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.strip() == str(offset)
    assert time.monotonic_ns() - offset > 0


def test_a_time_is_converted_exactly(subtests: pytest.Subtests) -> None:
    for own in [-150 * SECOND, 0, 300 * SECOND]:
        for theirs in [-200 * SECOND, 0, 40_000 * SECOND]:
            with subtests.test(own=own, theirs=theirs):
                machine = 1000 * SECOND + 1
                assert on_own_clock(machine + theirs, theirs, own) == machine + own
                assert on_own_clock(machine, None, own) is None
                assert on_own_clock(machine, theirs, None) is None
