"""``kvshm serve`` beside two real engines: one imports a prompt from the other, and the console
says so, without a word of the prompt."""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from local_node import Engine, wait_until
from sharing_node import BLOCK_SIZE

from kvshm._shm.layout import unpack_records

from ..multiprocess.consoles import Console
from ..multiprocess.processes import real_processes
from .conftest import Pair
from .engines import PATIENCE_S
from .oracle import random_prompt, shareable

pytestmark = [pytest.mark.vllm, pytest.mark.long, pytest.mark.timeout(900)]
PROMPT = random_prompt(990, 5 * BLOCK_SIZE + 30)
PARTS = ("local", "peer", "computed")


@pytest.fixture
def console(pair: Pair) -> Iterator[Console]:
    with real_processes() as processes:
        here: Any = SimpleNamespace(
            processes=processes, run_dir=pair.node.run_dir, namespace=pair.node.namespace
        )
        yield Console(here)


class Engines:
    """The names of both, and the blocks that one of them has."""

    def __init__(self, pair: Pair) -> None:
        self.pair = pair
        self.names = [self._name(engine) for engine in (pair.a, pair.b)]

    def _name(self, engine: Engine) -> str:
        with contextlib.closing(self.pair.node.table(engine)) as table:
            return str(table.engine)

    def blocks(self, engine: Engine) -> dict[bytes, int]:
        """The depth of each block, by its hash."""
        with contextlib.closing(self.pair.node.table(engine)) as table:
            return {record.block_hash: record.depth for record in unpack_records(table.scan())}


def copies(top: dict[str, Any], importer: str, exporter: str) -> int:
    """The bytes of all copies from one to the other."""
    pairs = [c for c in top["copies"] if (c["importer"], c["exporter"]) == (importer, exporter)]
    return sum(pair["total_bytes"] for pair in pairs)


def told_of(text: str, prompt: Sequence[int]) -> bool:
    """Whether three tokens of a prompt follow each other in a text, however they are written."""
    said = [int(number) for number in re.findall(r"\d+", text)]
    runs = set(zip(said, said[1:], said[2:], strict=False))
    return not runs.isdisjoint(zip(prompt, prompt[1:], prompt[2:], strict=False))


def test_an_import_is_seen_and_the_prompt_is_not(pair: Pair, console: Console) -> None:
    engines, answers = Engines(pair), []
    a, b = engines.names
    for _ in wait_until("the console has looked", PATIENCE_S):
        if console.ask("/readyz").status == 200:
            break
    assert console.ask("/healthz").body == b"ok\n"
    frames = console.events()
    first = dict(next(frames) for _ in range(2))
    assert {engine["engine"] for engine in first["top"]["engines"]} == {a, b}
    assert status_names(first["status"]) == {a, b}
    before, shown = pair.node.counted(pair.b)["bytes_copied"], engines.blocks(pair.a)
    with pair.node.sharing(pair.a, shareable(PROMPT)):
        pair.a.complete(PROMPT, max_tokens=1)
    hashes = in_order({h: d for h, d in engines.blocks(pair.a).items() if h not in shown})
    assert len(hashes) == shareable(PROMPT)
    with pair.node.sharing(pair.b, len(hashes)):
        pair.b.complete(PROMPT, max_tokens=1)
    copied = pair.node.counted(pair.b)["bytes_copied"] - before
    assert copied > 0

    tokens, seen = dict.fromkeys(PARTS, 0), 0
    for name, said in frames:
        answers.append(json.dumps(said))
        if name == "hour":
            tokens = {part: tokens[part] + sum(point[part] for point in said) for part in PARTS}
        if name == "top":
            seen = copies(said, b, a) - copies(first["top"], b, a)
        if seen and sum(tokens.values()) >= 2 * len(PROMPT):
            break
    frames.close()
    assert seen == copied
    held = len(hashes) * BLOCK_SIZE
    assert tokens == {"local": 0, "peer": held, "computed": 2 * len(PROMPT) - held}

    asked = {"model": str(pair.a.spec.model), "block_size": BLOCK_SIZE}
    body = json.dumps({**asked, "seq_hashes": [each.hex() for each in hashes]}).encode()
    found = console.ask("/prefix", body)
    assert {name: on["GPU"] for name, on in found.json["default"].items()} == {a: held, b: held}
    answers.append(found.body.decode())
    answers += [console.ask(path).body.decode() for path in ("/status", "/doctor", "/metrics", "/")]
    assert told_of(json.dumps(PROMPT), PROMPT)
    assert not any(told_of(answer, PROMPT) for answer in answers)
    assert status_of(pair) == console.ask("/status").json


def status_names(status: dict[str, Any]) -> set[str]:
    return {engine["engine"] for space in status["namespaces"] for engine in space["engines"]}


def in_order(blocks: dict[bytes, int]) -> list[bytes]:
    return sorted(blocks, key=lambda block: blocks[block])


def status_of(pair: Pair) -> Any:
    """What ``kvshm status`` says."""
    place = ("--run-dir", str(pair.node.run_dir), "--namespace", pair.node.namespace)
    command = [sys.executable, "-m", "kvshm.tools.cli", "status", "--json", *place]
    return json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
