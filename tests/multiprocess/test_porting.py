"""docs/porting.md: its diffs lead from the engine alone to the one that shares, and the engine
works after each of them."""

from __future__ import annotations

import re
import textwrap
import time
import types
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import cycle
from typing import Any

import pytest
import torch

from kvshm import MisuseError

from ..unit.pages import ROOT
from .processes import PATIENCE_SECONDS, Node, wait_until

pytestmark = pytest.mark.multiprocess

GUIDE = (ROOT / "docs/porting.md").read_text("utf-8")
ALONE, TINY = ROOT / "examples/tiny_engine_alone.py", ROOT / "examples/tiny_engine.py"
PROMPTS = [
    b"A prompt of some blocks that is asked more than once" + end for end in (b"", b"!", b"")
]

RETRACT = "                self.node.retract(new)  # before anything is written to them"
WRITTEN = "keys = self.node.keys(tokens[:written])"
SMALL, LARGE = 14, 128
"""Blocks of caches: room for one conversation, and for all."""
CONVERSATIONS = [
    [b"%d: A beginning of some length " % (n // 2) + end, b"And a question?", b"Another one?"]
    for n, end in enumerate([b"in letters.", b"of words."] * 6)
]


def applied(source: str, diff: str) -> str:
    """Apply hunks without line numbers: what each replaces must be there exactly once."""
    for hunk in diff.split("@@\n")[1:]:
        lines = hunk.splitlines()
        old = "".join(f"{line[1:]}\n" for line in lines if not line.startswith("+"))
        new = "".join(f"{line[1:]}\n" for line in lines if not line.startswith("-"))
        assert source.count(old) == 1, f"not there exactly once:\n{old}"
        source = source.replace(old, new)
    return source


def steps() -> Iterator[tuple[str, str]]:
    source = ALONE.read_text("utf-8")
    yield "The engine alone", source
    for title, text in re.findall(r"^## (\d\. .*?)\n(.*?)(?=^## )", GUIDE, re.M | re.DOTALL):
        for diff in re.findall(r"^```diff\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
            source = applied(source, diff)
            yield title, source


def test_the_steps_end_with_the_example() -> None:
    assert [*steps()][-1][1] == TINY.read_text("utf-8")


def engine_of(source: str) -> Any:
    module = types.ModuleType("engine")
    exec(compile(source, "engine", "exec"), vars(module))
    return module.Engine


def found_wrong(node: Node, source: str, num_blocks: int) -> tuple[int, int]:
    """Have two engines answer conversations as the guide says.  Return how many answers differ from
    those of an engine without kvshm, and how many blocks were imported."""
    (recipe,) = re.findall(r"^```python\n(def wrong_answers.*?)^```", GUIDE, re.M | re.DOTALL)
    names: dict[str, Any] = {"cycle": cycle, "time": time, "BLOCK_SIZE": 16}
    exec(textwrap.dedent(recipe), names)
    node.coordinator()
    alone = engine_of(ALONE.read_text("utf-8"))(LARGE, 1)
    with ExitStack() as ending:
        engines = [engine_of(source)(num_blocks, 1) for _ in range(2)]
        for engine in engines:
            ending.callback(engine.close)
            assert engine.node.wait_joined(PATIENCE_SECONDS)
        for one in engines:
            wait_until(lambda one=one: one.node.stats()["peers"] == 1, "the engines to meet")
        wrong = names["wrong_answers"](engines, alone, CONVERSATIONS)
        return wrong, sum(engine.node.stats()["imported_blocks"] for engine in engines)


@pytest.fixture
def joinable(node: Node, monkeypatch: pytest.MonkeyPatch) -> Iterator[Node]:
    monkeypatch.setenv("KVSHM_RUN_DIR", str(node.run_dir))
    monkeypatch.setenv("KVSHM_NAMESPACE", node.namespace)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield node
    torch.set_num_threads(threads)


@pytest.mark.parametrize("num_blocks", [SMALL, pytest.param(LARGE, marks=pytest.mark.long)])
def test_the_same_answers_are_counted_as_none_wrong(joinable: Node, num_blocks: int) -> None:
    wrong, imported = found_wrong(joinable, TINY.read_text("utf-8"), num_blocks)
    assert wrong == 0 < imported


@pytest.mark.long
def test_the_recipe_finds_a_block_with_a_hole(
    joinable: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """KVSHM_VERIFY does not: nothing changes behind its checksum."""
    monkeypatch.setenv("KVSHM_VERIFY", "1")
    source = TINY.read_text("utf-8")
    assert WRITTEN in source
    hole = source.replace(WRITTEN, "keys = self.node.keys(tokens)")
    assert found_wrong(joinable, hole, LARGE)[0] > 0


def test_the_recipe_finds_a_forgotten_retract(joinable: Node) -> None:
    source = TINY.read_text("utf-8")
    assert RETRACT in source
    with pytest.raises(MisuseError, match="retract it"):
        found_wrong(joinable, source.replace(RETRACT, " " * 16 + "pass"), SMALL)


def test_the_engine_says_the_same_tokens_after_each_step(
    joinable: Node,
) -> None:
    said: dict[str, list[list[int]]] = {}
    with ExitStack() as ending:
        for title, source in steps():
            engine = engine_of(source)(num_blocks=9, seed=1)
            if (joined := getattr(engine, "node", None)) is not None:
                ending.callback(joined.close)
            said[title] = [engine.generate(prompt, 8)[1] for prompt in PROMPTS]
    assert len(said) == 8
    assert len({repr(tokens) for tokens in said.values()}) == 1
    assert len({repr(tokens) for tokens in said["The engine alone"]}) == 2
