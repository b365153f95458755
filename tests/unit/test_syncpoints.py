"""Sync points: a real process stops or dies at each of them, in C and in Python."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvshm import _native
from kvshm._base.ids import BlockId, Epoch, Fingerprint, LeaseBit
from kvshm._base.syncpoints import VARIABLE, SyncPoint, parse_trigger, sync_point
from kvshm._shm.layout import SlotState, unpack_records
from kvshm._shm.own_slot_table import TableSpec
from kvshm._shm.slot_table import Slot
from kvshm.errors import ConfigError

from .served import AnyTable

ROUND = """
import os, sys
from kvshm.config import Config
Config.from_env(os.environ)
from kvshm._shm.layout import *
from kvshm._shm.own_slot_table import OwnSlotTable
from kvshm._shm.slot_table import PeerSlotTable, SlotTableView
from kvshm._base.syncpoints import SyncPoint, sync_point
from kvshm._base.ids import BlockHash
class Owner(OwnSlotTable):
    from_fd = SlotTableView.__dict__["from_fd"]  # one process plays the owner of another's table
peer = PeerSlotTable.from_fd("table", os.dup(int(sys.argv[1])))
table = Owner.from_fd("table", int(sys.argv[1]))
record = BlockRecord(BlockHash(b"h" * 32), 0, 0, 0)
held = table.publish(pack_records([record]), bytes(8))
peer.lease(3, held)
table.retract([0])
table.force([0])
for point in list(SyncPoint)[6:]:
    sync_point(point)
print("done")
"""
"""One publish, lease, retract and force of slot 0, then every point of the Python code."""


@pytest.fixture
def table() -> Iterator[AnyTable]:
    namespace = f"test-{uuid.uuid4().hex[:12]}"
    spec = TableSpec(namespace, "e", 2, 16, 1, Fingerprint(bytes(32)))
    table = AnyTable.create(spec, Epoch(1))
    table.set_life(0)
    yield table
    table.close()


def start(table: AnyTable, arming: str) -> subprocess.Popen[bytes]:
    environ = {**os.environ, VARIABLE: arming}
    fd = table.descriptor(True)
    command = [sys.executable, "-c", ROUND, str(fd)]
    try:
        return subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, pass_fds=[fd])
    finally:
        os.close(fd)


def test_both_languages_number_the_points_alike() -> None:
    header = (Path(_native.__file__).parent / "native/core.h").read_text()
    names = re.findall(r"\bKVSHM_SYNC_([A-Z_]+)(?: = 0)?,", header)
    assert names == [SyncPoint(i).name for i in range(_native.NUM_SYNC_POINTS)]


WORD_AT: dict[SyncPoint, tuple[int, SlotState, int]] = {
    SyncPoint.PUBLISH_FILLED: (0, SlotState.EMPTY, 0),
    SyncPoint.PUBLISHED: (0, SlotState.READY, 0),
    SyncPoint.LEASE_LOADED: (0, SlotState.READY, 0),
    SyncPoint.LEASED: (0, SlotState.READY, 1 << 3),
    SyncPoint.RETRACTED: (0, SlotState.DRAINING, 1 << 3),
    SyncPoint.FORCED: (1, SlotState.EMPTY, 0),
}


def check_slot(point: SyncPoint, slot: Slot) -> None:
    assert slot[:3] == WORD_AT.get(point, WORD_AT[SyncPoint.FORCED])
    assert slot.block_hash == b"h" * 32


@pytest.mark.parametrize("point", SyncPoint)
def test_a_process_stops_there_and_goes_on(table: AnyTable, point: SyncPoint) -> None:
    process = start(table, f"{point.name}:stop")
    try:
        _, status = os.waitpid(process.pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status)
        assert os.WSTOPSIG(status) == signal.SIGSTOP
        check_slot(point, table.slot(0))
    finally:
        process.send_signal(signal.SIGCONT)
    assert process.communicate()[0] == b"done\n"
    assert process.returncode == 0


@pytest.mark.parametrize("point", SyncPoint)
def test_a_process_dies_there(table: AnyTable, point: SyncPoint) -> None:
    process = start(table, f"{point.name}:kill")
    assert process.communicate()[0] == b""
    assert process.returncode == -signal.SIGKILL
    check_slot(point, table.slot(0))
    assert table.check_integrity() == []


def test_what_a_dead_exporter_had_filled_is_not_readable(table: AnyTable) -> None:
    """Killed between filling the slot and making it READY: no one ever sees the block, and
    the slot can be used again."""
    start(table, "PUBLISH_FILLED:kill").communicate()
    assert table.scan() == b""
    process = start(table, "PUBLISHED:kill:1")
    process.communicate()
    (record,) = unpack_records(table.scan())
    assert record.generation == 0


def test_a_lease_that_lost_its_race_is_not_taken(table: AnyTable) -> None:
    """Stopped between reading word and hash and setting the bit, while the block is reused:
    the CAS fails and the lease is refused."""
    process = start(table, "LEASE_LOADED:stop")
    os.waitpid(process.pid, os.WUNTRACED)
    assert table.retract([BlockId(0)])[1] == []
    process.send_signal(signal.SIGCONT)
    process.communicate()
    assert table.slot(0)[:3] == (1, SlotState.EMPTY, 0)
    assert table.sweep(2**28 - 1) == 0


def test_the_nth_visit_counts(table: AnyTable) -> None:
    process = start(table, "PUBLISHED:kill:2")
    assert process.communicate()[0] == b"done\n"
    process = start(table, "RELEASED:kill:2")
    assert process.communicate()[0] == b"done\n"


def test_nothing_is_armed_by_default(table: AnyTable) -> None:
    for point in list(SyncPoint)[_native.NUM_SYNC_POINTS :]:
        sync_point(point)
    table.lease(LeaseBit(0), table.scan())


def test_a_setting_that_says_nothing_is_refused(subtests: pytest.Subtests) -> None:
    for text in ["", "LEASED", "LEASED:explode", "NOWHERE:stop", "LEASED:stop:0", "LEASED:stop:x"]:
        with subtests.test(text=text), pytest.raises(ConfigError, match=VARIABLE):
            parse_trigger(text)


def test_an_empty_setting_arms_nothing(table: AnyTable) -> None:
    process = start(table, "")
    assert (process.communicate()[0], process.returncode) == (b"done\n", 0)


def test_a_bad_setting_stops_the_start(table: AnyTable) -> None:
    process = start(table, "LEASED:never")
    assert process.communicate()[0] == b""
    assert process.returncode == 1


def test_what_a_setting_says() -> None:
    assert parse_trigger("COPIED:stop") == (SyncPoint.COPIED, signal.SIGSTOP, 1)
    assert parse_trigger("LEASED:kill:7") == (SyncPoint.LEASED, signal.SIGKILL, 7)


@pytest.mark.parametrize(("point", "nth"), [(-1, 1), (_native.NUM_SYNC_POINTS, 1), (0, 0)])
def test_the_core_arms_only_its_own_points(point: int, nth: int) -> None:
    with pytest.raises(ValueError, match="sync point"):
        _native.arm_sync_point(point, signal.SIGKILL, nth)
