"""No command prints the names of engines and files in a way that a terminal would obey."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

import kvshm
from kvshm import Config, Identity, Region
from kvshm.tools.cli import COMMANDS

from .processes import Node, fresh_node, wait_until

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(300)]

ODD = (
    "m\nnamespace x: healthy\x1b[2J\x1b]0;x\x07\x9b31m\u202e\u2028\x00\"'\\%s{}{0} 模" + "x" * 1000
)
NAMES = ("50% {0} %s", "a: weights is b", "a")
FILES = (
    b"\xff\x1b[2J\n.engine.0000000000000001.sock",
    b"\xff\x1b[2J.tables.sock",
    b"\xff\x1b[2J.lock",
    b"\xff\x1b[2J\n.declined.0000000000000001",
    b"\xff\x1b[2J\n.peers.0000000000000001",
)
ASKED: dict[str, Sequence[Sequence[str]]] = {
    "status": ((), ("--probe", "ready"), ("--engine", "\x1b[2J"), ("--json",)),
    "top": (("--once",), ("--once", "--json")),
    "dump": ((), ("--entries",), ("--check",), ("--json",)),
    "doctor": ((), ("--json",)),
    "holders": ((), ("--json",)),
    "metrics": ((), ("--json",)),
    "config": ((), ("--kv-transfer-config", '{"kv_connector_extra_config": {"\\u001b[2J": 1}}')),
    "drain": (("--here",), ("--here", "--json"), (NAMES[0], "--undo")),
    "clean": (("--dry-run",), ("--dry-run", "--json")),
    "kv": (
        ("dump", "FILE", "--engine", NAMES[0]),
        ("compare", "FILE", "FILE"),
        ("compare", "FILE", "\x1b"),
    ),
}
NO_NAMES = {"coordinator", "verify-logits", "completion", "up"}
UNTIL_ENDED = {"keeper", "events", "indexer", "serve"}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    with fresh_node() as node, contextlib.ExitStack() as stack:
        node.coordinator()
        config = Config(run_dir=str(node.run_dir), namespace=node.namespace)
        nodes = []
        for name in NAMES:
            memory = kvshm.allocate(4096, config)
            stack.callback(memory.close)
            identity = Identity(engine=ODD[:500], model=ODD, weights=name, settings={ODD[:99]: ODD})
            regions = [Region(0, 256, 256, 16)]
            nodes.append(
                kvshm.join(
                    identity, memory=memory, regions=regions, block_size=4, config=config, name=name
                )
            )
            stack.callback(nodes[-1].close)
        for one in nodes:
            assert one.wait_joined(60)
            keys = one.keys(range(8))
            one.publish(keys, [1, 2])
            one._open.table.log_error(ODD)
        wait_until(lambda: len(nodes[0]._open.table.errors()) >= 3, "it knows of the others")
        for name in FILES:
            Path(os.fsdecode(os.path.join(os.fsencode(node.run_dir), name))).touch(0o600)
        yield node


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kv") / "blocks\x1b[2J.safetensors"


def asked() -> Iterator[tuple[str, ...]]:
    for command, ways in ASKED.items():
        yield from ((command, *options) for options in ways)


def test_every_command_is_asked() -> None:
    assert ASKED.keys() == COMMANDS.keys() - NO_NAMES - UNTIL_ENDED


@pytest.mark.parametrize("words", [*asked()], ids=" ".join)
def test_what_it_prints_a_terminal_only_shows(
    place: Node, file: Path, words: tuple[str, ...]
) -> None:
    words = tuple(str(file) if word == "FILE" else word for word in words)
    placeless = words[0] == "config" or words[:2] == ("kv", "compare")
    where = () if placeless else ("--run-dir", str(place.run_dir))
    if words[0] in ("kv", "clean") and where:
        where += ("--namespace", place.namespace)
    command = [sys.executable, "-m", "kvshm.tools.cli", *words, *where]
    done = subprocess.run(command, capture_output=True, env={**os.environ, "COLUMNS": "4000"})
    for said in (done.stdout.decode(), done.stderr.decode()):
        assert "Traceback" not in said
        odd = [line for line in said.split("\n") if not line.isprintable()]
        assert not odd
    if "--json" in words:
        json.loads(done.stdout)


def test_a_keeper_prints_what_a_terminal_only_shows(place: Node) -> None:
    where = ("--run-dir", str(place.run_dir), "--namespace", place.namespace)
    command = (sys.executable, "-m", "kvshm.tools.cli", "keeper", "--memory", "1M", *where)
    keeper = place.processes.start("keeper", *command)
    said = keeper.wait_out(lambda line: line.startswith("keeping"))
    assert "fingerprint" in said
    assert said.isprintable()
    assert keeper.terminate() == 0
