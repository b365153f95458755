"""Processes that die or stop at a given place in the protocol, one place after the other."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from kvshm._base.ids import BlockHash, BlockId, Epoch, Fingerprint, Generation, LeaseBit
from kvshm._base.syncpoints import VARIABLE
from kvshm._node.segment_server import TableType
from kvshm._shm.layout import BlockRecord, SlotState, pack_records, unpack_records
from kvshm._shm.own_slot_table import OwnSlotTable, RankSlotTable, TableSpec
from kvshm._shm.slot_table import PeerSlotTable, RosterSlotTable

from .processes import Node, fresh_node, wait_until
from .toys import finish, more, result, start, table_of

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(600)]

# -- toy engines on a real node: every imported byte is compared with what its hash says


@pytest.fixture
def node() -> Iterator[Node]:
    with fresh_node() as node:
        node.coordinator()
        yield node


def test_an_importer_stopped_between_copy_and_check_delivers_nothing_stale(node: Node) -> None:
    exporter = start(node, 1, "--requests", "400", "--loads", "0")
    # Its peer reuses blocks sooner than news of it arrives: many of its leases are refused.
    importer = start(node, 2, "--imported", "30", KVSHM_TEST_SYNC_POINT="COPIED:stop:3")
    result(exporter)
    wait_until(lambda: importer.is_stopped, "the importer to stop")
    assert more(exporter)["counters"]["forced"] > 0
    importer.signal(signal.SIGCONT)
    stale = result(importer)
    assert stale["counters"]["recheck_failed"] > 0
    assert stale["wrong"] == 0
    for engine in (exporter, importer):
        engine.say("")
        assert engine.wait() == 0


@pytest.mark.usefixtures("hurried")  # a quarantine may have to end
@pytest.mark.parametrize("point", ["LEASED", "COPY_BEGINS", "COPIED", "PUBLISHED", "RETRACTED"])
def test_an_engine_killed_anywhere_harms_no_one(node: Node, point: str) -> None:
    others = [start(node, seed, "--requests", "150") for seed in (1, 2)]
    victim = start(node, 3, "--loads", "1000000", KVSHM_TEST_SYNC_POINT=f"{point}:kill:5")
    assert victim.wait() == -signal.SIGKILL
    tables = [table_of(node, engine) for engine in others]
    wait_until(lambda: len(node.sockets()) == 2, "the dead engine's socket to go")
    wait_until(lambda: all(table.lease_bit >= 0 for table in tables), "both to have joined")
    living_bits = sum(1 << table.lease_bit for table in tables)
    for table in tables:
        assert not any(slot.leases & ~living_bits for slot in table.slots())
        table.close()
    results = finish(others)
    assert [r["wrong"] for r in results] == [0, 0]


# -- one table, and an importer in a process of its own

IMPORTER = """
import json, sys
from kvshm._base.ids import LeaseBit, Rank
from kvshm._shm.slot_table import PeerSlotTable

table, bit = PeerSlotTable.from_fd("the table", int(sys.argv[1])), LeaseBit(int(sys.argv[2]))
records = table.scan()
length, taken = table.lease(bit, records)
good = table.recheck(Rank(0), records)
print(json.dumps([length, list(map(bool, good)), table.release(bit, records, taken)]))
"""
BLOCKS = [BlockId(0), BlockId(1)]


@pytest.fixture
def table() -> Iterator[OwnSlotTable]:
    name = f"test-{uuid.uuid4().hex[:12]}"
    own = OwnSlotTable.create(TableSpec(name, "e", 2, 16, 1, Fingerprint(bytes(32))), Epoch(1))
    mapped(own, RankSlotTable).set_life(0)
    publish(own)
    yield own
    own.close()


def mapped(own: OwnSlotTable, role: type[TableType]) -> TableType:
    return role.from_fd(own.name, own.descriptor(True))


def publish(own: OwnSlotTable) -> bytes:
    records = [BlockRecord(BlockHash(b"h" * 32), block, Generation(0), 0) for block in BLOCKS]
    return own.publish(pack_records(records), bytes(16))


@contextmanager
def importer(own: OwnSlotTable, bit: int, arming: str) -> Iterator[subprocess.Popen[str]]:
    fd = own.descriptor(True)
    with subprocess.Popen(
        [sys.executable, "-c", IMPORTER, str(fd), str(bit)],
        env={**os.environ, VARIABLE: arming},
        stdout=subprocess.PIPE,
        text=True,
        pass_fds=[fd],
    ) as process:
        os.close(fd)
        try:
            yield process
        finally:
            process.kill()


def leases(own: OwnSlotTable) -> list[int]:
    return [slot.leases for slot in own.slots()]


def test_the_leases_of_a_killed_importer_are_swept_and_no_others(table: OwnSlotTable) -> None:
    with importer(table, 13, "LEASED:kill:2") as killed:
        assert killed.wait() == -signal.SIGKILL
    alive = mapped(table, PeerSlotTable)
    assert alive.lease(LeaseBit(27), alive.scan())[0] == 2
    assert leases(table) == [1 << 13 | 1 << 27] * 2
    assert mapped(table, RosterSlotTable).sweep(1 << 13) == 2
    assert leases(table) == [1 << 27] * 2


def test_a_stopped_importer_holds_its_blocks_and_loses_them_by_force(table: OwnSlotTable) -> None:
    """What it reads later is discarded, and its release takes nothing from the next load."""
    with importer(table, 5, "LEASED:stop:2") as stopped:
        os.waitpid(stopped.pid, os.WUNTRACED)
        assert table.retract(BLOCKS)[1] == BLOCKS
        assert table.drain(BLOCKS, 0) == BLOCKS
        assert table.force(BLOCKS) == (2, 1 << 5)
        again = publish(table)
        assert [r.generation for r in unpack_records(again)] == [1, 1]
        assert mapped(table, PeerSlotTable).lease(LeaseBit(5), again)[0] == 2
        stopped.send_signal(signal.SIGCONT)
        assert stopped.stdout is not None
        assert stopped.stdout.readline() == "[2, [false, false], 0]\n"
    assert [slot.state for slot in table.slots()] == [SlotState.READY] * 2
    assert leases(table) == [1 << 5] * 2
