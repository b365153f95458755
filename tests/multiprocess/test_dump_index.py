"""The index dump beside real processes: while they run, and after they were killed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

import kvshm
from kvshm.segment import list_segments

pytestmark = pytest.mark.multiprocess

PATIENCE = 200
FILE = Path(__file__).parents[2] / "tools" / "dump_index.py"
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(kvshm.__file__).parents[1])}

OWNER = """
import sys
from kvshm.records import BlockRecord, pack_records
from kvshm.segment import identity_of
from kvshm.slots import SlotTable, TableSpec

namespace, name, epoch, bit = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
spec = TableSpec(namespace, name, 64, 16, 1, bytes(32), "a-model")
table = SlotTable.create(spec, epoch, identity_of())
table.lease_bit = bit
table.set_life(0)
records = pack_records(BlockRecord(bytes([65 + i]) * 32, i, 0, i) for i in range(4))
parents = b"".join(bytes([64 + i]) * 8 for i in range(4))
print(table.name, len(table.publish(records, parents)) // 48, flush=True)
for line in sys.stdin:
    other = SlotTable.open(line.strip())
    print(other.lease(bit, records[:96])[0], flush=True)
"""


class Engine:
    """A process that owns a slot table of four blocks in a chain and leases others'."""

    def __init__(self, namespace: str, name: str, epoch: int, bit: int) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", OWNER, namespace, name, str(epoch), str(bit)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=ENVIRONMENT,
        )
        self.table, published = self._answer().split()
        assert published == "4"

    def _answer(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline()

    def lease(self, table: str) -> None:
        print(table, file=self.process.stdin, flush=True)
        assert self._answer() == "2\n"

    def kill(self) -> None:
        with self.process as process:
            process.kill()


@pytest.fixture
def namespace() -> Iterator[str]:
    made = uuid.uuid4().hex
    yield made
    for name in list_segments(made):
        os.unlink(f"/dev/shm/{name}")


@pytest.fixture
def engines(namespace: str) -> Iterator[tuple[Engine, Engine]]:
    started = Engine(namespace, "one", 0xAAAA, 0), Engine(namespace, "two", 0xBBBB, 5)
    started[1].lease(started[0].table)
    yield started
    for engine in started:
        engine.kill()


def dump(*arguments: str, how: tuple[str, ...] = ("-m", "kvshm.tools.dump_index")):
    return subprocess.run(
        [sys.executable, *how, *arguments],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        env=ENVIRONMENT,
        cwd="/",
    )


def read(namespace: str) -> dict[str, dict]:
    done = dump("--json", "--namespace", namespace)
    assert (done.returncode, done.stderr) == (0, "")
    spaces = json.loads(done.stdout)["namespaces"]
    return {engine["engine"]: engine for space in spaces for engine in space["engines"]}


def test_a_running_node_without_a_coordinator(namespace, engines):
    found = read(namespace)
    assert {name: engine["alive"] for name, engine in found.items()} == {"one": True, "two": True}
    assert found["one"]["pid"] == engines[0].process.pid
    leased = [(b["block_id"], b["references"]) for b in found["one"]["blocks"]]
    assert leased == [(0, 1), (1, 1)]
    holder = found["one"]["blocks"][0]["holders"][0]
    assert (holder["engine"], holder["pid"]) == ("two", engines[1].process.pid)
    assert [(c["tip"], c["length"]) for c in found["one"]["chains"]] == [(3, 4)]


def test_after_a_crash_the_dead_and_their_leases_are_still_there(namespace, engines):
    for engine in engines:
        engine.kill()
    found = read(namespace)
    assert {name: engine["alive"] for name, engine in found.items()} == {"one": False, "two": False}
    holders = found["one"]["blocks"][0]["holders"]
    assert [(h["engine"], h["alive"]) for h in holders] == [("two", False)]
    assert found["one"]["life"] == ["valid"]


def test_it_runs_as_a_file_too(namespace, engines):
    as_file = dump("--namespace", namespace, how=(str(FILE),))
    assert (as_file.returncode, as_file.stderr) == (0, "")
    assert as_file.stdout == dump("--namespace", namespace).stdout
    assert dump("--hash", "no", how=(str(FILE),)).returncode == 2


def test_it_needs_neither_torch_nor_vllm_nor_a_socket_library(namespace, engines):
    script = (
        "import sys, runpy; "
        "sys.modules.update(dict.fromkeys(['torch', 'vllm', 'zmq', 'numpy'])); "
        "sys.argv[0] = 'dump_index'; "
        "runpy.run_module('kvshm.tools.dump_index', run_name='__main__')"
    )
    assert dump("--namespace", namespace, how=("-c", script)).returncode == 0


def test_a_reader_that_stops_reading_is_no_error(namespace, engines):
    script = f"{sys.executable} -m kvshm.tools.dump_index --entries --namespace {namespace} | true"
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", script],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        env=ENVIRONMENT,
    )
    assert done.stderr == ""
