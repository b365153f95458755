"""The coordinator's log where whoever reads it stands still."""

from __future__ import annotations

import fcntl
import logging
import os
from collections.abc import Iterator
from contextlib import suppress

import pytest

from kvshm._base.log_format import LineFormatter
from kvshm.coordinator.logfmt import MAX_WAITING_BYTES, _LineWriter

LINE = "x" * 500
LINES = LineFormatter("coordinator", as_json=False)
PAGE = 4096


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    read, write = os.pipe()
    fcntl.fcntl(write, fcntl.F_SETPIPE_SZ, PAGE)
    yield read, write
    for fd in (read, write):
        with suppress(OSError):
            os.close(fd)


def log(lines: _LineWriter, count: int, text: str = LINE) -> None:
    for number in range(count):
        lines.handle(logging.makeLogRecord({"name": "x", "msg": f"{number}:{text}"}))


def read_all(read: int, lines: _LineWriter) -> str:
    os.set_blocking(read, False)
    said = b""
    with suppress(BlockingIOError):
        while True:
            said += os.read(read, PAGE)
            lines.write_waiting()
    return said.decode()


def test_lines_that_nobody_reads_yet_wait_in_their_order(pipe: tuple[int, int]) -> None:
    read, write = pipe
    lines = _LineWriter(write, LINES)
    long = "y" * (3 * PAGE)
    log(lines, 100)
    log(lines, 1, long)
    said = read_all(read, lines).splitlines()
    assert [line.partition("message=")[2] for line in said] == [
        *(f"{number}:{LINE}" for number in range(100)),
        f"{f'0:{long}'[:1000]}...",
    ]


def test_lines_without_end_are_counted_and_lost(pipe: tuple[int, int]) -> None:
    read, write = pipe
    lines = _LineWriter(write, LINES)
    count = 2 * MAX_WAITING_BYTES // len(LINE)
    log(lines, count)
    said = read_all(read, lines)
    *kept, last = said.splitlines()
    assert f"event=lines-lost lines={count - len(kept)} " in last
    assert len(said) > MAX_WAITING_BYTES
    log(lines, 1, "read again")
    assert "read again" in read_all(read, lines)


def test_lines_for_nobody_raise_nothing(pipe: tuple[int, int]) -> None:
    read, write = pipe
    lines = _LineWriter(write, LINES)
    os.close(read)
    log(lines, 100)
    lines.write_waiting(patience=1.0)
