"""The checks of ``kvshm doctor``, each made to fail: with served tables, real files and limits."""

from __future__ import annotations

import os
import resource
import struct
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from kvshm._base.copy_path import CopyPath
from kvshm._base.declined import declined_now, forget_declined, record_declined
from kvshm._base.ids import Epoch
from kvshm._shm.error_log import ErrorCode
from kvshm._shm.layout import LAYOUT_VERSION, VERSION_OFFSET
from kvshm._shm.traffic import Traffic
from kvshm.coordinator.joining import refuse_version
from kvshm.errors import ConfigError, VersionMismatch
from kvshm.tools.doctor import devices, engines, machine, place, settings
from kvshm.tools.doctor.bundle import redactor, write_bundle
from kvshm.tools.doctor.checks import Check, Finding, Result, ok, run_checks
from kvshm.tools.doctor.evidence import Evidence, gather
from kvshm.tools.doctor.processes import Process, Processes, find_processes
from kvshm.tools.node.reading import PeerReading

from .dumps import DEAD_PID, coordinator_of, dies, silent_engine
from .served import Served, ServedNode

GIB = 1 << 30


@pytest.fixture
def two(served: ServedNode) -> tuple[Served, Served]:
    return served.serve("a", 1, pid=11), served.serve("b", 2, pid=12)


def look(served: ServedNode) -> Evidence:
    served.run_dir.chmod(0o700)
    return replace(gather(served.run_dir, served.namespace), processes=Processes((), 0))


def with_engines(seen: Evidence, **changed: dict[str, object]) -> Evidence:
    """The same with changed engines, by name."""
    (space,) = seen.reading.namespaces
    found = tuple(replace(e, **changed.get(e.name, {})) for e in space.engines)
    spaces = (replace(space, engines=found),)
    return replace(seen, reading=replace(seen.reading, namespaces=spaces))


def copied(peer: int, path: CopyPath, gib_per_second: float) -> Traffic:
    took = round(1e9 / gib_per_second)
    return Traffic("x", peer, path, 10, 0, 100, GIB, GIB, took, 1)


# -- running checks


def test_a_check_that_raises_or_hangs_is_a_problem_and_the_others_run_on(
    served: ServedNode,
) -> None:
    gate = threading.Event()

    def raises(_: Evidence) -> Finding:
        raise ZeroDivisionError("by 0\nand more")

    def hangs(_: Evidence) -> Finding:
        gate.wait()
        return ok("late")

    checks = [Check(f.__name__, "", "", f) for f in (raises, hangs, lambda _: ok("fine"))]
    found = [finding for _, finding in run_checks(checks, look(served), patience=0.1)]
    gate.set()
    assert found == [
        (Result.PROBLEM, "could not be checked: ZeroDivisionError: by 0"),
        (Result.PROBLEM, "could not be checked: no answer within 0.1 s"),
        (Result.OK, "fine"),
    ]


# -- the machine


def test_descriptors_of_this_shell_are_counted(served: ServedNode) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (1000, hard))
    try:
        found = machine.descriptors(look(served))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert found.result is Result.WARNING
    assert found.text.startswith("1000 file descriptors")


def test_little_memory_is_a_problem(served: ServedNode, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "available_bytes", lambda: 100 << 20)
    assert machine.memory(look(served)).result is Result.PROBLEM


