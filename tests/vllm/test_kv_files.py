"""Blocks of a real engine in a file: it ends, another process serves them, another engine imports
them, and answers as the engine that has ended did."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from local_node import Engine, EngineSpec, clean_environment, wait_until
from sharing_node import observe

from kvshm._shm.layout import RowState
from kvshm.tools.kv.block_file import BlockFile

from .conftest import Pair
from .engines import PATIENCE_S, SharedNode
from .oracle import prompts, random_prompt, shareable

pytestmark = [pytest.mark.vllm, pytest.mark.long, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def two(model: Path) -> Iterator[Pair]:
    with SharedNode() as node:
        node.start_coordinator()
        a, b = node.start_engines(
            EngineSpec("ends", model, core=0), EngineSpec("stays", model, core=1)
        )
        node.wait_joined(a, b)
        yield Pair(node, a, b)


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "kvshm.tools.cli", *arguments]


def kvshm(node: SharedNode, *arguments: str) -> subprocess.CompletedProcess[str]:
    environ = {**clean_environment(), **node.environment}
    return subprocess.run(command(*arguments), env=environ, capture_output=True, text=True)


def test_an_import_gives_the_answer_of_a_local_hit(two: Pair) -> None:
    node, a, b = two
    urls = [f"http://127.0.0.1:{engine.port}" for engine in (a, b)]
    text = " ".join(f"w{number % 97}" for number in random_prompt(900, 600))
    asked = ["--a", urls[0], "--b", urls[1], "--model", str(a.spec.model), "--prompt", text]
    done = kvshm(node, "verify-logits", *asked)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "the import gives the answer of a local hit" in done.stdout
    nothing = kvshm(node, "verify-logits", *asked[:-1], "short")
    assert nothing.returncode == 3, nothing.stdout + nothing.stderr


def test_a_file_outlives_its_engine(two: Pair, tmp_path: Path) -> None:
    """The last test of this pair: afterwards there is one engine."""
    node, a, b = two
    sent, path = list(prompts(3, seed=910)), tmp_path / "file"
    with node.sharing(a, sum(map(shareable, sent))):
        for prompt in sent:
            a.complete(prompt)
    hits = [a.complete(prompt) for prompt in sent]
    pid = str(table_pid(node, a))
    done = kvshm(node, "kv", "dump", str(path), "--engine", pid)
    assert done.returncode == 0, done.stderr
    again = kvshm(node, "kv", "dump", str(tmp_path / "again"), "--engine", pid)
    assert again.returncode == 0, again.stderr
    compared = kvshm(node, "kv", "compare", str(path), str(tmp_path / "again"))
    assert (compared.returncode, "as bfloat16" in compared.stdout) == (0, True), compared.stdout
    node.kill(a)
    node.stop_engines(a)

    with open(tmp_path / "log", "wb") as log:
        server = subprocess.Popen(
            command("kv", "serve", str(path)),
            env={**clean_environment(), **node.environment},
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    try:
        held = len(BlockFile(path).what.blocks)
        for _ in wait_until("the engine knows the blocks of the file", PATIENCE_S):
            if known(node, b) == held:
                break
        for prompt, hit in zip(sent, hits, strict=True):
            with observe(node, b) as seen:
                imported = b.complete(prompt)
            seen.assert_imported(shareable(prompt))
            assert imported == hit == b.complete(prompt)
    finally:
        server.terminate()
        assert server.wait(PATIENCE_S) == 0, (tmp_path / "log").read_text()


def table_pid(node: SharedNode, engine: Engine) -> int:
    with contextlib.closing(node.table(engine)) as table:
        return table.pid


def known(node: SharedNode, engine: Engine) -> int:
    """How many blocks the engine knows of engines that are alive."""
    with contextlib.closing(node.replica(engine)) as replica:
        return sum(row.entries for row in replica.rows() if row.state is RowState.LIVE)
