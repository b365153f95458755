"""``kvshm doctor`` beside real processes: engines, environments, other users, small mounts."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from . import toys
from .processes import Managed, Node, wait_until
from .sandbox import fresh_tmpfs, skip_unless_permitted

pytestmark = pytest.mark.multiprocess

SLEEPS = "import signal; print('up', flush=True); signal.pause()"


def doctor(node: Node, within: tuple[str, ...] = ()) -> tuple[int, dict[str, list[dict[str, Any]]]]:
    """Its exit status, and its findings by check."""
    place = ("--run-dir", str(node.run_dir), "--namespace", node.namespace)
    command = [*within, sys.executable, "-m", "kvshm.tools.cli", "doctor", "--json", *place]
    done = subprocess.run(command, capture_output=True, text=True)
    found: dict[str, list[dict[str, Any]]] = {}
    for finding in json.loads(done.stdout):
        found.setdefault(finding["check"], []).append(finding)
    return done.returncode, found


@contextmanager
def of_vllm(node: Node, **environ: str) -> Iterator[Managed]:
    """A process that looks like one of vLLM, with these variables."""
    clean = {name: "" for name in os.environ if name.startswith("KVSHM_")}
    settings = {"KVSHM_ENABLE": "1", "KVSHM_RUN_DIR": str(node.run_dir), **environ}
    settings = {"KVSHM_NAMESPACE": node.namespace} | settings
    argv = (sys.executable, "-c", SLEEPS, "vllm.entrypoints.openai.api_server")
    process = node.processes.start("vllm", *argv, environ=clean | settings)
    process.wait_out(lambda line: line == "up")
    yield process
    process.kill()


def about(findings: list[dict[str, Any]], pid: int) -> list[tuple[str, str]]:
    """What is said of a process: result and text."""
    return [(f["result"], f["text"]) for f in findings if f"process {pid}" in f["text"]]


def test_a_node_in_order_has_no_problem_and_a_stopped_coordinator_is_one(node: Node) -> None:
    coordinator = node.coordinator()
    engines = [toys.start(node, seed) for seed in (1, 2)]
    for engine in engines:
        toys.result(engine)
    with of_vllm(node):
        status, found = doctor(node)
    problems = [f for each in found.values() for f in each if f["result"] == "problem"]
    assert (status, problems) == (0, [])
    assert {f["result"] for f in found["copy paths"]} == {"ok"}
    assert all(" by shm" in f["text"] for f in found["copy paths"])
    assert [f["result"] for f in found["engines"]] == ["ok", "ok"]
    coordinator.signal(signal.SIGSTOP)

    def told() -> bool:
        status, found = doctor(node)
        return status == 1 and "stalled" in found["coordinator"][0]["text"]

    wait_until(told, "nobody goes round")


@pytest.mark.parametrize(
    ("check", "environ", "result", "text"),
    [
        ("settings", {"KVSHM_ROLE": "reader"}, "problem", "is not both, producer or consumer"),
        ("settings", {"KVSHM_ROL": "both"}, "warning", "did you mean KVSHM_ROLE"),
        ("settings", {"VLLM_PLUGINS": "other"}, "warning", "leaves kvshm out"),
        ("elsewhere", {"KVSHM_RUN_DIR": "/run/other"}, "warning", "another run directory"),
        ("elsewhere", {"KVSHM_NAMESPACE": "other"}, "warning", "another namespace: other"),
        (
            "allocator",
            {"PYTORCH_CUDA_ALLOC_CONF": "a:1, expandable_segments:True"},
            "problem",
            "expandable segments",
        ),
        ("front end", {"VLLM_USE_RUST_FRONTEND": "1"}, "warning", "drops kvshm's metrics"),
    ],
)
def test_what_is_wrong_in_an_environment_is_named_with_its_process(
    node: Node, check: str, environ: dict[str, str], result: str, text: str
) -> None:
    with of_vllm(node, **environ) as process:
        _, found = doctor(node)
    ((said, told),) = about(found[check], process.pid)
    assert (said, text in told) == (result, True)


def test_engines_of_other_users_are_named(node: Node) -> None:
    if os.geteuid():
        pytest.skip("only root starts processes of other users")
    argv = ("setpriv", "--reuid=65534", "--clear-groups", sys.executable, "-c", SLEEPS, "vllm")
    process = node.processes.start("other", *argv)
    process.wait_out(lambda line: line == "up")
    _, found = doctor(node)
    ((said, told),) = [(f["result"], f["text"]) for f in found["users"]]
    assert (said, told.startswith("uid 65534 runs vLLM")) == ("warning", True)


def test_a_small_dev_shm_is_a_problem(node: Node) -> None:
    within = fresh_tmpfs(("/dev/shm", "8m"))
    skip_unless_permitted([within])
    status, found = doctor(node, within)
    ((said, told),) = [(f["result"], f["text"]) for f in found["shared memory"]]
    assert (status, said, told) == (1, "problem", "/dev/shm has 8 of 8 MiB free")
