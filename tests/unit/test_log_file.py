"""The log file: shared by processes, moved away, wrong from the start, on a full disk."""

from __future__ import annotations

import logging
import os
import resource
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvshm._base.log_file import LogFile
from kvshm._base.log_format import LineFormatter
from kvshm.errors import ConfigError

TEXT = LineFormatter("engine", as_json=False)


class Log:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.elsewhere: list[str] = []
        self.said: list[str] = []
        self.file = LogFile(
            str(path), TEXT, lambda r: self.elsewhere.append(r.msg), self.said.append
        )

    def write(self, *texts: str) -> None:
        for text in texts:
            self.file.handle(logging.makeLogRecord({"name": "x", "msg": text}))

    def messages(self, path: Path | None = None) -> list[str]:
        lines = (path or self.path).read_text().splitlines()
        return [line.partition("message=")[2].strip('"') for line in lines]


@pytest.fixture
def log(tmp_path: Path) -> Iterator[Log]:
    made = Log(tmp_path / "kvshm.log")
    yield made
    made.file.close()


def test_lines_are_appended_for_this_user_only(tmp_path: Path) -> None:
    path = tmp_path / "kvshm.log"
    for text in ("a", "b"):
        log = Log(path)
        log.write(text)
        log.file.close()
    assert log.messages() == ["a", "b"]
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_file_that_was_moved_away_is_made_again(log: Log, tmp_path: Path) -> None:
    log.write("before")
    rotated = tmp_path / "kvshm.log.1"
    log.path.rename(rotated)
    log.write("after")
    assert (log.messages(rotated), log.messages()) == (["before"], ["after"])
    (tmp_path / "fresh").touch()
    (tmp_path / "fresh").rename(log.path)  # as logrotate's "create" does
    log.write("last")
    assert log.messages() == ["last"]
    assert (log.elsewhere, log.said) == ([], [])


def test_while_it_cannot_be_opened_lines_go_elsewhere_and_that_is_said_once(
    log: Log, tmp_path: Path
) -> None:
    log.write("before")
    moved = tmp_path / "moved"
    log.path.rename(moved)
    log.path.mkdir()  # something has taken its place
    log.write("one", "two")
    assert log.elsewhere == ["one", "two"]
    (said,) = log.said
    assert said == f"lines are not written to {log.path}, but here: [Errno 21] Is a directory: " + (
        repr(str(log.path))
    )
    log.path.rmdir()
    log.write("three", "four")
    assert log.messages() == ["2 lines before this one are not in this file", "three", "four"]
    assert log.elsewhere == ["one", "two"]


def test_a_full_disk_takes_no_line_and_stops_nothing() -> None:
    log = Log(Path("/dev/full"))
    log.write("one", "two")
    log.file.close()
    assert log.elsewhere == ["one", "two"]
    (said,) = log.said
    assert said.startswith("lines are not written to /dev/full, but here: [Errno 28] No space left")


