"""The names of the coordinator's sockets in the run directory: whose they are."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import zmq

from kvshm._node.protocol import MAX_RECEIVED_BYTES
from kvshm.coordinator.sockets import MAX_SUBSCRIPTION_BYTES, Sockets
from kvshm.errors import KvshmError, RunDirectoryError

NAMES = ("commands", "events")


@pytest.fixture
def folder() -> Iterator[Path]:
    folder = tempfile.mkdtemp(prefix="kv-")
    yield Path(folder)
    shutil.rmtree(folder)


def opened(folder: Path) -> Sockets:
    sockets = Sockets()
    sockets.open(*(f"ipc://{folder / name}" for name in NAMES))
    return sockets


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir() if path.is_socket()}


def test_a_successors_sockets_are_left_alone(folder: Path) -> None:
    """Somebody has cleared the run directory, so that a second coordinator could start."""
    with closing(opened(folder)) as stopped:
        for path in folder.iterdir():
            path.unlink()
        with closing(opened(folder)):
            with pytest.raises(KvshmError, match="removed or replaced"):
                stopped.check()
            stopped.close()
            assert names(folder) == set(NAMES)
        assert not names(folder)


@pytest.mark.parametrize("name", NAMES)
def test_what_lies_in_the_place_of_a_socket_is_named(folder: Path, name: str) -> None:
    (folder / name).mkdir()
    with closing(Sockets()) as sockets, pytest.raises(RunDirectoryError) as raised:
        sockets.open(*(f"ipc://{folder / name}" for name in NAMES))
    assert f"socket {folder / name} cannot be made" in str(raised.value)


def test_no_more_than_the_limits_is_received() -> None:
    with closing(Sockets()) as sockets:
        assert sockets.router.getsockopt(zmq.MAXMSGSIZE) == MAX_RECEIVED_BYTES
        assert sockets.publisher.getsockopt(zmq.MAXMSGSIZE) == MAX_SUBSCRIPTION_BYTES


def test_a_message_above_the_limit_ends_its_senders_connection_and_no_other(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvshm.coordinator.sockets.MAX_RECEIVED_BYTES", 1000)
    with zmq.Context() as context, closing(opened(folder)) as sockets:
        good, bad = (context.socket(zmq.DEALER) for _ in range(2))
        with good, bad, bad.get_monitor_socket(zmq.EVENT_DISCONNECTED) as ended:
            for sender, name in ((good, b"good"), (bad, b"bad")):
                sender.setsockopt(zmq.LINGER, 0)
                sender.setsockopt(zmq.IDENTITY, name)
                sender.connect(f"ipc://{folder / 'commands'}")
                sender.send(bytes(1000))
            received = [sockets.router.recv_multipart() for _ in range(2)]
            assert sorted(received) == [[b"bad", bytes(1000)], [b"good", bytes(1000)]]
            bad.send(bytes(1001))
            assert ended.poll(30_000), "the connection has ended"
            good.send(b"on")
            assert sockets.router.recv_multipart() == [b"good", b"on"]
            bad.disable_monitor()