def test_memory_files_that_cannot_be_made_are_a_problem(served: ServedNode) -> None:
    program = (
        "import resource\n"
        "from kvshm.tools.doctor import checks, machine\n"
        "limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (3, limit))\n"
        "check = checks.Check('', '', '', machine.sealed_memory)\n"
        "print(checks.run_checks([check], None)[0][1].text)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == "could not be checked: OSError: [Errno 24] Too many open files\n"
    assert machine.sealed_memory(look(served)).result is Result.OK


def test_the_last_remove_ipc_counts(
    served: ServedNode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    main, more = tmp_path / "logind.conf", tmp_path / "logind.conf.d"
    seen = replace(look(served), logind=(main, more))
    assert machine.remove_ipc(seen).result is Result.NOT_APPLICABLE
    main.write_text("[Login]\n#RemoveIPC=no\n")
    assert machine.remove_ipc(seen).result is Result.WARNING
    more.mkdir()
    (more / "a.conf").write_text("RemoveIPC=yes\n")
    (more / "b.conf").write_text("RemoveIPC=no\n")
    assert machine.remove_ipc(seen) == (Result.OK, "RemoveIPC=no")


def test_divided_gpus_and_gpus_for_one_process_are_reported(served: ServedNode) -> None:
    seen = look(served)
    assert devices.mig(replace(seen, gpus=None)).result is Result.NOT_APPLICABLE
    good = replace(seen, gpus="0, H100, Disabled, Default\n1, H100, Disabled, Default")
    assert {devices.mig(good).result, devices.mps(good).result} == {Result.OK}
    bad = replace(seen, gpus="0, H100, Disabled, Default\n1, H100, Enabled, Exclusive_Process")
    assert devices.mig(bad).text.startswith("GPU 1 is divided (MIG)")
    assert devices.mps(bad) == (
        Result.WARNING,
        "GPU 1 admits one process (compute mode Exclusive_Process)",
    )
    place_of = {"KVSHM_RUN_DIR": str(served.run_dir), "KVSHM_NAMESPACE": served.namespace}
    found = tuple(
        Process(pid, place_of | more, Path("/"))
        for pid, more in ((1, {}), (2, {"CUDA_MPS_PIPE_DIRECTORY": "/m"}))
    )
    differ = devices.mps(replace(good, processes=Processes(found, 0)))
    assert differ == (
        Result.WARNING,
        "CUDA_MPS_PIPE_DIRECTORY differs: process 1: unset; process 2: /m",
    )


# -- the place


def test_a_run_directory_that_others_may_enter_is_a_problem(served: ServedNode) -> None:
    served.serve("a", 1)
    served.run_dir.chmod(0o755)
    seen = gather(served.run_dir, None)
    assert place.run_directory(seen).result is Result.PROBLEM
    assert "has mode 0755, wanted 0700" in place.run_directory(seen).text
    assert not [*seen.reading.engines], "it is not trusted"
    served.run_dir.chmod(0o700)
    assert place.run_directory(gather(served.run_dir, None)).result is Result.OK
    missing = gather(served.run_dir / "none", None)
    assert place.run_directory(missing).result is Result.WARNING


def test_a_network_file_system_is_a_problem(served: ServedNode, tmp_path: Path) -> None:
    device = os.stat(served.run_dir).st_dev
    (tmp_path / "self").mkdir()
    line = f"36 35 {os.major(device)}:{os.minor(device)} / /x rw - nfs4 server:/x rw\n"
    (tmp_path / "self/mountinfo").write_text(line)
    found = place.run_file_system(replace(look(served), proc=tmp_path))
    assert (found.result, "(nfs4)" in found.text) == (Result.PROBLEM, True)


def test_run_directories_of_other_users_are_reported(served: ServedNode, tmp_path: Path) -> None:
    (tmp_path / "kvshm-7").mkdir()
    seen = replace(look(served), tmp=tmp_path, processes=Processes((), 3))
    assert place.users(seen).result is Result.OK
    assert "3 processes could not be looked at" in place.users(seen).text
    os.chown(tmp_path / "kvshm-7", 7, 7)
    assert place.users(seen).result is Result.WARNING
    assert place.users(seen).text.startswith(f"{tmp_path}/kvshm-7 belongs to uid 7")


def test_an_engine_that_declines_is_a_problem_unless_it_was_asked_to(served: ServedNode) -> None:
    assert engines.declined(look(served)).result is Result.OK
    for on_purpose, wanted in ((True, Result.OK), (False, Result.PROBLEM)):
        reported = declined_now("e", "m", "dtype fp9 cannot be shared", on_purpose=on_purpose)
        record_declined(str(served.run_dir), served.namespace, reported)
        found = engines.declined(look(served))
        assert found == (wanted, f"e (pid {os.getpid()}): dtype fp9 cannot be shared")
    forget_declined("e")


def test_files_of_dead_processes_are_reported(served: ServedNode) -> None:
    engine = served.serve("a", 1)
    assert place.leftovers(look(served)).result is Result.OK
    engine.crash()
    found = place.leftovers(look(served))
    assert found.result is Result.WARNING
    assert found.text.startswith("1 left by dead processes, for example ")


# -- processes


def test_a_file_that_cannot_be_used_enables_nothing(tmp_path: Path) -> None:
    for pid, text in ((7, "enable = true"), (8, "enable = "), (9, "enable = true"), (10, "")):
        (tmp_path / f"{pid}.toml").write_text(text)
        (tmp_path / str(pid)).mkdir()
        environ = f"KVSHM_CONFIG={tmp_path}/{pid}.toml\0"
        (tmp_path / str(pid) / "environ").write_text(environ)
        (tmp_path / str(pid) / "cmdline").write_text("vllm\0serve\0")
        (tmp_path / str(pid) / "maps").write_text("7f00-7f01 r-xp 0 0:1 9  /l/vllm/_C.abi3.so\n")
    found = find_processes(tmp_path, frozenset({9}))
    assert [process.pid for process in found.enabled] == [7]
    assert found.plain == ()


def test_servers_for_which_nobody_has_said_whether_they_share_are_warned_of(
    served: ServedNode, tmp_path: Path
) -> None:
    """Only beside engines that share: elsewhere plain vLLM is what is meant."""
    place = f"KVSHM_RUN_DIR={served.run_dir}\0KVSHM_NAMESPACE={served.namespace}\0"
    server = "python\0-P\0-m\0vllm.entrypoints.openai.api_server\0--model\0m\0"
    for pid, (argv, environ) in enumerate(
        (
            (server, f"KVSHM_ENABLE=1\0{place}"),
            (server, "HOME=/h\0"),
            ("/v/bin/python\0/v/bin/vllm\0serve\0m\0", "KVSHM_ENABLED=1\0"),
            (server, "KVSHM_ENABLE=0\0"),
            (f"{server}--config\0vllm.yaml\0", "HOME=/h\0"),
            ("vim\0vllm\0notes\0", "HOME=/h\0"),
        ),
        start=10,
    ):
        (tmp_path / str(pid)).mkdir()
        (tmp_path / str(pid) / "environ").write_text(environ)
        (tmp_path / str(pid) / "cmdline").write_text(argv)
        (tmp_path / str(pid) / "maps").write_text("7f00-7f01 r-xp 0 0:1 9  /l/vllm/_C.abi3.so\n")
        (tmp_path / str(pid) / "root").symlink_to("/")
    processes = find_processes(tmp_path, frozenset())
    found = settings.likely_mistakes(replace(look(served), processes=processes))
    assert found.result is Result.WARNING
    assert "without KVSHM_ENABLE, 1 or 0" in found.text
    assert found.text.endswith("(process 11, 12)")
    alone = replace(processes, enabled=())
    found = settings.likely_mistakes(replace(look(served), processes=alone))
    assert found.result is Result.NOT_APPLICABLE


# -- engines


def test_what_engines_logged_is_reported(served: ServedNode, two: tuple[Served, Served]) -> None:
    values = "is fp8 here, auto there"
    two[0].table.log_error("b", "kv_dtype", values, code=ErrorCode.CANNOT_SHARE)
    mismatch = VersionMismatch("protocol", 4, 3)
    refusal = refuse_version("protocol", mismatch, "9.0")
    two[0].table.log_error(refusal.remedy, refusal.reason, code=ErrorCode.REFUSED)
    two[1].table.log_error(refusal.remedy, refusal.reason, code=ErrorCode.OTHER_VERSION)
    seen = look(served)
    assert engines.fingerprints(seen) == (
        Result.WARNING,
        "a: cannot share with b: kv_dtype is fp8 here, auto there",
    )
    assert engines.versions(seen).result is Result.PROBLEM
    reported = "b: refused: upgrade kvshm in the coordinator's environment to 9.0, restart it; "
    assert engines.versions(seen).text.startswith(reported)
    since = with_engines(seen, b={"joined": True})
    assert engines.versions(since).result is Result.OK


def test_an_engine_that_does_not_answer_is_a_problem_and_not_one_of_versions(
    served: ServedNode,
) -> None:
    with silent_engine(served, 5):
        seen = look(served)
    found = engines.health(seen)
    assert found.result is Result.PROBLEM
    assert found.text.startswith(f"engine (epoch 0000000000000005, pid {os.getpid()}): ")
    assert engines.versions(seen).result is Result.OK


def test_a_segment_of_another_version_is_a_problem(served: ServedNode) -> None:
    table = served.serve("old", 5).table
    struct.pack_into("<I", table._segment.buffer, VERSION_OFFSET, LAYOUT_VERSION + 1)
    seen = look(served)
    assert engines.versions(seen).result is Result.PROBLEM
    assert engines.versions(seen).text.startswith("engine (epoch 0000000000000005")
    assert "does not answer" not in engines.health(seen).text


def test_dead_engines_and_failed_hooks_are_problems(
    served: ServedNode, two: tuple[Served, Served]
) -> None:
    dead = served.serve("c", 3, pid=DEAD_PID)
    assert engines.hook_errors(look(served)).result is Result.OK
    dies(dead.table)
    seen = look(served)
    assert "c: its process has ended" in engines.health(seen).text
    counters = {**next(seen.reading.engines).counters, "hook_errors": 2}
    failed = with_engines(seen, a={"counters": counters})
    assert engines.hook_errors(failed) == (Result.PROBLEM, "a: 2")


def test_a_missing_coordinator_is_a_problem(served: ServedNode, two: tuple[Served, Served]) -> None:
    assert engines.coordinator(look(served)).result is Result.PROBLEM
    with coordinator_of(served, two[0].table, two[1].table):
        assert engines.coordinator(look(served)) == (Result.OK, "it answers")


def test_a_replica_that_lags_is_reported(served: ServedNode, two: tuple[Served, Served]) -> None:
    seen = look(served)
    late = PeerReading("b", Epoch(2), suspected=False, entries=1, lacking=7, lag_seconds=4.0)
    found = engines.replica_lag(with_engines(seen, a={"peers": (late,)}))
    assert found == (Result.WARNING, "a misses 7 blocks of b, the oldest for 4.0 s")
    assert engines.replica_lag(seen).result is Result.OK


def test_clocks_that_cannot_be_compared_are_reported(
    served: ServedNode, two: tuple[Served, Served]
) -> None:
    seen = look(served)
    good = "all times can be compared, also across time namespaces"
    assert engines.clocks(seen) == (Result.OK, good)
    why = "goes on is not known: no offset of a clock"
    unknown = engines.clocks(with_engines(seen, a={"clock_known": False}))
    assert unknown == (Result.WARNING, f"whether a {why}")
    (space,) = seen.reading.namespaces
    unshown = replace(seen.reading, namespaces=(replace(space, coordinator_ns=None),))
    found = engines.clocks(replace(seen, reading=unshown))
    coordinator = f"whether the coordinator of namespace {space.name} {why}"
    assert found == (Result.WARNING, coordinator)


def test_a_bundle_keeps_the_words_that_a_report_needs() -> None:
    redact = redactor({"USER": "vllm", "LOGNAME": "alice"})
    assert redact("vllm-7 of alice-x") == "vllm-7 of USER-x"


def test_a_bundle_for_which_the_disk_has_no_room_leaves_no_file(
    served: ServedNode, tmp_path: Path
) -> None:
    file, before = tmp_path / "b.tgz", resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
    try:
        with pytest.raises(ConfigError, match=f"{file} cannot be written: File too large"):
            write_bundle(file, look(served), [])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not file.exists()


def test_equal_pids_are_reported_and_other_namespaces_where_there_are_gpus(
    served: ServedNode, two: tuple[Served, Served]
) -> None:
    seen = with_engines(look(served), a={"pid_here": 11}, b={"pid_here": 12})
    assert engines.pid_namespaces(seen) == (Result.OK, "all engines are in this one")
    apart = with_engines(seen, b={"pid_here": 0})
    assert engines.pid_namespaces(replace(apart, gpus=None)).result is Result.OK
    on_gpus = engines.pid_namespaces(replace(apart, gpus="0, H100, Disabled, Default"))
    assert on_gpus == (Result.WARNING, "in another pid namespace: b")
    equal = with_engines(seen, b={"pid": 11})
    assert engines.pid_namespaces(replace(equal, gpus=None)) == (
        Result.WARNING,
        "a and b are both process 11 in their containers",
    )


@pytest.mark.parametrize(
    ("path", "speed", "result", "reported"),
    [
        (CopyPath.NVLINK, 80, Result.OK, "a from b by nvlink at 86 GB/s"),
        (CopyPath.NVLINK, 10, Result.WARNING, "a from b: nvlink at 11 GB/s, 10 times slower"),
        (CopyPath.STAGED, 10, Result.WARNING, "a from b: staged: through host memory"),
    ],
)
def test_a_slow_path_is_reported_with_both_engines(
    served: ServedNode,
    two: tuple[Served, Served],
    path: CopyPath,
    speed: float,
    result: Result,
    reported: str,
) -> None:
    seen = look(served)
    assert engines.copy_paths(seen).result is Result.NOT_APPLICABLE
    traffic = {"a": (copied(2, path, speed),), "b": (copied(1, CopyPath.NVLINK, 100),)}
    found = engines.copy_paths(
        with_engines(seen, **{n: {"traffic": t} for n, t in traffic.items()})
    )
    assert (found.result, reported in found.text) == (result, True), found.text
