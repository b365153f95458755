"""Sends a coordinator whatever is no message, then asks whether it still answers."""

from __future__ import annotations

import os
import sys

import msgspec
import zmq

from kvshm._node.protocol import (
    MAX_MESSAGE_BYTES,
    PROTOCOL_VERSION,
    EngineInfo,
    Events,
    Heartbeat,
    Join,
    JoinFirst,
    decode_reply,
    encode,
)


def bad_frames() -> list[list[bytes]]:
    """Truncated, unknown, ill-typed, empty, doubled and oversized messages."""
    info = EngineInfo(
        epoch=1, name="n", pid=1, fingerprint=b"", fields={}, num_blocks=1, ranks=[],
    )  # fmt: skip
    join = encode(Join(protocol=PROTOCOL_VERSION, engine=info))
    events = encode(Events(epoch=1, sequence=1, records=bytes(96)))
    frames = [message[:cut] for message in (join, events) for cut in range(len(message))]
    pack = msgspec.msgpack.encode
    frames += [join + b"\0", b"\xc1", b"\x91" * 10_000, os.urandom(1000)]
    frames += [pack(thing) for thing in (None, 7, [], {}, {"type": 1}, {"type": "no-such"})]
    frames += [pack({"type": "leave", "epoch": epoch}) for epoch in ("x", 1.5, None)]
    frames.append(bytes(MAX_MESSAGE_BYTES + 1))
    return [[frame] for frame in frames] + [[events, events], [b""] * 5]


def main() -> None:
    context = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.connect(sys.argv[1])
    frames = bad_frames()
    for message in frames:
        socket.send_multipart(message)
    socket.send(encode(Heartbeat(epoch=77, sequence=0)))
    reply = decode_reply(socket.recv())
    assert isinstance(reply, JoinFirst)
    assert reply.engine_epoch == 77
    print(len(frames), flush=True)
    context.destroy(linger=0)


if __name__ == "__main__":
    main()
