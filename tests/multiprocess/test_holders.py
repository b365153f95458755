"""A hold of another process, which nobody has to take back."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from kvshm._base.ids import BlockHash, BlockId, Epoch, Fingerprint, Generation
from kvshm._shm.layout import BlockRecord, pack_records
from kvshm._shm.own_slot_table import OwnSlotTable, RankSlotTable, TableSpec

from .processes import wait_until

pytestmark = pytest.mark.multiprocess

HOLDER = """
import sys, time
from kvshm._shm.slot_table import PeerSlotTable
table = PeerSlotTable.from_fd("held", int(sys.argv[1]))
print(table.hold(table.scan(), float(sys.argv[2])), flush=True)
time.sleep(1000)  # until it is killed
"""


@pytest.fixture
def table() -> Iterator[OwnSlotTable]:
    spec = TableSpec("test-holders", "e", 4, 16, 1, Fingerprint(bytes(32)))
    table = OwnSlotTable.create(spec, Epoch(1))
    rank = RankSlotTable.from_fd(table.name, table.descriptor(True))
    rank.set_life(0)
    records = [BlockRecord(BlockHash(bytes(32)), BlockId(b), Generation(0), b) for b in (1, 2)]
    table.publish(pack_records(records), bytes(16))
    yield table
    rank.close()
    table.close()


def test_the_hold_of_a_killed_process_runs_out_by_itself(table: OwnSlotTable) -> None:
    fd = table.descriptor(True)
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(fd), "1.5"], stdout=subprocess.PIPE, pass_fds=[fd]
    )
    os.close(fd)
    assert holder.stdout is not None
    with holder, holder.stdout:
        assert holder.stdout.readline() == b"2\n"
        holder.kill()
        assert holder.wait() == -signal.SIGKILL
    assert table.keeps_blocks(), "for 1.5 seconds, rounded up"
    ends = [table.slot(BlockId(block)).held_until for block in range(4)]
    assert ends == [0, table.kept_until, table.kept_until, 0]
    assert 2 <= ends[1] <= 3 + table.now
    wait_until(lambda: not table.keeps_blocks(), "the end of the hold")
    assert table.now >= ends[1]
    assert not table.kept_until
