"""Who may say what on a slot table: a type checker refuses what a role may not do."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

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
    "table.sweep(1)": {ROSTER},
    "table.counters.add(PUBLISHED)": {OWN, RANK},
    "table.log_error('')": {OWN, RANK},
    "table.begin_pulse(None)": {OWN, RANK},
    "table.set_life(0)": {OWN, RANK},
    "table.set_checksum(Rank(0), 0, 0)": {OWN, RANK},
    "table.finish_ticket(0)": {OWN, RANK},
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
}


@pytest.fixture(scope="module")
def refused(tmp_path_factory: pytest.TempPathFactory) -> set[tuple[str, str]]:
    """What mypy, strict, finds wrong: what is done, and by which role."""
    done = [(what, role) for what in MAY for role in (OWN, RANK, PEER, ROSTER, VIEW)]
    head = (
        "from kvshm.shm.counters import PUBLISHED\n"
        "from kvshm.shm.own_slot_table import OwnSlotTable, RankSlotTable\n"
        "from kvshm.shm.slot_table import PeerSlotTable, RosterSlotTable, SlotTableView\n"
        "from kvshm.ids import LeaseBit, Rank\n"
    )
    bodies = [f"def f{i}(table: {role}) -> None: {what}\n" for i, (what, role) in enumerate(done)]
    program = tmp_path_factory.mktemp("roles") / "roles.py"
    program.write_text(head + "".join(bodies))
    argv = [sys.executable, "-m", "mypy", "--strict", str(program)]
    said = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True)
    # By its name alone: mypy's cache may have it in the folder of the run before.
    lines = re.findall(r"roles\.py:(\d+): error: .* \[attr-defined\]$", said.stdout, re.M)
    assert f"Found {len(lines)} errors in 1 file" in said.stdout, said.stdout + said.stderr
    first = head.count("\n") + 1
    return {done[int(line) - first] for line in lines}


@pytest.mark.parametrize("what", MAY)
def test_each_role_may_do_its_part_and_no_more(what: str, refused: set[tuple[str, str]]) -> None:
    roles = {OWN, RANK, PEER, ROSTER, VIEW}
    assert {role for role in roles if (what, role) not in refused} == MAY[what]
