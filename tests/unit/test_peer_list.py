"""The list of peers on its way from the scheduler's process to its ranks, when something fails."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path
from typing import NoReturn

import msgspec
import pytest

from kvshm._node import peer_list
from kvshm._node.peer_list import MAX_BYTES, PeerList, PeerListReader

from ..waiting import until
from .exporters import Make


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "peers"


@pytest.fixture
def complaints(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    reported: list[str] = []
    monkeypatch.setattr(
        peer_list.log, "line", lambda line, *about: reported.append(str(line.fill(*about)))
    )
    return reported


def no_room(*given: object) -> NoReturn:
    raise OSError(errno.EMFILE, "Too many open files")


def test_what_could_not_be_read_is_read_the_next_time(
    path: Path, monkeypatch: pytest.MonkeyPatch, complaints: list[str], exporter: Make
) -> None:
    peer = msgspec.structs.replace(exporter().info, ranks=[], fields={})
    PeerList(path).write([peer])
    reader = PeerListReader(path)
    with monkeypatch.context() as short:
        short.setattr(os, "open", no_room)
        short.setattr(Path, "read_bytes", no_room)
        assert [reader.read_new() for _ in range(3)] == [None] * 3
    assert len(complaints) == 1
    assert "Too many open files" in complaints[0]
    assert reader.read_new() == [peer]
    assert reader.read_new() is None


def test_what_could_not_be_written_is_written_later(
    path: Path, monkeypatch: pytest.MonkeyPatch, complaints: list[str]
) -> None:
    listed = PeerList(path)
    with monkeypatch.context() as full:
        full.setattr(Path, "replace", no_room)
        listed.write([])
        listed.write_again()
        assert list(path.parent.iterdir()) == [], "nothing half-written either"
    assert len(complaints) == 1
    listed.write_again()
    assert PeerListReader(path).read_new() == []
    written = path.stat().st_ino
    listed.write_again()
    assert path.stat().st_ino == written, "once"


def test_an_ended_list_is_not_written_again(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    listed = PeerList(path)
    with monkeypatch.context() as full:
        full.setattr(Path, "replace", no_room)
        listed.write([])
    listed.end()
    listed.write_again()
    assert list(path.parent.iterdir()) == []


@pytest.mark.parametrize("what", ["fifo", "directory", "link", "huge", "torn", "nested"])
def test_what_no_writer_has_left_there_names_no_one_and_blocks_no_one(
    path: Path, complaints: list[str], what: str
) -> None:
    if what == "fifo":
        os.mkfifo(path)
    elif what == "directory":
        path.mkdir()
    elif what == "link":
        path.with_name("elsewhere").write_bytes(b"\x90")
        path.symlink_to(path.with_name("elsewhere"))
    elif what == "huge":
        path.write_bytes(b"\x90")
        os.truncate(path, MAX_BYTES + 1)
    else:
        path.write_bytes(b"\x91" * 200_000 if what == "nested" else b"\x9f\x9f")
    reader = PeerListReader(path)
    news: list[object] = []
    threading.Thread(
        target=lambda: news.append((reader.read_new(), reader.read_new())), daemon=True
    ).start()
    until(lambda: news)
    assert news == [(None, None)]
    assert len(complaints) == 1
    assert str(path) in complaints[0]
    assert (f"at most {MAX_BYTES} bytes" in complaints[0]) == (
        what in ("fifo", "directory", "huge")
    )


def test_what_lies_in_the_place_of_the_new_list_is_never_opened(path: Path, exporter: Make) -> None:
    """A FIFO would wait for somebody who reads it, and the client's thread with it."""
    os.mkfifo(path.with_name(f"{path.name}.new"))
    PeerList(path).write([exporter().info])
    assert PeerListReader(path).read_new()


def test_a_list_that_somebody_has_removed_is_written_again(path: Path, exporter: Make) -> None:
    peers = PeerList(path)
    peers.write([exporter().info])
    path.unlink()
    peers.write_again()
    assert PeerListReader(path).read_new()
    peers.end()
    peers.write_again()
    assert not path.exists()
