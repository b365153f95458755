"""Every command of kvshm that a page shows is run, on a node where one toy engine reads another.

What stands for something (``NAME``, ``PREFIX``) is filled in from that node; of a synopsis every
option is tried.  The blocks of docs/deployment.md run as a whole in test_deployment.py, in a
/dev/shm and an /etc of their own.  Others' programs: tests/unit/test_docs_programs.py.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ..unit.pages import PAGES, called
from . import toys
from .processes import Node, fresh_node, wait_until

pytestmark = pytest.mark.multiprocess

SCRIPTS = Path(sys.executable).parent
DUMPS = r"kvshm dump|python -m kvshm\.tools\.dump_index"


def shown(program: str) -> list[str]:
    written = [page for page in PAGES if page.name != "commands.md"]  # the others are generated
    return sorted({call for page in written for call in called(page, program)})


def tried(call: str) -> Iterator[str]:
    """Yield a call; of a synopsis each option by itself, in each way, and all together."""
    optional = re.findall(r"\[(.*?)\]", call)
    fixed = re.sub(r"\[.*?\]|\.\.\.", "", call).strip()
    if not optional:
        yield fixed
        return
    for option in optional:
        name, _, values = option.partition(" ")
        yield from (f"{fixed} {name} {value}".strip() for value in values.split("|"))
    yield " ".join([fixed, *(option.split("|")[0] for option in optional)]).strip()


@pytest.fixture(scope="module")
def node() -> Iterator[Node]:
    with fresh_node() as node:
        node.coordinator()
        toys.result(toys.start(node, 1, "--peers", "0", "--loads", "0"))
        importer = toys.start(node, 2, KVSHM_TEST_SYNC_POINT="LEASED:stop:3")
        wait_until(lambda: importer.is_stopped, "the importer to stop")
        yield node


@pytest.fixture(scope="module")
def meant(node: Node) -> dict[str, str]:
    tables = map(node.segments.table_from_coordinator, node.sockets())
    table, leased = next((t, slot) for t in tables for slot in t.slots() if slot.leases)
    return {
        "--namespace NAME": f"--namespace {node.namespace}",
        "NAME": table.engine,
        "PID": str(table.pid),
        "EPOCH": f"{table.epoch:016x}",
        "PREFIX": leased.block_hash.hex()[:8],
    }


def run(node: Node, *command: str) -> subprocess.CompletedProcess[str]:
    environ = {k: v for k, v in os.environ.items() if not k.startswith("KVSHM_")}
    environ |= {"KVSHM_RUN_DIR": str(node.run_dir), "KVSHM_NAMESPACE": node.namespace}
    return subprocess.run(
        [SCRIPTS / command[0], *command[1:]], env=environ, capture_output=True, text=True, cwd="/"
    )


@pytest.mark.parametrize("call", sorted({way for call in shown(DUMPS) for way in tried(call)}))
def test_the_dump_has_something_to_show(node: Node, meant: dict[str, str], call: str) -> None:
    for placeholder, value in meant.items():
        call = re.sub(rf"{placeholder}\b", value, call)
    if "--namespace" not in call:  # whoever else runs kvshm on this machine is left out
        call += f" --namespace {node.namespace}"
    done = run(node, "kvshm", "dump", *call.split())
    assert done.returncode == 0, done.stdout
    if "--check" in call:
        said = "sound: 1 index, 2 slots (of shared memory; this is no health check)\n"
        assert done.stdout == said
        (warning,) = done.stderr.splitlines()
        assert "it does not answer" in warning
        return
    assert done.stderr == ""
    if "--json" in call:
        (namespace,) = json.loads(done.stdout)["namespaces"]
        assert namespace["namespace"] == node.namespace
    else:
        assert done.stdout.startswith(f"namespace {node.namespace}\n")


def test_the_coordinator_is_started_as_shown_and_distinguished_from_a_second_one(
    node: Node,
) -> None:
    assert shown("kvshm-coordinator") == [""]
    second = run(node, "kvshm-coordinator")
    assert second.returncode == 3
    assert f"holds {node.run_dir / node.namespace}.lock" in second.stderr


def test_every_option_of_the_synopsis_is_tried() -> None:
    readme = {way for call in shown(DUMPS) for way in tried(call)}
    assert {"--engine EPOCH", "--engine PID", "--hash PREFIX", "--leased", "--json"} <= readme
    assert {"", "--check"} <= readme
