"""Two engines on one node, each with a minor of vLLM of its own: 0.32 and 0.33.

Keys and the layout of blocks agree, the computing code does not (docs/decisions/0029): so neither
imports, both serve, and the log, `kvshm dump` and `kvshm status` name the versions.  The other
minor's environment is the folder OTHER_VLLM or, unless that is set, `.venv-0.33`.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest
from local_node import Engine, EngineSpec, wait_until
from sharing_node import observe

from kvshm._shm.layout import SlotState

from .engines import PATIENCE_S, SharedNode
from .oracle import prompts, shareable

vllm = pytest.importorskip("vllm")

ROOT = Path(__file__).parents[2]
OTHER = Path(os.environ.get("OTHER_VLLM", ROOT / ".venv-0.33")) / "bin/python"
VERSION = "import vllm; print(vllm.__version__)"

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.long,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not OTHER.exists(), reason=f"{OTHER} does not exist: make setup VLLM=0.33"),
]


@dataclass(frozen=True)
class OtherSpec(EngineSpec):
    """An engine of the other environment."""

    def command(self, port: int) -> list[str]:
        return [str(OTHER), *super().command(port)[1:]]


def versions() -> tuple[str, str]:
    """Return vLLM's version here, and in the other environment."""
    said = subprocess.run([OTHER, "-c", VERSION], capture_output=True, text=True, check=True)
    here, there = vllm.__version__, said.stdout.split()[-1]
    assert here.split(".")[:2] != there.split(".")[:2], f"{OTHER} has the same minor, {there}"
    return here, there


def keys(node: SharedNode, engine: Engine) -> set[bytes]:
    """The keys of all blocks that an engine shows."""
    with contextlib.closing(node.table(engine)) as table:
        return {bytes(slot.block_hash) for slot in table.slots() if slot.state is SlotState.READY}


def test_each_serves_and_both_say_that_the_versions_differ(model: Path) -> None:
    ours, theirs = versions()
    with SharedNode() as node:
        node.start_coordinator()
        here, there = node.start_engines(
            EngineSpec("here", model, core=0), OtherSpec("there", model, core=1)
        )
        for engine, own, other in ((here, ours, theirs), (there, theirs, ours)):
            line = f"cannot share with this one: engine is vllm {own} here, vllm {other} there"
            for _ in wait_until(f"{engine!r} names the versions", PATIENCE_S):
                if engine.said(line):
                    break
            assert "not sharing" not in engine.log()

        (prompt,) = prompts(1, seed=840)
        here.complete(prompt)
        for _ in wait_until("its blocks are shown", PATIENCE_S):
            if len(shown := keys(node, here)) >= shareable(prompt):
                break
        with observe(node, there) as seen:
            assert len(there.complete(prompt).tokens) == 16
        assert seen.tokens.computed == len(prompt)
        assert (seen.lookups, seen.miss_fingerprint, seen.tokens.imported) == (1, 1, 0)
        # Keys do agree: it is the computing code alone that keeps the engines apart.
        for _ in wait_until("its blocks are shown, too", PATIENCE_S):
            if len(found := keys(node, there)) >= shareable(prompt):
                break
        assert found == shown

        for command in ("status", "doctor"):
            said = node.kvshm(command)
            reported = said.stdout + said.stderr
            assert f": engine is vllm {ours} here, vllm {theirs[:6]}" in reported, reported
