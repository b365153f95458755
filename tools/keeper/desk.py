"""Where engines ask for what a store has (kvshm/_engine/store_asks.py)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import zmq

from kvshm._base.resources import require_descriptors
from kvshm._base.rundir import store_socket
from kvshm._engine.store_asks import (
    MAX_ASK_BYTES,
    QUEUED,
    Coming,
    Wanted,
    decode_wanted,
    encode,
)
from kvshm._node.coordinator_sockets import DESCRIPTORS
from kvshm._node.locks import cleanup_lock
from kvshm._shm.fds import file_at, is_served, remove_own
from kvshm.errors import ConfigError, TransportError


class Desk:
    """One for each namespace.  Used by one thread; nothing blocks."""

    def __init__(self, run_dir: Path, namespace: str) -> None:
        """Raises ConfigError if another keeper is there, TransportError, and
        RunDirectoryError."""
        path = store_socket(run_dir, namespace)
        require_descriptors(DESCRIPTORS)  # without these libzmq ends the process
        self._context = zmq.Context(io_threads=1)
        self._socket = self._context.socket(zmq.ROUTER)
        for option, value in (
            (zmq.LINGER, 0),
            (zmq.SNDHWM, QUEUED),
            (zmq.RCVHWM, QUEUED),
            (zmq.MAXMSGSIZE, MAX_ASK_BYTES),
        ):
            self._socket.setsockopt(option, value)
        try:
            self._bind(run_dir, namespace, path)
        except BaseException:
            self._context.destroy(linger=0)
            raise

    def _bind(self, run_dir: Path, namespace: str, path: Path) -> None:
        with cleanup_lock(run_dir):  # a second bind would take the path over
            if is_served(path):
                raise ConfigError(
                    f"--store: another keeper of namespace {namespace} has a store; a node has one "
                    "client of it: start this keeper without --store"
                )
            try:
                self._socket.bind(f"ipc://{path}")
            except zmq.ZMQError as exc:
                raise TransportError(f"{path} cannot be served: {exc}") from exc
        self._path, self._file = path, file_at(path)

    def fileno(self) -> int:
        """Of a descriptor that is readable once when something has arrived."""
        return int(self._socket.getsockopt(zmq.FD))

    def asks(self) -> Iterator[tuple[bytes, Wanted]]:
        """Yield what has arrived, each with where to answer; what is no ask is dropped."""
        while True:
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            wanted = decode_wanted(frames[1]) if len(frames) == 2 else None
            if wanted is not None:
                yield frames[0], wanted

    def answer(self, route: bytes, coming: Coming) -> None:
        """An engine that has gone, or does not read, is not told."""
        try:
            self._socket.send_multipart([route, encode(coming)], zmq.NOBLOCK)
        except zmq.ZMQError:
            return

    def close(self) -> None:
        with suppress(OSError):
            remove_own(self._path, self._file)
        self._context.destroy(linger=0)
