"""The doctor's checks, each made to fail; those of real processes: tests/multiprocess."""

from __future__ import annotations

import fcntl
import json
import os
import socket
import tarfile
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from kvshm._ground.copy_path import CopyPath
from kvshm._ground.declined import declined_now, forget_declined, record_declined
from kvshm._ground.ids import BlockId, Epoch, Generation, LeaseBit
from kvshm._shm.layout import VERSION_OFFSET, BlockRecord, pack_records
from kvshm.tools import cli
from kvshm.tools.doctor import command, machine
from kvshm.tools.doctor.facts import Facts
from kvshm.tools.doctor.findings import Check, Result
from kvshm.tools.node.reading import NodeReading

from .dumps import hash_of, silent_engine
from .served import ServedNode, set_life

CHECKS = {check.name: check for check in command.CHECKS}


def look(facts: Facts, check: str) -> list[tuple[Result, str]]:
    found = CHECKS[check].findings(facts)
    for finding in found:
        wrong = finding.result in (Result.WARNING, Result.PROBLEM)
        assert bool(finding.remedy) is wrong, finding
    return [(finding.result, finding.text) for finding in found]


def results(facts: Facts, check: str) -> list[Result]:
    return [result for result, _ in look(facts, check)]


@pytest.fixture
def facts(served: ServedNode) -> Facts:
    return Facts(served.run_dir, served.namespace, os.environ)


@pytest.fixture
def rooted() -> Iterator[Facts]:
    """A machine whose files a test makes."""
    with tempfile.TemporaryDirectory(prefix="kv-") as directory:
        root = Path(directory)
        (root / "proc").mkdir()
        yield Facts(root / "run", None, {"PATH": directory}, root)


# -- the machine


def test_a_run_directory_of_another_mode_or_on_a_network_is_a_problem(rooted: Facts) -> None:
    (absent,) = look(rooted, "run directory")
    assert absent[0] is Result.NOT_APPLICABLE
    rooted.run_dir.mkdir()
    rooted.run_dir.chmod(0o755)
    ((result, text),) = look(rooted, "run directory")
    assert (result, "wanted 0700" in text) == (Result.PROBLEM, True)
    rooted.run_dir.chmod(0o700)
    mounts = rooted.root / "proc/self/mountinfo"
    mounts.parent.mkdir()
    for kind, wanted in (("nfs4", Result.PROBLEM), ("tmpfs", Result.OK)):
        place = str(rooted.run_dir.resolve()).replace(" ", "\\040")
        mounts.write_text(
            f"1 0 8:1 / / rw - ext4 /dev/sda1 rw\n2 1 0:5 / {place} rw - {kind} x rw\n"
        )
        ((result, text),) = look(rooted, "run directory")
        assert (result, kind in text) == (wanted, True)


@pytest.mark.parametrize(
    ("conf", "wanted"),
    [("", Result.WARNING), ("RemoveIPC=yes\n", Result.WARNING), (" RemoveIPC = no\n", Result.OK)],
)
def test_ipc_that_systemd_removes_is_told(
    rooted: Facts, monkeypatch: pytest.MonkeyPatch, conf: str, wanted: Result
) -> None:
    assert results(rooted, "RemoveIPC") == [Result.NOT_APPLICABLE]
    (rooted.root / "run/systemd/system").mkdir(parents=True)
    (rooted.root / "etc/systemd").mkdir(parents=True)
    (rooted.root / "etc/systemd/logind.conf").write_text(f"[Login]\n#RemoveIPC=no\n{conf}")
    monkeypatch.setattr(machine, "REGULAR_UID", 0)
    assert results(rooted, "RemoveIPC") == [wanted]
    monkeypatch.setattr(machine, "REGULAR_UID", 1 << 31)
    assert results(rooted, "RemoveIPC") == [Result.OK]


def test_partitioned_gpus_and_a_driver_that_fails_are_told(rooted: Facts) -> None:
    assert results(rooted, "MIG and MPS") == [Result.NOT_APPLICABLE]
    smi = rooted.root / "nvidia-smi"
    listed = "GPU 0: H100 (UUID: GPU-1)\\n  MIG 1g.10gb Device 0: (UUID: MIG-1)\\n"
    for script, wanted in (
        (f"printf '{listed}'", Result.WARNING),
        ("echo 'GPU 0: H100 (UUID: GPU-1)'", Result.OK),
        ("exit 9", Result.PROBLEM),
    ):
        smi.write_text(f"#!/bin/sh\n{script}\n")
        smi.chmod(0o755)
        assert results(rooted, "MIG and MPS") == [wanted]


