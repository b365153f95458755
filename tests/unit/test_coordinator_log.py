"""The coordinator's log where whoever reads it stands still."""

from __future__ import annotations

import fcntl
import logging
import os
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from kvshm.coordinator.logfmt import MAX_WAITING, _Descriptor, _Lines, _Queue

LINE = "x" * 500
PAGE = 4096
PATIENCE_SECONDS = 20.0


FULL_FILE = """
import resource, sys
from kvshm.coordinator import logfmt
from kvshm.coordinator.log_lines import Event
import signal
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
logfmt.start("INFO", "text", sys.argv[1])
_, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (1, hard))
logfmt.write(Event.UNKNOWN_SETTING, reason="there is no room")
logfmt._started[0].waiting.queue.join()
resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
logfmt.write(Event.UNKNOWN_SETTING, reason="there is room again")
logfmt.end()
"""


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    read, write = os.pipe()
    fcntl.fcntl(write, fcntl.F_SETPIPE_SZ, PAGE)
    yield read, write
    for fd in (read, write):
        with suppress(OSError):
            os.close(fd)


def queue_to(fd: int) -> _Queue:
    lines = _Lines("coordinator", as_json=False)
    writer = _Descriptor(fd)
    writer.setFormatter(lines)
    return _Queue(lines, writer)


def log(lines: logging.Handler, count: int, text: str = LINE) -> None:
    for number in range(count):
        lines.handle(logging.makeLogRecord({"name": "x", "msg": f"{number}:{text}"}))


def read_until(read: int, end: str) -> list[str]:
    said = b""
    while end not in said.decode():
        assert select.select([read], [], [], PATIENCE_SECONDS)[0], "nothing comes any more"
        said += os.read(read, PAGE)
    return said.decode().splitlines()


@pytest.mark.parametrize("blocking", [True, False])
def test_unread_lines_wait_in_their_order(pipe: tuple[int, int], blocking: bool) -> None:
    read, write = pipe
    os.set_blocking(write, blocking)
    lines = queue_to(write)
    long = "y" * (3 * PAGE)
    log(lines, 100)
    log(lines, 1, long)
    lines.handle(logging.makeLogRecord({"name": "x", "msg": "0:%s", "args": ("last",)}))
    said = read_until(read, "0:last\n")
    assert [line.partition("message=")[2] for line in said] == [
        *(f"{number}:{LINE}" for number in range(100)),
        f"{f'0:{long}'[:1000]}...",
        "0:last",
    ]


def test_line_waits_where_another_process_fills_the_pipe_first(
    pipe: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    read, write = pipe
    os.set_blocking(write, False)
    real, others = os.write, [bytes(PAGE)]

    def write_behind_another(fd: int, data: bytes) -> int:
        while others:
            real(write, others.pop())
        return real(fd, data)

    monkeypatch.setattr(os, "write", write_behind_another)
    log(queue_to(write), 1, "late")
    assert "0:late" in read_until(read, "late\n")[-1]


def test_lines_beyond_the_bound_are_counted_and_lost(pipe: tuple[int, int]) -> None:
    read, write = pipe
    lines = queue_to(write)
    count = 2 * MAX_WAITING
    log(lines, count)
    *kept, last = read_until(read, "hang")
    assert f"event=lines-lost lines={count - len(kept)} " in last
    assert MAX_WAITING <= len(kept) <= MAX_WAITING + PAGE // len(LINE) + 1
    log(lines, 1, "read again")
    assert len(read_until(read, "read again")) == 1


def test_lines_without_a_reader_are_dropped(pipe: tuple[int, int]) -> None:
    read, write = pipe
    lines = queue_to(write)
    os.close(read)
    log(lines, 100)
    begin = time.monotonic()
    lines.drain(begin + PATIENCE_SECONDS)
    assert time.monotonic() - begin < PATIENCE_SECONDS


def test_last_line_gives_up_where_no_one_reads(pipe: tuple[int, int]) -> None:
    read, write = pipe
    os.write(write, bytes(PAGE))
    lines, writer = _Lines("coordinator", as_json=False), _Descriptor(write)
    writer.setFormatter(lines)
    waiting = _Queue(lines, writer)
    log(waiting, 1)
    begun = time.monotonic()
    waiting.drain(begun + 0.5)
    assert 0.5 <= time.monotonic() - begun < 4.0
    assert waiting.queue.unfinished_tasks == 1, "the thread waits for the reader"
    writer.write("never", until=time.monotonic())
    os.close(read)
    waiting.drain(time.monotonic() + PATIENCE_SECONDS)
    assert waiting.queue.unfinished_tasks == 0, "else it would wait for a later file of this number"


def test_lines_go_to_the_file_again_although_no_one_reads_stderr(tmp_path: Path) -> None:
    """A line that the file did not take is not waited for on stderr."""
    script = tmp_path / "log.py"
    script.write_text(FULL_FILE)
    read, write = os.pipe()
    os.set_blocking(write, False)
    with suppress(BlockingIOError):
        while os.write(write, bytes(PAGE)):
            pass
    os.set_blocking(write, True)
    path = tmp_path / "log"
    try:
        subprocess.run([sys.executable, script, path], stderr=write, check=True, timeout=60)
    finally:
        os.close(read)
        os.close(write)
    assert "event=lines-lost" not in (text := path.read_text())
    assert text.count("1 lines before this one") == text.count("there is room again") == 1
