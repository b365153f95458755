"""The hand-over of descriptors: what arrives, and what a bad peer cannot do to the owner."""

from __future__ import annotations

import errno
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvshm._shm.fd_server import MAX_CLIENTS, FdServer
from kvshm._shm.fds import (
    MAX_FDS,
    MAX_REPLY_BYTES,
    close_all,
    fetch,
    fetch_keep_open,
    peer_has_closed,
)
from kvshm.errors import TransportError

from ..descriptors import left_open, open_files
from ..waiting import PATIENCE, listens, until


@pytest.fixture
def memory() -> Iterator[int]:
    fd = os.memfd_create("kvshm-test")
    os.write(fd, b"seventeen blocks!")
    yield fd
    os.close(fd)


def connect(path: str) -> socket.socket:
    peer = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    peer.settimeout(PATIENCE)
    peer.connect(path)
    return peer


def test_descriptors_arrive_usable_and_close_on_exec(path, serve, memory):
    serve(memory, memory)
    reply, fds = fetch(path, b"epoch 7", PATIENCE)
    assert reply == b"re:epoch 7"
    assert [os.pread(fd, 17, 0) for fd in fds] == [b"seventeen blocks!"] * 2
    assert not any(os.get_inheritable(fd) for fd in fds)
    close_all(fds)


def test_the_kernels_limit_of_descriptors_fits_in_one_answer(path, serve, memory):
    serve(*[memory] * MAX_FDS)
    _, fds = fetch(path, b"all", PATIENCE)
    assert len(fds) == MAX_FDS
    close_all(fds)


def test_no_descriptor_leaks_on_any_path(path, serve, memory):
    before = open_files()
    server = serve(memory)
    for _ in range(20):
        close_all(fetch(path, b"x", PATIENCE)[1])
        with connect(path) as peer:
            peer.send(b"left before the answer")
        with pytest.raises(TransportError):
            fetch(path, b"x" * 5000, PATIENCE)
    server.close()
    for _ in range(20):
        with pytest.raises(TransportError):
            fetch(path, b"x", PATIENCE)
        with pytest.raises(TransportError):
            FdServer("/nonexistent/directory/fds", lambda r: (r, []))
    assert not left_open(before)


def test_a_cut_answer_leaves_no_descriptor_behind(path, memory):
    before = open_files()
    answers = iter([(b"x" * (MAX_REPLY_BYTES + 1), [memory]), (b"", [memory])])
    server = FdServer(path, lambda request: next(answers))
    with pytest.raises(TransportError, match="longer than"):
        fetch(path, b"long", PATIENCE)
    with pytest.raises(TransportError, match="without an answer"):
        fetch(path, b"empty", PATIENCE)
    server.close()
    assert not left_open(before)


def test_a_raising_answer_is_an_end_without_answer_and_the_server_lives(path, memory, caplog):
    def answer(request: bytes) -> tuple[bytes, list[int]]:
        if request == b"bad":
            raise RuntimeError("no such thing")
        return b"good", [memory]

    server = FdServer(path, answer)
    with pytest.raises(TransportError, match="without an answer"):
        fetch(path, b"bad", PATIENCE)
    close_all(fetch(path, b"fine", PATIENCE)[1])
    server.close()


def test_why_no_one_can_be_accepted_is_said_once_for_each_cause(
    path, serve, memory, caplog, monkeypatch
):
    causes = iter([errno.EMFILE, errno.EMFILE, errno.ENFILE, errno.EMFILE, errno.ENFILE])
    accept = socket.socket.accept

    def short(listener):
        for cause in causes:
            raise OSError(cause, os.strerror(cause))
        return accept(listener)

    monkeypatch.setattr(socket.socket, "accept", short)
    serve(memory)
    close_all(fetch(path, b"at last", PATIENCE)[1])
    reported = [r.getMessage() for r in caplog.records if "cannot accept" in r.getMessage()]
    assert len(reported) == 2
    assert all(path in line for line in reported)


