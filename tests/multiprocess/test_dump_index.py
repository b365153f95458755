"""The index dump beside real processes, while they run and after they were killed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import kvshm

from .processes import Managed, Node

pytestmark = pytest.mark.multiprocess

PATIENCE = 200
FILE = Path(__file__).parents[2] / "tools" / "dump_index.py"
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(kvshm.__file__).parents[1])}

OWNER = """
import sys
from pathlib import Path
from kvshm._node.segment_server import SegmentClient, serve_epoch
from kvshm._replica.index import Replica
from kvshm._shm.layout import BlockRecord, pack_records
from kvshm._base.rundir import engine_socket
from kvshm._shm.own_slot_table import OwnSlotTable, RankSlotTable, TableSpec

run_dir, namespace, name, epoch, bit = Path(sys.argv[1]), *sys.argv[2:4], *map(int, sys.argv[4:])
table = OwnSlotTable.create(TableSpec(namespace, name, 64, 16, 1, bytes(32), "a-model"), epoch)
table.begin_pulse(None)
table.set_lease_bit(bit)
RankSlotTable.from_fd(table.name, table.descriptor(True)).set_life(0)
replica = Replica.create(namespace, name, epoch, 64)
server = serve_epoch(engine_socket(run_dir, namespace, epoch), table, replica)
records = pack_records(BlockRecord(bytes([65 + i]) * 32, i, 0, i) for i in range(4))
parents = b"".join(bytes([64 + i]) * 8 for i in range(4))
print(len(table.publish(records, parents)) // 48, flush=True)
for line in sys.stdin:
    other = SegmentClient(run_dir, namespace).peer_table(int(line))
    print(other.lease(bit, records[:96])[0], flush=True)
"""


def start(node: Node, name: str, epoch: int, bit: int) -> Managed:
    """A process that owns a slot table of four blocks in a chain and leases others'."""
    arguments = (str(node.run_dir), node.namespace, name, str(epoch), str(bit))
    engine = node.processes.start(name, sys.executable, "-c", OWNER, *arguments)
    engine.wait_out(lambda line: line == "4")
    return engine


@pytest.fixture
def engines(node: Node) -> list[Managed]:
    started = [start(node, "one", 0xAAAA, 0), start(node, "two", 0xBBBB, 5)]
    started[1].say(str(0xAAAA))
    started[1].wait_out(lambda line: line == "2")
    return started


def dump(*arguments: str, how: tuple[str, ...] = ("-m", "kvshm.tools.dump_index")):
    return subprocess.run(
        [sys.executable, *how, *arguments],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        env=ENVIRONMENT,
        cwd="/",
    )


def place(node: Node) -> tuple[str, ...]:
    return ("--run-dir", str(node.run_dir), "--namespace", node.namespace)


def read(node: Node) -> dict[str, dict]:
    done = dump("--json", *place(node))
    assert (done.returncode, done.stderr) == (0, "")
    (space,) = json.loads(done.stdout)["namespaces"]
    return space


def test_a_running_node_without_a_coordinator(node, engines):
    found = {engine["engine"]: engine for engine in read(node)["engines"]}
    assert {name: engine["alive"] for name, engine in found.items()} == {"one": True, "two": True}
    assert found["one"]["pid"] == engines[0].pid
    leased = [(b["block_id"], b["references"]) for b in found["one"]["blocks"]]
    assert leased == [(0, 1), (1, 1)]
    holder = found["one"]["blocks"][0]["holders"][0]
    assert (holder["engine"], holder["pid"]) == ("two", engines[1].pid)
    assert [(c["tip"], c["length"]) for c in found["one"]["chains"]] == [(3, 4)]


def test_of_a_crashed_node_who_lives_is_shown_and_who_is_dead_is_named(node, engines):
    engines[1].kill()
    space = read(node)
    assert [engine["engine"] for engine in space["engines"]] == ["one"]
    assert [(b["block_id"], b["references"]) for b in space["engines"][0]["blocks"]] == [
        (0, 1),
        (1, 1),
    ]
    assert [ended["epoch"] for ended in space["ended"]] == ["000000000000bbbb"]
    engines[0].kill()
    done = dump(*place(node))
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.splitlines() == [
        f"engine (epoch 000000000000{epoch}): its process has ended; run `kvshm clean` or start a "
        "coordinator"
        for epoch in ("aaaa", "bbbb")
    ] + ["nothing of kvshm found that is alive", f"no engine runs in {node.run_dir}"]


def test_it_runs_as_a_file_too(node, engines):
    as_file = dump(*place(node), how=(str(FILE),))
    assert (as_file.returncode, as_file.stderr) == (0, "")
    assert as_file.stdout == dump(*place(node)).stdout
    assert dump("--hash", "no", how=(str(FILE),)).returncode == 2


def test_it_needs_neither_torch_nor_vllm_nor_a_socket_library(node, engines):
    script = (
        "import sys, runpy; "
        "sys.modules.update(dict.fromkeys(['torch', 'vllm', 'zmq', 'numpy'])); "
        "sys.argv[0] = 'dump_index'; "
        "runpy.run_module('kvshm.tools.dump_index', run_name='__main__')"
    )
    assert dump(*place(node), how=("-c", script)).returncode == 0
