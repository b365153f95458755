"""A socket that hands out descriptors, and what somebody has put in its place."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvshm._shm.fd_server import FdServer
from kvshm._shm.fds import fetch

from ..waiting import PATIENCE, listens, until

REPLACEMENTS = {
    "file": lambda path: Path(path).touch(),
    "FIFO": os.mkfifo,
    "dead link": lambda path: os.symlink("/nonexistent", path),
    "link": lambda path: os.symlink("/dev/null", path),
}


@pytest.mark.parametrize("kind", REPLACEMENTS)
def test_a_socket_that_was_replaced_is_made_again(path, serve, monkeypatch, kind):
    monkeypatch.setattr("kvshm._shm.fd_server.CHECK_SECONDS", 0.05)
    serve()
    REPLACEMENTS[kind](f"{path}.other")
    os.replace(f"{path}.other", path)
    until(lambda: listens(path))
    assert fetch(path, b"x", PATIENCE)[0] == b"re:x"


def test_a_directory_in_place_of_a_socket_is_reported_once(path, serve, monkeypatch, caplog):
    looks = []
    monkeypatch.setattr(FdServer, "_select_timeout", lambda self: looks.append(1) or 0.02)
    monkeypatch.setattr("kvshm._shm.fd_server.CHECK_SECONDS", 3600.0)
    server = serve()
    os.unlink(path)
    os.mkdir(path)  # in two steps: the server must not look in between
    monkeypatch.setattr("kvshm._shm.fd_server.CHECK_SECONDS", 0.02)
    server._next_check = 0.0
    looks.clear()  # what it did before does not count
    until(lambda: len(looks) > 5)
    warnings = [record.getMessage() for record in caplog.records]
    assert warnings == [
        f"kvshm: a socket cannot be made again: {path}: cannot serve descriptors here: Is a "
        "directory; remove what lies there, or make room in that directory"
    ]
    os.rmdir(path)
    until(lambda: listens(path))
    assert fetch(path, b"x", PATIENCE)[0] == b"re:x"