def test_garbage_silent_and_dying_peers_cost_the_others_nothing(path, serve, memory):
    serve(memory)
    silent = [connect(path) for _ in range(5)]
    for _ in range(5):
        connect(path).close()
    for garbage in (b"", b"\xff" * 5000):
        with connect(path) as peer:
            peer.send(garbage)
            assert peer.recv(100) == b""
    close_all(fetch(path, b"x", PATIENCE)[1])
    silent[0].send(b"at last")
    assert silent[0].recv(100) == b"re:at last"
    for peer in silent:
        peer.close()


def test_a_silent_peer_is_dropped_when_its_time_is_up(path, serve):
    serve(client_timeout=0.05)
    with connect(path) as peer:
        assert peer.recv(100) == b""


def test_beyond_the_limit_the_longest_waiting_peer_is_dropped(path, serve):
    serve()
    silent = [connect(path) for _ in range(MAX_CLIENTS + 1)]
    assert silent[0].recv(100) == b""
    silent[1].send(b"x")
    assert silent[1].recv(100) == b"re:x"
    for peer in silent:
        peer.close()


def test_answers_many_peers_at_once(path, serve, memory):
    serve(memory)
    replies: list[bytes] = []

    def ask(i: int) -> None:
        reply, fds = fetch(path, b"%d" % i, PATIENCE)
        close_all(fds)
        replies.append(reply)

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(replies) == sorted(b"re:%d" % i for i in range(20))


def test_each_way_a_peer_can_be_missing_is_named(path):
    with pytest.raises(TransportError, match="has gone"):
        fetch(path, b"x", PATIENCE)
    left_behind = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    left_behind.bind(path)
    left_behind.listen()
    with pytest.raises(TransportError, match="no answer within"):
        fetch(path, b"x", 0.05)
    left_behind.close()
    with pytest.raises(TransportError, match="has died"):
        fetch(path, b"x", PATIENCE)


def test_a_dead_owners_socket_is_replaced_and_a_living_ones_is_not(path, serve):
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as left_behind:
        left_behind.bind(path)
    serve()
    with pytest.raises(TransportError, match="another process serves"):
        FdServer(path, lambda request: (b"stolen", []))
    assert fetch(path, b"x", PATIENCE)[0] == b"re:x"


def test_a_path_too_long_names_the_remedy(path):
    long = path + "x" * (108 - len(path))
    with pytest.raises(TransportError, match="KVSHM_RUN_DIR"):
        FdServer(long, lambda request: (b"", []))
    with pytest.raises(TransportError, match="KVSHM_RUN_DIR"):
        fetch(long, b"x", PATIENCE)
    FdServer(long[:-1], lambda request: (b"", [])).close()


def test_close_removes_its_own_socket_only(path, serve):
    server = serve()
    assert os.stat(path).st_mode & 0o777 == 0o600
    os.unlink(path)
    Path(path).write_text("a successor's")
    server.close()
    assert Path(path).exists()
    os.unlink(path)
    FdServer(path, lambda request: (b"", [])).close()
    assert not os.path.exists(path)
    server.close()


