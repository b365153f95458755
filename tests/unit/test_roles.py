"""Who may say what on a slot table: a type checker refuses what a role may not do."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from kvshm._node.segment_server import SegmentClient
from kvshm._shm import own_slot_table, slot_table

ROOT = Path(__file__).parents[2]
OWN, RANK, PEER, ROSTER, VIEW = (
    "OwnSlotTable", "RankSlotTable", "PeerSlotTable", "RosterSlotTable", "SlotTableView",
)  # fmt: skip
MAY = {
    "table.scan()": {OWN, RANK, PEER, ROSTER, VIEW},
    "table.recheck(Rank(0), b'')": {OWN, RANK, PEER, ROSTER, VIEW},
    "table.counters.read(PUBLISHED)": {OWN, RANK, PEER, ROSTER, VIEW},
    "table.lease(LeaseBit(0), b'')": {PEER},
    "table.release(LeaseBit(0), b'')": {PEER},
    "table.hold(b'', 1.0)": {OWN, PEER},
    "table.put_in_drain(1)": {PEER},
    "table.end_copies(2)": {PEER},
    "table.end_drain()": {PEER},
    "table.keeps_blocks()": {OWN},
    "table.kept([])": {OWN},
    "table.kept_runs(None, 1, 1)": {OWN},
    "table.sweep(1)": {ROSTER},
    "table.coordinator_went_round(0)": {ROSTER},
    "table.counters.add(PUBLISHED)": {OWN, RANK},
    "table.log_error('')": {OWN, RANK},
    "table.begin_pulse(None)": {OWN, RANK},
    "table.set_life(0)": {RANK},
    "table.set_checksum(Rank(0), 0, 0)": {RANK},
    "table.finish_ticket(0)": {RANK},
    "table.descriptor(True)": {OWN, ROSTER},
    "table.publish(b'', b'')": {OWN},
    "table.retract([])": {OWN},
    "table.drain([], 0)": {OWN},
    "table.force([])": {OWN},
    "table.reset()": {OWN},
    "table.retire()": {OWN},
    "table.beat()": {OWN},
    "table.take_ticket(1)": {OWN},
    "table.set_lease_bit(LeaseBit(0))": {OWN},
    "table.count_lease_batch()": {OWN},
    "table.generations([])": {OWN},
    "table.as_peer()": {OWN},
    "table.end_life(None)": {OWN, RANK},
    "table.withdraw()": {OWN, RANK},
    "table.publish_marked(bytearray(), [], [])": {OWN},
    "table.retract_marked(bytearray(), [])": {OWN},
    "table.create(spec, Epoch(1))": {OWN},
    "table.from_fd('', 0)": {RANK, PEER, ROSTER, VIEW},
}
READS = (
    "WRITABLE age_ms age_seconds alive buffer check_integrity checksum close count_blocks "
    "died errors gives_away heartbeat in_drain in_use keeps loads_since missing_in progress "
    "is_alive kept_until lease_bit leases_taken life name nbytes now owner_begun owner_died "
    "retired seconds_left slot slots withdrawn"
)
GIVES = {
    "view(1)": VIEW,
    "peer_table(1)": PEER,
    "rank_table(1)": RANK,
    "table_from_coordinator(1)": VIEW,
    "roster_table(1, 1, 1)": PEER,
}


HEAD = """
from kvshm._base.ids import Epoch, LeaseBit, Rank
from kvshm._node.segment_server import SegmentClient
from kvshm._shm.statistics import PUBLISHED
from kvshm._shm.own_slot_table import OwnSlotTable, RankSlotTable, TableSpec
from kvshm._shm.slot_table import PeerSlotTable, RosterSlotTable, SlotTableView
spec: TableSpec
segments: SegmentClient
"""


@pytest.fixture(scope="module")
def refused(tmp_path_factory: pytest.TempPathFactory) -> set[tuple[str, str]]:
    program, done = HEAD, []
    for what in MAY:
        for role in (OWN, RANK, PEER, ROSTER, VIEW):
            program += f"def f{len(done)}(table: {role}) -> None: {what}\n"
            done.append((what, role))
        for fetched in GIVES:
            program += what.replace("table", f"segments.{fetched}", 1) + "\n"
            done.append((what, fetched))
    path = tmp_path_factory.mktemp("roles") / "roles.py"
    path.write_text(program)
    argv = [sys.executable, "-m", "mypy", "--strict", str(path)]
    said = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True)
    # By its name alone: mypy's cache may have it in the folder of the run before.
    unknown = r"roles\.py:(\d+): error: (?:.* \[attr-defined\]|\"None\" not callable  \[misc\])$"
    lines = re.findall(unknown, said.stdout, re.M)
    assert f"Found {len(lines)} errors in 1 file" in said.stdout, said.stdout + said.stderr
    first = HEAD.count("\n") + 1
    return {done[int(line) - first] for line in lines}


@pytest.mark.parametrize("what", MAY)
def test_each_role_may_do_its_part_and_no_more(what: str, refused: set[tuple[str, str]]) -> None:
    roles = {OWN, RANK, PEER, ROSTER, VIEW}
    assert {role for role in roles if (what, role) not in refused} == MAY[what]
    for fetched, role in GIVES.items():
        assert ((what, fetched) not in refused) == (role in MAY[what]), fetched


def test_no_method_is_left_out() -> None:
    types = [vars(own_slot_table)[name] for name in (OWN, RANK)]
    types += [vars(slot_table)[name] for name in (PEER, ROSTER, VIEW)]
    names = {name for kind in types for name in dir(kind) if not name.startswith("_")}
    listed = {what.split("(")[0].split(".")[1] for what in MAY} - {"counters"}
    assert names == listed | set(READS.split())
    methods = {name for name in dir(SegmentClient) if not name.startswith("_")}
    assert methods == {what.split("(")[0] for what in GIVES} | {"info", "replica", "peers_file"}
