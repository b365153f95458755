"""Real processes lease, copy, reuse and die at once; no lease is lost, none is leaked, and no
re-check passes for bytes that changed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvshm._base.ids import BlockHash, BlockId, Epoch, Fingerprint, Generation, LeaseBit
from kvshm._base.syncpoints import VARIABLE
from kvshm._node.segment_server import TableType
from kvshm._shm.layout import BlockRecord, SlotState, pack_records, unpack_records
from kvshm._shm.own_slot_table import OwnSlotTable, RankSlotTable, TableSpec
from kvshm._shm.slot_table import PeerSlotTable, RosterSlotTable

pytestmark = pytest.mark.multiprocess

RACER = Path(__file__).with_name("lease_racer.py")
BLOCKS = 4
BLOCK_BYTES = 1 << 15
LOADS = 1500
FOREVER = 10**9


class Race:
    """A table, its data and the processes that fight for them."""

    def __init__(self, folder: Path) -> None:
        spec = TableSpec(
            f"test-{uuid.uuid4().hex[:12]}", "e", BLOCKS, 16, 1, Fingerprint(bytes(32))
        )
        self.table = OwnSlotTable.create(spec, Epoch(1))
        self.mapped(RankSlotTable).set_life(0)
        self.data = folder / "data"
        self.data.write_bytes(bytes(BLOCKS * BLOCK_BYTES))
        self.processes: list[subprocess.Popen[bytes]] = []

    def mapped(self, role: type[TableType]) -> TableType:
        """The table as another process has it."""
        return role.from_fd(self.table.name, self.table.descriptor(True))

    def start(
        self, role: str, how: str, amount: int, arming: str = "", torn: int = 0, met: int = 0
    ) -> subprocess.Popen[bytes]:
        environ = {k: v for k, v in os.environ.items() if k != VARIABLE}
        if arming:
            environ[VARIABLE] = arming
        fd = self.table.descriptor(True)
        arguments = [role, str(fd), str(self.data), how, str(amount), str(torn)]
        arguments.append(str(met))
        process = subprocess.Popen(
            [sys.executable, str(RACER), *arguments],
            env=environ, stdout=subprocess.PIPE, pass_fds=[fd],
        )  # fmt: skip
        os.close(fd)
        self.processes.append(process)
        return process

    def leases(self) -> int:
        """Union of all lease bits."""
        found = 0
        for slot in self.table.slots():
            found |= slot.leases
        return found

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()
            assert process.stdout is not None
            process.stdout.close()
        self.table.close()


@pytest.fixture
def race(tmp_path: Path) -> Iterator[Race]:
    race = Race(tmp_path)
    yield race
    race.close()


def counts(process: subprocess.Popen[bytes]) -> dict[str, int]:
    out, _ = process.communicate()
    assert process.returncode == 0
    found: dict[str, int] = json.loads(out)
    return found


def finish(race: Race, exporter: subprocess.Popen[bytes]) -> dict[str, int]:
    """The importers have finished: end the exporter too and return its counts."""
    race.table.retire()
    return counts(exporter)


def test_with_a_patient_exporter_no_lease_is_lost(race: Race) -> None:
    """While a lease is held the block does not change: every copy is whole, every release
    finds its lease, and in the end none is left."""
    exporter = race.start("exporter", "patient", FOREVER)
    importers = [race.start("importer", str(bit), LOADS, met=1) for bit in (0, 13, 27)]
    results = [counts(importer) for importer in importers]
    exported = finish(race, exporter)
    for result in results:
        assert result["released"] == result["taken"] >= LOADS
        assert result.get("discarded", 0) == result["torn"] == result["wrong"] == 0
    assert exported["forced"] == 0
    assert exported["drained"] > 0, "the exporter never met a lease: no race was run"
    assert race.leases() == 0
    assert race.table.check_integrity() == []


def test_with_a_hasty_exporter_no_changed_byte_passes(race: Race) -> None:
    """Blocks are overwritten under their readers; one importer has no lease at all."""
    exporter = race.start("exporter", "forcing", FOREVER)
    importers = [race.start("importer", str(b), LOADS, torn=1) for b in (0, 13, -1)]
    results = [counts(importer) for importer in importers]
    exported = finish(race, exporter)
    assert [result["wrong"] for result in results] == [0, 0, 0]
    assert all(result["torn"] > 0 for result in results)
    overridden = sum(result["taken"] - result.get("released", 0) for result in results)
    assert overridden == exported["overridden"] > 0
    assert race.leases() == 0
    assert race.table.check_integrity() == []


def test_the_leases_of_a_killed_importer_are_swept(race: Race) -> None:
    """One importer dies holding leases.  Others lose none by the sweep, and the exporter,
    who waits for every lease, can go on only because of it."""
    exporter = race.start("exporter", "patient", FOREVER)
    survivors = [race.start("importer", str(bit), LOADS) for bit in (0, 27)]
    doomed = race.start("importer", "13", FOREVER, "LEASED:kill:200")
    assert doomed.wait() == -signal.SIGKILL
    assert race.leases() & 1 << 13, "it died with a lease"
    assert race.mapped(RosterSlotTable).sweep(1 << 13) >= 1
    results = [counts(survivor) for survivor in survivors]
    exported = finish(race, exporter)
    for result in results:
        assert result["released"] == result["taken"]
        assert result["wrong"] == result["torn"] == 0
    assert exported["forced"] == 0
    assert race.leases() == 0
    assert race.mapped(RosterSlotTable).sweep(2**28 - 1) == 0


def test_a_stopped_importer_holds_its_block_and_loses_it_by_force(race: Race) -> None:
    """Stopped between lease and copy: the block drains, is forced and overwritten; what the
    importer then copies is discarded, and its release takes nothing from the next holder."""
    record = BlockRecord(BlockHash(b"h" * 32), BlockId(0), Generation(0), 0)
    race.table.publish(pack_records([record]), bytes(8))
    importer = race.start("importer", "5", 1, "LEASED:stop")
    os.waitpid(importer.pid, os.WUNTRACED)
    assert race.table.retract([BlockId(0)])[1] == [0]
    assert race.table.drain([BlockId(0)], 0) == [0]
    assert race.table.force([BlockId(0)]) == (1, 1 << 5)
    (again,) = unpack_records(race.table.publish(pack_records([record]), bytes(8)))
    race.mapped(PeerSlotTable).lease(LeaseBit(5), pack_records([again]))
    assert race.table.slot(0)[:3] == (1, SlotState.READY, 1 << 5)
    write_block(race.data, 0, 1)
    importer.send_signal(signal.SIGCONT)
    result = counts(importer)
    assert (result["discarded"], result["delivered"], result["wrong"]) == (1, 1, 0)
    assert race.table.slot(0).leases == 1 << 5, "the second load joined a lease, the first let go"


def write_block(path: Path, block: int, generation: int) -> None:
    """What lease_racer.py's exporter writes."""
    with path.open("r+b") as file:
        file.seek(block * BLOCK_BYTES)
        file.write((block << 32 | generation).to_bytes(8, "little") * (BLOCK_BYTES // 8))