def test_a_forked_child_serves_nothing_and_removes_nothing(path, memory):
    script = """
import os, signal, sys
from kvshm._shm.fd_server import FdServer
server = FdServer(sys.argv[1], lambda request: (b"alive", []))
if os.fork() == 0:
    server.close()
    print(os.path.exists(sys.argv[1]), flush=True)
    sys.stdin.read()
    os._exit(0)
signal.pause()
"""
    parent = subprocess.Popen(
        [sys.executable, "-c", script, path],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with parent:
        assert parent.stdout.readline() == "True\n"
        assert fetch(path, b"x", PATIENCE)[0] == b"alive"
        parent.kill()
        parent.wait()
        with pytest.raises(TransportError, match="has died"):
            fetch(path, b"x", PATIENCE)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_gets_no_answer(path, serve):
    serve()
    os.chmod(os.path.dirname(path), 0o755)
    os.chmod(path, 0o666)
    script = """
import os, sys, socket
os.setuid(65534)
s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
s.connect(sys.argv[1])
try:
    s.send(b"please")
    print(s.recvmsg(100, 100))
except OSError as exc:
    print(type(exc).__name__)
"""
    stranger = subprocess.run(
        [sys.executable, "-S", "-c", script, path], capture_output=True, text=True, check=True
    )
    assert stranger.stdout.strip() in {
        "(b'', [], 0, None)",
        "(b'', [], 0, '')",
        "BrokenPipeError",
        "ConnectionResetError",
    }
    assert fetch(path, b"x", PATIENCE)[0] == b"re:x"


# -- connections that stay open


def test_the_end_of_an_open_connection_tells_of_the_owners(path, serve, memory):
    before = open_files()
    server = serve(memory)
    reply, fds, connection = fetch_keep_open(path, b"x", PATIENCE)
    close_all(fds)
    assert (reply, peer_has_closed(connection)) == (b"re:x", False)
    close_all(fetch(path, b"others come and go", PATIENCE)[1])
    assert not peer_has_closed(connection)
    server.close()
    assert peer_has_closed(connection)
    connection.close()
    assert peer_has_closed(connection)
    assert not left_open(before)


def test_open_connections_do_not_crowd_out_those_that_ask(path, serve, memory, monkeypatch):
    """Nor each other: the oldest is ended, and its peer may ask again."""
    monkeypatch.setattr("kvshm._shm.fd_server.MAX_KEPT", 3)
    server = serve()
    kept = [fetch_keep_open(path, b"x", PATIENCE)[2] for _ in range(4)]
    until(lambda: peer_has_closed(kept[0]))
    assert [peer_has_closed(one) for one in kept[1:]] == [False] * 3
    kept[1].send(b"more than one request")
    until(lambda: peer_has_closed(kept[1]))
    assert [peer_has_closed(one) for one in kept[2:]] == [False] * 2
    for one in kept:
        one.close()
    until(lambda: not server._clients.kept)


def test_a_forked_child_holds_no_connection_open(path):
    code = f"""
import os, signal
from kvshm._shm.fd_server import FdServer
server = FdServer({path!r}, lambda request: (b"alive", []))
print("listening", flush=True)
input()
if os.fork() == 0:
    print("forked", flush=True)
    signal.pause()
signal.pause()
"""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", code], process_group=0, **pipes) as owner:
        assert owner.stdout.readline() == "listening\n"  # its path is there a little before
        _, _, connection = fetch_keep_open(path, b"x", PATIENCE)
        owner.stdin.write("\n")
        owner.stdin.flush()
        assert owner.stdout.readline() == "forked\n"
        assert not peer_has_closed(connection)
        os.kill(owner.pid, signal.SIGKILL)
        until(lambda: peer_has_closed(connection))
        connection.close()
        os.killpg(owner.pid, signal.SIGKILL)


def test_a_socket_that_was_removed_is_made_again(path, serve, monkeypatch):
    """A cleaning script has no other effect; who was answered before stays connected."""
    monkeypatch.setattr("kvshm._shm.fd_server.CHECK_SECONDS", 0.05)
    server = serve()
    connection = fetch_keep_open(path, b"x", PATIENCE)[2]
    os.unlink(path)
    until(lambda: listens(path))
    reply, fds, again = fetch_keep_open(path, b"x", PATIENCE)
    assert reply
    close_all(fds)
    assert not peer_has_closed(connection)
    connection.close()
    again.close()
    server.close()
    assert not os.path.lexists(path)


def test_a_server_may_keep_no_one(path, monkeypatch):
    server = FdServer(path, lambda request: (b"answer", []), max_kept=0)
    reply, _, connection = fetch_keep_open(path, b"x", PATIENCE)
    assert reply == b"answer"
    until(lambda: peer_has_closed(connection))
    connection.close()
    server.close()