def test_little_memory_and_few_descriptors_are_told(
    rooted: Facts, monkeypatch: pytest.MonkeyPatch
) -> None:
    (rooted.root / "proc/meminfo").write_text("MemAvailable:       1024 kB\n")
    assert results(rooted, "memory") == [Result.WARNING]
    monkeypatch.setattr(machine, "DESCRIPTORS", 1 << 40)
    assert results(rooted, "open files") == [Result.WARNING]


def test_memory_that_cannot_be_sealed_is_a_problem(
    rooted: Facts, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert results(rooted, "sealed memory") == [Result.OK]
    monkeypatch.setattr(fcntl, "fcntl", lambda *_: 0)
    assert results(rooted, "sealed memory") == [Result.PROBLEM]


# -- engines


def test_nothing_is_wrong_with_a_node_in_order(served: ServedNode, facts: Facts) -> None:
    for name, epoch in ("a", 1), ("b", 2):
        table = served.serve(name, epoch).table
        set_life(table)
        served.enlist(table)
        table.coordinator_went_round()
        table.beat()
    found = [finding for check in command.CHECKS for finding in check.findings(facts)]
    assert not [f for f in found if f.result is Result.PROBLEM], found


def test_no_coordinator_is_a_problem_with_the_command_that_starts_one(
    served: ServedNode, facts: Facts
) -> None:
    served.serve("a", 1)
    (finding,) = CHECKS["coordinator"].findings(facts)
    start = f"kvshm-coordinator --run-dir {served.run_dir} --namespace {served.namespace}"
    assert (finding.result, finding.remedy.endswith(start)) == (Result.PROBLEM, True)


def test_an_engine_that_does_not_answer_is_a_problem(served: ServedNode, facts: Facts) -> None:
    with silent_engine(served, 1):
        assert results(facts, "engines") == [Result.PROBLEM]


def test_an_engine_of_another_layout_is_a_problem(served: ServedNode, facts: Facts) -> None:
    table = served.serve("a", 1).table
    table._segment.buffer[VERSION_OFFSET] += 1
    ((result, text),) = look(facts, "versions")
    assert (result, "layout" in text) == (Result.PROBLEM, True)


def test_engines_that_declined_are_problems_unless_a_setting_says_so(
    served: ServedNode, facts: Facts
) -> None:
    for name, purpose in ("e", False), ("f", True):
        told = declined_now(name, "m", "no blocks", on_purpose=purpose)
        record_declined(str(served.run_dir), served.namespace, told)
    assert sorted(look(facts, "declined")) == [
        (Result.OK, "f shares nothing: no blocks"),
        (Result.PROBLEM, "e shares nothing: no blocks"),
    ]
    for name in ("e", "f"):
        forget_declined(name)


@pytest.mark.parametrize(
    ("model", "wanted"), [("m", Result.PROBLEM), ("another", Result.OK)], ids=["one", "another"]
)
def test_engines_of_one_model_that_differ_are_a_problem_with_the_field(
    served: ServedNode, facts: Facts, model: str, wanted: Result
) -> None:
    a = served.serve("a", 1, model="m").table
    served.serve("b", 2, model=model, fingerprint=bytes(31) + b"x")
    a.log_error("cannot share with b: kv_dtype is fp8 here, auto there")
    a.log_error("cannot share with gone: kv_dtype is fp8 here, auto there")
    ((result, text),) = look(facts, "fingerprints")
    assert (result, "kv_dtype is fp8 here" in text) == (wanted, True)
    assert results(facts, "hash seeds") == [Result.OK]


def test_another_hash_seed_is_a_problem(served: ServedNode, facts: Facts) -> None:
    served.serve("a", 1).table.log_error("cannot share with b: none_hash is 00 here, 01 there")
    assert results(facts, "hash seeds") == [Result.PROBLEM]


def test_files_that_nobody_clears_up_are_told(served: ServedNode, facts: Facts) -> None:
    served.serve("a", 1).crash()
    assert results(facts, "leftovers") == [Result.WARNING]


def test_an_index_that_lags_is_told(served: ServedNode, facts: Facts) -> None:
    exporter, importer = served.serve("exporter", 1), served.serve("importer", 2)
    importer.replica.add_row(Epoch(1), "exporter", 26, LeaseBit(0))
    record = BlockRecord(hash_of("a"), BlockId(0), Generation(0), 0)
    exporter.table.publish(pack_records([record]), bytes(8))
    assert results(facts, "replica lag") == [Result.OK]
    late = Facts(facts.run_dir, facts.namespace, {})
    (space,) = late.reading.namespaces
    slow = [
        replace(e, peers=tuple(replace(peer, lag_seconds=60.0) for peer in e.peers))
        for e in space.engines
    ]
    given(late, slow)
    ((result, text),) = look(late, "replica lag")
    assert (result, text) == (
        Result.WARNING,
        "importer lacks 1 blocks of exporter, the oldest for 60 s",
    )


def given(facts: Facts, engines: list) -> None:
    """Have the facts be of these engines."""
    (space,) = facts.reading.namespaces
    spaces = (replace(space, engines=tuple(engines)),)
    facts.__dict__["reading"] = NodeReading(facts.reading.at_ns, spaces, facts.reading.real_ns)


def test_engines_in_other_containers_and_equal_pids_are_told(
    served: ServedNode, facts: Facts
) -> None:
    served.serve("a", 1, pid=7)
    served.serve("b", 2, pid=7)
    assert results(facts, "pid namespaces") == [Result.OK]
    a, b = facts.reading.engines
    given(facts, [replace(a, pid_here=100), replace(b, pid_here=0)])
    assert look(facts, "pid namespaces") == [
        (Result.WARNING, "in other pid namespaces: b"),
        (Result.WARNING, "2 engines have pid 7 in their containers"),
    ]


def test_copies_through_host_memory_are_named_with_their_pair(
    served: ServedNode, facts: Facts
) -> None:
    importer = served.serve("importer", 1).table
    served.serve("exporter", 2)
    assert results(facts, "copy paths") == [Result.NOT_APPLICABLE]
    add = importer.traffic.add
    add("exporter", Epoch(2), CopyPath.SHM, loads=1, nbytes=1 << 30, seconds=0.5)
    add("exporter", Epoch(2), CopyPath.STAGED, loads=1, nbytes=1 << 30, seconds=5.0)
    found = look(Facts(facts.run_dir, facts.namespace, {}), "copy paths")
    assert [(result, text.partition(":")[0]) for result, text in found] == [
        (Result.OK, "importer copies from exporter by shm at 2.1 GB/s"),
        (Result.WARNING, "importer copies from exporter by staged at 0.21 GB/s"),
    ]


# -- the command


def test_a_check_that_fails_is_a_problem_of_its_own(facts: Facts) -> None:
    def breaks(_: Facts) -> Iterator:
        raise ValueError("a bug")
        yield

    (finding,) = Check("broken", "nothing", breaks).findings(facts)
    assert (finding.result, "ValueError: a bug" in finding.text) == (Result.PROBLEM, True)


def test_the_bundle_holds_what_was_found_and_nothing_private(
    served: ServedNode,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    secret = "s3cret-7f1c"
    monkeypatch.setenv("HOME", f"/home/{secret}")
    monkeypatch.setenv("LOGNAME", f"user-{secret}")
    monkeypatch.setenv("HF_TOKEN", secret)
    monkeypatch.setattr(socket, "gethostname", lambda: f"host-{secret}")
    table = served.serve("a", 1, model=f"{tmp_path}/{secret}/tiny").table
    table.log_error(f"cannot read /home/{secret}/x as user-{secret} on host-{secret}")
    record = BlockRecord(hash_of("prompt"), BlockId(0), Generation(0), 0)
    table.publish(pack_records([record]), bytes(8))
    file = tmp_path / "report.tar.gz"
    place = ["--run-dir", str(served.run_dir), "--namespace", served.namespace]
    assert cli.main(["doctor", "--json", "--bundle", str(file), *place]) in (0, 1)
    findings = json.loads(capsys.readouterr().out)
    assert {finding["check"] for finding in findings} == {*CHECKS}
    assert file.stat().st_mode & 0o777 == 0o600
    with tarfile.open(file) as archive:
        parts = {m.name: archive.extractfile(m).read().decode() for m in archive}
    assert [*parts] == [
        f"kvshm-doctor/{name}.json" for name in ("doctor", "status", "dump", "machine", "settings")
    ]
    whole = "\n".join(parts.values())
    assert secret not in whole
    assert hash_of("prompt").hex() not in whole
    assert "failed" not in json.loads(parts["kvshm-doctor/dump.json"])
    assert "cannot read ~/x as USER on HOST" in parts["kvshm-doctor/dump.json"]
    assert '"model": "tiny"' in parts["kvshm-doctor/status.json"]
    before = file.read_bytes()
    assert cli.main(["doctor", "--bundle", str(file), *place]) == 2
    assert file.read_bytes() == before
    assert "it exists; name a new file" in capsys.readouterr().err
