"""Which engines a command is about, and what it says if there are none."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvshm._base.ids import BlockHash, BlockId, Epoch, Generation, LeaseBit
from kvshm._shm.error_log import ErrorCode
from kvshm._shm.layout import BlockRecord, pack_records
from kvshm.tools.node.reader import NodeReader
from kvshm.tools.options import select
from kvshm.tools.top.history import NodeHistory

from .dumps import coordinator_of, silent_engine
from .served import ServedNode

COMMANDS = ("status", "top --once", "top", "holders", "dump", "dump --leased")


def kvshm(command: str, run_dir: Path) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "kvshm.tools.cli", *command.split(), "--run-dir", str(run_dir)]
    clean = {name: value for name, value in os.environ.items() if not name.startswith("KVSHM_")}
    return subprocess.run(argv, env=clean, capture_output=True, text=True)


@pytest.mark.parametrize("option", ["", "--json"])
@pytest.mark.parametrize("command", COMMANDS)
def test_an_engine_that_there_is_not_is_one_error_for_all_commands(
    served: ServedNode, command: str, option: str
) -> None:
    served.serve("e", 1)
    for run_dir, there in ((served.run_dir, "e"), (served.run_dir / "nowhere", "none")):
        done = kvshm(f"{command} --engine nobody {option}", run_dir)
        assert (done.returncode, done.stdout) == (4, "")
        wanted = f"kvshm {command.split()[0]}: no engine is called 'nobody'; there are: {there}\n"
        assert done.stderr == wanted


def test_kv_dump_has_the_same_error(served: ServedNode, tmp_path: Path) -> None:
    served.serve("e", 1)
    place = f"--namespace {served.namespace}"
    done = kvshm(f"kv dump {tmp_path}/f --engine nobody {place}", served.run_dir)
    assert done.returncode == 4
    assert done.stderr.startswith("kvshm kv dump: no engine is called 'nobody'; there are: e\n")
    assert not (tmp_path / "f").exists()


@pytest.mark.parametrize(
    ("command", "code"), [("status", 3), ("top --once", 1), ("holders", 1), ("dump", 1)]
)
def test_that_there_is_nothing_is_an_answer_and_json(
    served: ServedNode, command: str, code: int
) -> None:
    done = kvshm(f"{command} --json", served.run_dir)
    assert done.returncode == code
    reported = json.loads(done.stdout)
    assert reported == [] if command == "holders" else reported["namespaces"] == []
    plain = kvshm(command, served.run_dir)
    assert (plain.returncode, plain.stdout) == (code, "")
    assert "nothing of kvshm" in plain.stderr


@pytest.mark.parametrize(("probe", "code"), [("serving", 0), ("live", 2), ("coordinator", 2)])
def test_where_the_run_directory_cannot_be_used_engines_serve_unshared(
    served: ServedNode, probe: str, code: int
) -> None:
    served.run_dir.chmod(0o777)
    environ = {**os.environ, "KVSHM_RUN_DIR": str(served.run_dir)}
    argv = [sys.executable, "-m", "kvshm.tools.cli", "status", "--here", "--probe", probe]
    done = subprocess.run(argv, env=environ, capture_output=True, text=True)
    assert (done.returncode, done.stdout, "has mode 0777" in done.stderr) == (code, "", True)


@pytest.mark.parametrize(
    ("command", "code"), [("status --engine x", 4), ("holders", 0), ("status --namespace X", 2)]
)
def test_a_full_disk_under_stderr_changes_no_exit_status(
    served: ServedNode, command: str, code: int
) -> None:
    served.serve("e", 1)
    argv = [sys.executable, "-m", "kvshm.tools.cli", *command.split()]
    place = ["--run-dir", str(served.run_dir)]
    with open("/dev/full", "w") as full:
        assert subprocess.run([*argv, *place], stderr=full).returncode == code
    closed = ["sh", "-c", '"$@" 2>&-', "sh", *argv, *place]
    assert subprocess.run(closed).returncode == code


def test_an_engine_that_is_asked_for_is_judged_beside_all_others(served: ServedNode) -> None:
    for name, epoch in (("a", 1), ("b", 2)):
        table = served.serve(name, epoch, fingerprint=bytes([epoch]) * 32, model="m").table
        other = "b" if name == "a" else "a"
        table.log_error(other, "dtype", "is x here, y there", code=ErrorCode.CANNOT_SHARE)
        table.set_life(0)
    with coordinator_of(served, *(engine.table for engine in served.engines)):
        reported = json.loads(kvshm("status --json", served.run_dir).stdout)
        alone = json.loads(kvshm("status --json --engine a", served.run_dir).stdout)
        code = kvshm("status --engine a", served.run_dir).returncode
    every = {engine["engine"]: engine for engine in reported["namespaces"][0]["engines"]}
    assert alone["namespaces"][0]["engines"] == [every["a"]]
    assert "dtype is x here" in every["a"]["reasons"][0]
    assert code == 1


def test_that_no_one_holds_a_lease_is_no_failure(served: ServedNode) -> None:
    served.serve("e", 1)
    for option, printed in (("", ""), ("--json", "[]\n"), ("--engine e", "")):
        done = kvshm(f"holders {option}", served.run_dir)
        assert (done.returncode, done.stdout) == (0, printed)


def test_a_silent_engine_has_the_name_by_which_others_know_it(served: ServedNode) -> None:
    """As after a coordinator's restart: no one hands out its table."""
    knows = served.serve("a", 1)
    knows.replica.add_row(Epoch(5), "b", 26, LeaseBit(7))
    with silent_engine(served, 5), NodeReader(served.run_dir, served.namespace) as reader:
        history = NodeHistory(reader)
        view = history.look()
        reading = select(reader.read(), "b")
        for command in ("dump", f"kv dump {served.run_dir}/f --namespace {served.namespace}"):
            assert kvshm(f"{command} --engine b", served.run_dir).returncode == 1, "it is there"
        nobody = kvshm("status --engine nobody", served.run_dir)
    (space,) = reading.namespaces
    assert (space.engines, [*space.unreadable]) == ((), [5])
    assert [fault.engines for fault in view.faults if "no answer within" in fault.text] == [("b",)]
    assert f"there are: a, b (epoch {5:016x}, pid {os.getpid()})" in nobody.stderr


def test_an_ended_engine_is_distinguished_from_a_living_one_of_its_name(served: ServedNode) -> None:
    """In containers of their own all engines may have pid 1, and one name."""
    importer, exporter = served.serve("e", 1).table, served.serve("x", 2)
    for epoch, bit in ((Epoch(5), 7), (Epoch(6), 8)):
        exporter.replica.add_row(epoch, "e", 26, LeaseBit(bit))
        served.serve("gone", epoch).crash()
    importer.set_lease_bit(LeaseBit(3))
    exporter.table.set_life(0)
    record = pack_records([BlockRecord(BlockHash(bytes(32)), BlockId(0), Generation(0), 0)])
    exporter.table.publish(record, bytes(8))
    for bit in (3, 7):
        exporter.table.lease(LeaseBit(bit), record)
    with NodeReader(served.run_dir, served.namespace) as reader:
        view = NodeHistory(reader).look()
    ended = [f.engines for f in view.faults if f.text == "its process has ended"]
    assert ended == [(f"e-{5:016x}", f"e-{6:016x}")]
    holders = json.loads(kvshm("holders --json", served.run_dir).stdout)
    reported = [(row["holder"], row["process"], row["bit"]) for row in holders]
    assert reported == [("e", "alive", 3), (f"e-{5:016x}", "ended", 7)]
