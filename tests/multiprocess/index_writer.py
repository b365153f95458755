"""An engine that writes its replica index, as a process of its own, told what to do by lines.

``grow N`` publishes contents up to N; ``churn`` publishes and retracts other contents until
the next line comes; ``die`` grows once more and kills itself in the middle of it.
Answers each line with one of its own, after the work.  Content n is block n of row 0.
"""

from __future__ import annotations

import os
import select
import signal
import sys
from pathlib import Path

from kvshm import _native
from kvshm._base.ids import Epoch
from kvshm._base.rundir import engine_socket
from kvshm._node.segment_server import SegmentServer
from kvshm._replica.index import Replica
from kvshm._shm.layout import BlockRecord, RecordKind, pack_records

EPOCH = Epoch(7)
CAPACITY = 64
NUM_BLOCKS = 1 << 14
CHURNED = range(NUM_BLOCKS - 40, NUM_BLOCKS)
"""Contents that come and go, in the chains of those that stay."""


def content_hash(content: int) -> bytes:
    """Spread over all 32 bytes, and nothing that a reader could mistake for another."""
    return (content + 1).to_bytes(4, "little") * 8


def records(contents: range, generation: int, kind: RecordKind = RecordKind.PUBLISH) -> bytes:
    return pack_records(
        BlockRecord(content_hash(content), content, generation, content, kind)
        for content in contents
    )


def line_waiting() -> bool:
    return bool(select.select([sys.stdin], [], [], 0)[0])


def churn(replica: Replica) -> int:
    """Says so when it has been through once: from then on the index does not grow."""
    generation = 0
    while not line_waiting():
        generation += 1
        replica.apply(0, records(CHURNED, generation))
        replica.apply(0, records(CHURNED, generation, RecordKind.RETRACT))
        if generation == 1:
            print("churning", flush=True)
    return generation


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def arm() -> None:
    """Die while the index grows, before the larger one is handed out."""
    copy = _native.index_copy
    _native.index_copy = lambda *segments: (copy(*segments), die())


def main(run_dir: str, namespace: str) -> None:
    replica = Replica.create(namespace, "writer", EPOCH, CAPACITY)
    path = engine_socket(Path(run_dir), namespace, EPOCH)
    server = SegmentServer(path, lambda _: replica.descriptor())
    replica.add_row(9, "exporter", NUM_BLOCKS, 0)
    print(replica.name, flush=True)
    for line in sys.stdin:
        order, _, argument = line.strip().partition(" ")
        if order == "grow":
            print(replica.apply(0, records(range(int(argument)), 1)).refused, flush=True)
        elif order == "churn":
            print(churn(replica), flush=True)
        elif order == "die":
            arm()
            replica.apply(0, records(range(replica.capacity), 1))
    server.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
