"""An engine that stands still costs the coordinator no more memory than docs/protocol.md says."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from kvshm._node.protocol import MAX_EVENTS_BYTES, MAX_FRAME_BYTES, QUEUE_FRAMES, Events, Joined
from kvshm._shm.layout import RECORD_BYTES

from .engines import FakeEngine
from .processes import Managed, Node, wait_until
from .test_bad_messages import EPOCH, Sender

pytestmark = pytest.mark.multiprocess

BOUND = QUEUE_FRAMES * MAX_FRAME_BYTES
ELSE = 48 << 20
RECORDS = bytes(MAX_EVENTS_BYTES // RECORD_BYTES * RECORD_BYTES)
"""As many as one message may have; of no kind, so that no one spends time on them."""


def resident(process: Managed) -> int:
    pages = Path(f"/proc/{process.pid}/statm").read_text().split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


def test_what_is_kept_for_an_engine_that_stands_still_is_bounded(node: Node) -> None:
    coordinator = node.coordinator()
    still = FakeEngine(node, "still", "--fingerprint", "f" * 32)
    still.joined()
    sender = Sender(node)
    assert isinstance(sender.join(), Joined)
    still.heard("engine_joined", name="liar")
    still.process.signal(signal.SIGSTOP)
    wait_until(lambda: still.process.is_stopped, "the engine stands still")
    before = resident(coordinator)
    for sequence in range(1, (BOUND + 2 * ELSE) // len(RECORDS) + 1):
        sender.tell(Events(epoch=EPOCH, sequence=sequence, records=RECORDS))
        assert sender.is_answered()  # and so has been relayed
    assert resident(coordinator) - before < BOUND + ELSE
    still.process.signal(signal.SIGCONT)
    still.heard("rescan")
    sender.close()
    assert coordinator.terminate() == 0
