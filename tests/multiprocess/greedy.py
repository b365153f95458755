"""Peers of libzmq's sockets that no library would make: as much of its protocol (ZMTP 3.1) as that
needs."""

from __future__ import annotations

import socket
import struct
from pathlib import Path

MORE = 1
_GREETING = b"\xff" + bytes(7) + b"\x01\x7f\x03\x01" + b"NULL".ljust(20, b"\0") + bytes(32)
_LONG = 2


def connect(endpoint: str, kind: bytes = b"DEALER") -> socket.socket:
    """Connect to ``ipc://...`` as a socket of this kind; it has been accepted when this returns.
    Raises OSError."""
    connection = socket.socket(socket.AF_UNIX)
    connection.settimeout(60)
    try:
        connection.connect(str(Path(endpoint.removeprefix("ipc://"))))
        connection.sendall(_GREETING)
        properties = b"\x0bSocket-Type" + struct.pack(">I", len(kind)) + kind
        ready = b"\x05READY" + properties + b"\x08Identity" + bytes(4)
        connection.sendall(bytes([4, len(ready)]) + ready)
        wanted = len(_GREETING) + 1
        while wanted > 0:
            got = len(connection.recv(wanted))
            if not got:
                raise ConnectionResetError("closed before it was greeted")
            wanted -= got
    except BaseException:
        connection.close()
        raise
    return connection


def frame(data: bytes, flags: int = 0) -> bytes:
    return bytes([flags | _LONG]) + struct.pack(">Q", len(data)) + data
