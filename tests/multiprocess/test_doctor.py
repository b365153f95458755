"""``kvshm doctor`` on real nodes: a healthy one, and processes and mounts that are made wrong."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tarfile
from collections.abc import Sequence
from pathlib import Path

import pytest

from . import toys
from .processes import Managed, Node, wait_until
from .sandbox import fresh_tmpfs, skip_unless_permitted

pytestmark = pytest.mark.multiprocess

SLEEPS = "import sys, kvshm._native; print('open', flush=True); sys.stdin.read()"


def doctor(
    node: Node, *options: str, around: Sequence[str] = (), **environ: str
) -> subprocess.CompletedProcess[str]:
    place = ("--run-dir", str(node.run_dir), "--namespace", node.namespace)
    command = [*around, sys.executable, "-m", "kvshm.tools.cli", "doctor", *place, *options]
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ, **environ})


def results(node: Node, around: Sequence[str] = ()) -> dict[str, tuple[str, str]]:
    reported = json.loads(doctor(node, "--json", around=around).stdout)
    return {check["check"]: (check["result"], check["found"]) for check in reported["checks"]}


def process(node: Node, *arguments: str, **environ: str) -> Managed:
    place = {"KVSHM_RUN_DIR": str(node.run_dir), "KVSHM_NAMESPACE": node.namespace}
    started = node.processes.start(
        "sleeps",
        sys.executable,
        "-c",
        SLEEPS,
        *arguments,
        environ={"KVSHM_ENABLE": "1", **place, **environ},
    )
    started.wait_out(lambda line: line == "open")
    return started


def test_on_a_healthy_node_nothing_is_a_problem(node: Node) -> None:
    node.coordinator()
    started = [toys.start(node, seed, "--loads", "1", KVSHM_ENABLE="1") for seed in (1, 2)]
    for engine in started:
        toys.result(engine)
    done = doctor(node, "--json")
    reported = json.loads(done.stdout)
    wrong = [check for check in reported["checks"] if check["result"] == "problem"]
    assert (wrong, done.returncode, done.stderr) == ([], 0, "")
    found = {check["check"]: check["result"] for check in reported["checks"]}
    looked = ("coordinator", "engines", "copy paths", "settings", "hash seeds", "versions")
    assert {found[name] for name in looked} == {"ok"}
    started[0].signal(signal.SIGSTOP)
    wait_until(lambda: started[0].is_stopped, "it stops")
    result, reported = results(node)["engines"]
    assert (result, "it does not answer: stopped" in reported) == ("problem", True)
    started[0].kill()


NEWER = (
    "import sys; from kvshm._node import protocol; protocol.PROTOCOL_VERSION += 1; "
    "from kvshm.coordinator.__main__ import main; sys.exit(main(sys.argv[1:]))"
)


def test_a_coordinator_of_another_version_is_a_problem_that_is_named(node: Node) -> None:
    place = ("--run-dir", str(node.run_dir), "--namespace", node.namespace)
    newer = node.processes.start("coordinator", sys.executable, "-c", NEWER, *place)
    newer.wait_err("event=serving")
    engine = toys.start(node, 1, "--peers", "0", "--loads", "0", "--unshared")
    newer.wait_err("event=refused")
    wait_until(lambda: results(node)["versions"][0] == "problem", "the engine hears of it")
    reported = "refused: upgrade kvshm in the engine's environment to "
    assert f"toy-{engine.pid}: {reported}" in results(node)["versions"][1]
    assert f"it is not in the coordinator's roster: {reported}" in results(node)["engines"][1]


def test_what_engine_processes_were_started_with_is_judged(node: Node) -> None:
    node.run_dir.chmod(0o700)
    well = results(node)
    names = ("settings", "likely mistakes", "hash seeds", "allocator", "front end")
    assert {well[name][0] for name in names} == {"not applicable"}
    plain = process(node)
    assert {results(node)[name][0] for name in names} == {"ok"}
    wrong = process(
        node,
        KVSHM_ROL="consumer",
        KVSHM_ROLE="reader",
        PYTHONHASHSEED="7",
        PYTORCH_CUDA_ALLOC_CONF="expandable_segments:True",
        VLLM_USE_RUST_FRONTEND=" 02",  # vLLM takes it for 2
        PASSWORD="hunter2",
    )
    mistyped = process(node, KVSHM_ROL="consumer", VLLM_PLUGINS="other", PYTHONHASHSEED="7")
    elsewhere = process(node, KVSHM_RUN_DIR="/nowhere", PYTORCH_ALLOC_CONF="never")
    other = process(node, KVSHM_NAMESPACE="other")
    done = doctor(node)
    assert (done.returncode, "hunter2" in done.stdout) == (1, False)
    found = results(node)
    assert found["settings"][0] == "problem"
    assert "KVSHM_ROLE='reader' is not both, producer or consumer" in found["settings"][1]
    assert f"(process {wrong.pid})" in found["settings"][1]
    assert found["likely mistakes"][0] == "warning"
    assert "KVSHM_ROL is not a setting" in found["likely mistakes"][1]
    assert "VLLM_PLUGINS='other' leaves kvshm out" in found["likely mistakes"][1]
    seeds = found["hash seeds"][1]
    assert f"unset in {plain.pid}" in seeds
    assert f"7 in {wrong.pid}, {mistyped.pid}" in seeds
    assert found["hash seeds"][0] == "problem"
    assert found["allocator"][0] == "problem"
    assert f"(process {wrong.pid})" in found["allocator"][1]
    assert found["front end"][0] == "warning"
    assert found["engines elsewhere"][0] == "warning"
    assert (
        f"engine process {elsewhere.pid} uses run directory /nowhere"
        in (found["engines elsewhere"][1])
    )
    assert f"engine process {other.pid} uses namespace other" in found["engines elsewhere"][1]


def test_engines_are_found_however_they_are_enabled_and_others_are_not_taken_for_one(
    node: Node, tmp_path: Path
) -> None:
    enabling = tmp_path / "on.toml"
    enabling.write_text("enable = true\n")
    by_file = process(node, KVSHM_ENABLE="", KVSHM_CONFIG=str(enabling), PYTHONHASHSEED="1")
    connector = '{"kv_connector": "KvshmConnector"}'
    by_argument = process(node, connector, KVSHM_ENABLE="", PYTHONHASHSEED="2")
    process(node, KVSHM_ENABLE="0", KVSHM_CONFIG=str(enabling), PYTHONHASHSEED="3")
    process(node, KVSHM_ENABLE="", PYTHONHASHSEED="4")
    place = {"KVSHM_RUN_DIR": str(node.run_dir), "KVSHM_NAMESPACE": node.namespace}
    enabled = {"KVSHM_ENABLE": "1", "PYTHONHASHSEED": "5", **place}
    command = [sys.executable, "-P", "-m", "kvshm.coordinator"]
    coordinator = node.processes.start("coordinator", *command, environ=enabled)
    coordinator.wait_err("event=serving")
    around_it = ("sh", "-c", "echo open; read ended")
    shell = node.processes.start("a shell that starts vllm", *around_it, environ=enabled)
    shell.wait_out(lambda line: line == "open")
    found = results(node)
    pids = f"{by_file.pid}; 2 in {by_argument.pid}"
    assert found["hash seeds"] == ("problem", f"PYTHONHASHSEED differs: 1 in {pids}")


def test_a_small_dev_shm_is_a_problem(node: Node) -> None:
    small = fresh_tmpfs(("/dev/shm", "64m"))
    skip_unless_permitted([small])
    result, reported = results(node, small)["shared memory"]
    assert (result, reported) == (
        "problem",
        "64 MiB of /dev/shm are free; vLLM needs 160 for each engine to start",
    )


SECRETS = {
    "HOME": "/srv/homes/secretuser",
    "USER": "secretuser",
    "PASSWORD": "hunter2",
    "HF_TOKEN": "hf_hunter2",
    "KVSHM_PASSWORD": "hunter2",
    "KVSHM_LOG_FILE": "/srv/homes/secretuser/log",
    "VLLM_PLUGINS": f"{socket.gethostname()}_kv,secretuser_kv",
    "LOGNAME": "sécrétuser",
    "PYTORCH_ALLOC_CONF": "/ä/sécrétuser",
    "KVSHM_TRANSPORT": f"secretuser-{socket.gethostname()}-x",
}


def test_a_bundle_has_what_a_report_needs_and_no_secrets(node: Node, tmp_path: Path) -> None:
    node.coordinator()
    model = "/srv/homes/secretuser/model"
    toy = toys.start(node, 1, "--model", model, "--peers", "0", "--imported", "0", "--loads", "0")
    table = toys.table_of(node, toy)
    toys.result(toy)
    process(node, **SECRETS)
    file = tmp_path / "b.tar.gz"
    done = doctor(node, "--bundle", str(file), **SECRETS)
    assert (file.stat().st_mode & 0o777, "wrote" in done.stderr) == (0o600, True)
    with tarfile.open(file) as archive:
        texts = {e.name: archive.extractfile(e).read().decode() for e in archive.getmembers()}
        owners = {(e.uid, e.uname) for e in archive.getmembers()}
    names = ("doctor", "status", "dump", "versions", "settings", "engines", "machine")
    assert sorted(texts) == sorted(f"kvshm-doctor/{name}.json" for name in names)
    assert owners == {(0, "")}
    every = "\n".join(texts.values())
    for secret in (
        "hunter2",
        "secretuser",
        "sécrétuser",
        "cr\\u00e9tuser",
        "/srv/homes",
        socket.gethostname(),
        "toy_engine.py",
    ):
        assert secret not in every, secret
    hashes = [
        slot.block_hash.hex()
        for slot in map(table.slot, range(table.num_blocks))
        if any(slot.block_hash)
    ]
    assert hashes
    assert not [h for h in hashes if h[:16] in every]
    table.close()
    engine = json.loads(texts["kvshm-doctor/dump.json"])["namespaces"][0]["engines"][0]
    assert (engine["pid"], engine["num_blocks"]) == (toy.pid, 24)
    assert json.loads(texts["kvshm-doctor/settings.json"])["KVSHM_LOG_FILE"] == "~/log"
    again = doctor(node, "--bundle", str(file))
    assert (again.returncode, "File exists" in again.stderr) == (2, True)