@contextmanager
def files_of_at_most(nbytes: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_line_of_which_the_disk_takes_a_part_is_elsewhere_as_a_whole(log: Log) -> None:
    log.write("whole")
    with files_of_at_most(log.path.stat().st_size + 10):
        log.write("torn", "lost")
    assert log.elsewhere == ["torn", "lost"]
    (said,) = log.said
    assert "only 10 of " in said
    log.write("next")
    assert log.messages()[-1] == "next"
    assert "2 lines before this one are not in this file" in log.path.read_text()


def test_a_text_that_cannot_be_encoded_is_a_line(log: Log) -> None:
    log.file.setFormatter(logging.Formatter("%(message)s"))
    log.write("odd \ud800 text")
    assert log.path.read_text() == "odd \\ud800 text\n"
    assert (log.elsewhere, log.said) == ([], [])


def test_a_line_with_a_wrong_format_ends_nothing(log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging, "raiseExceptions", False)
    log.file.handle(logging.makeLogRecord({"name": "x", "msg": "%d", "args": ("no number",)}))
    log.write("next")
    assert (log.messages(), log.elsewhere) == (["next"], [])


@pytest.mark.parametrize("wrong", ["no/such/folder/x.log", "a-file/x.log", "a-folder"])
def test_a_wrong_path_stops_the_start(tmp_path: Path, wrong: str) -> None:
    (tmp_path / "a-file").touch()
    (tmp_path / "a-folder").mkdir()
    with pytest.raises(ConfigError) as error:
        Log(tmp_path / wrong)
    assert f"KVSHM_LOG_FILE or --log-file: {str(tmp_path / wrong)!r} cannot be" in str(error.value)
    assert str(error.value).endswith("correct it, or leave it out to log without a file")


def test_a_pipe_that_no_one_reads_holds_no_one_up(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    log = Log(tmp_path / "pipe")
    log.write("one")
    assert log.elsewhere == ["one"]
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    log.write("two")
    assert os.read(reader, 10_000).count(b"\n") == 2
    log.write(*["x" * 900] * 200)  # more than the pipe holds
    os.close(reader)
    log.file.close()
    assert log.elsewhere[-1] == "x" * 900
    assert len(log.said) == 2


WRITER = """
import logging, sys
from kvshm._base.log_file import LogFile
from kvshm._base.log_format import LineFormatter
file = LogFile(sys.argv[1], LineFormatter("engine", True), sys.exit, sys.exit)
for number in range(500):
    file.handle(logging.makeLogRecord({"name": "x", "msg": sys.argv[2] * 900 + str(number)}))
"""


def test_lines_of_several_processes_do_not_mix(tmp_path: Path) -> None:
    path = tmp_path / "kvshm.log"
    command = (sys.executable, "-c", WRITER, str(path))
    writers = [subprocess.Popen((*command, letter)) for letter in "abcd"]
    assert [writer.wait() for writer in writers] == [0] * 4
    lines = path.read_text().splitlines()
    assert len(lines) == 2000
    assert all(line.startswith('{"time": ') and line.endswith("}") for line in lines)
    found = Counter(letter for line in lines for letter in "abcd" if letter * 900 in line)
    assert found == dict.fromkeys("abcd", 500)


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    opened: list[str] = []
    original = LogFile._open

    def noted(self: LogFile) -> object:
        stream = original(self)
        opened.append(self.baseFilename)
        return stream

    monkeypatch.setattr(LogFile, "_open", noted)
    return opened


def test_a_pipe_that_is_read_from_now_on_is_opened_once(tmp_path: Path, opened: list[str]) -> None:
    """A reader sees the end of a pipe whose only writer closes it."""
    path = tmp_path / "pipe"
    os.mkfifo(path)
    log = Log(path)
    log.write("nobody reads")
    with subprocess.Popen(["cat", path], stdout=subprocess.PIPE, text=True) as reader:
        while log.elsewhere and log.elsewhere[-1]:
            log.elsewhere.clear()
            log.write("is it read?")
        log.write("a", "b", "c")
        log.file.close()
        out, _ = reader.communicate(timeout=60)
    assert [line[-1] for line in out.splitlines()[-3:]] == ["a", "b", "c"]
    assert len(opened) == 1


def test_a_file_behind_a_link_and_back_is_opened_once(tmp_path: Path, opened: list[str]) -> None:
    """``link/../x`` is in the parent of the link's target."""
    (tmp_path / "deep" / "target").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "deep" / "target")
    log = Log(tmp_path / "link" / ".." / "kvshm.log")
    log.write("a", "b", "c")
    assert log.messages(tmp_path / "deep" / "kvshm.log") == ["a", "b", "c"]
    assert len(opened) == 1
    log.file.close()


def test_a_record_that_cannot_be_formatted_is_no_fault_of_the_file(
    log: Log, capsys: pytest.CaptureFixture[str]
) -> None:
    log.file.missed = 5
    for about in ({"msg": "%d", "args": ("x",)}, {"msg": "%y", "args": (1,)}):
        log.file.handle(logging.makeLogRecord({"name": "x", **about}))
    assert (log.file.missed, log.said, log.elsewhere) == (5, [], [])
    assert "Logging error" in capsys.readouterr().err
    log.write("a")
    assert log.messages()[-1] == "a"
    assert "5 lines" in log.messages()[0]
