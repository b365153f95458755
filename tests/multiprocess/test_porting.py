"""docs/porting.md: its diffs lead from the engine alone to the one that shares, and the engine
works after each of them."""

from __future__ import annotations

import re
import types
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from ..unit.pages import ROOT
from .processes import Node

pytestmark = pytest.mark.multiprocess

GUIDE = (ROOT / "docs/porting.md").read_text("utf-8")
ALONE, TINY = ROOT / "examples/tiny_engine_alone.py", ROOT / "examples/tiny_engine.py"
PROMPTS = [
    b"A prompt of some blocks that is asked more than once" + end for end in (b"", b"!", b"")
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
    """Yield the title of each step that has a diff, and the engine after it."""
    source = ALONE.read_text("utf-8")
    yield "The engine alone", source
    for title, text in re.findall(r"^## (\d\. .*?)\n(.*?)(?=^## )", GUIDE, re.M | re.DOTALL):
        for diff in re.findall(r"^```diff\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
            source = applied(source, diff)
            yield title, source


def test_the_steps_end_with_the_example() -> None:
    assert [*steps()][-1][1] == TINY.read_text("utf-8")


def test_the_guide_says_how_long_the_engine_is() -> None:
    assert f"{len(ALONE.read_text('utf-8').splitlines())} lines" in GUIDE


def test_the_engine_says_the_same_tokens_after_each_step(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVSHM_RUN_DIR", str(node.run_dir))
    monkeypatch.setenv("KVSHM_NAMESPACE", node.namespace)
    said: dict[str, list[list[int]]] = {}
    with ExitStack() as ending:
        for title, source in steps():
            module = types.ModuleType(title)
            exec(compile(source, title, "exec"), vars(module))
            engine = module.Engine(num_blocks=9, seed=1)
            if (joined := getattr(engine, "node", None)) is not None:
                ending.callback(joined.close)
            said[title] = [engine.generate(prompt, 8)[1] for prompt in PROMPTS]
    assert len(said) == 8
    assert len({repr(tokens) for tokens in said.values()}) == 1
    assert len({repr(tokens) for tokens in said["The engine alone"]}) == 2
