"""docs/operations.md lists every reason for which an engine does not share."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "operations.md").read_text()
LISTED = set(re.findall(r"`([^`\n]+)`", PAGE.replace("```", "")))
ENGINE = ("kvshm", "hooks", "transport")
REASONS = (
    "weights", "transformers/parts", "transformers/refusals",
    "vllm/plugin", "vllm/admission", "vllm/worker_side", "vllm/exports/pool_watch",
    *(f"vllm/identity/{n}" for n in ("refusals", "layout", "weights", "rank_weights")),
)  # fmt: skip
"""Modules of hooks/ that say why an engine does not share."""


def calls(folders: tuple[str, ...], names: set[str]) -> Iterator[ast.Call]:
    for path in sorted(p for folder in folders for p in (ROOT / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call):
                function = node.func
                name = getattr(function, "attr", getattr(function, "id", ""))
                if name in names:
                    yield node


def pattern(argument: ast.expr) -> str | None:
    """Return a line with … for what varies, None if all of it varies."""
    match argument:
        case ast.Constant(value=str(text)):
            text = re.sub(r"%[0-9.]*[a-z]", "…", text)
        case ast.JoinedStr(values=parts):
            text = "".join(p.value if isinstance(p, ast.Constant) else "…" for p in parts)
        case _:
            return None
    return None if text == "…" else text


def reasons() -> set[str]:
    """Why an engine does not share: what the hooks return, keep or raise as such."""
    found: set[str | None] = set()
    for name in REASONS:
        for node in ast.walk(ast.parse((ROOT / f"hooks/{name}.py").read_text())):
            match node:
                case ast.Return(value=ast.IfExp(body=one)) | ast.Return(value=ast.expr() as one):
                    found.add(pattern(one))
                case ast.Raise(exc=ast.Call(args=[one, *_])):
                    found.add(pattern(one))
                case ast.AnnAssign(target=ast.Name(id="_REASONS"), value=ast.Dict(keys=keys)):
                    found |= {pattern(key) for key in keys if key is not None}
                case ast.Call(func=ast.Name(id="Admission"), args=[one]):
                    found.add(pattern(one))
                case ast.Call(func=ast.Name(id="RankDescription"), args=[_, _, one]):
                    found.add(pattern(one))
    return {reason for reason in found if reason is not None and " " in reason}


@pytest.mark.parametrize("reason", sorted(reasons()))
def test_page_lists_reason_for_not_sharing(reason: str) -> None:
    assert any(listed.startswith(reason.split(".…")[0]) for listed in LISTED)


def test_reasons_are_found_in_the_source() -> None:
    assert len(reasons()) > 30
    assert "the model is a pooling model" in reasons()


def test_the_page_says_which_lines_name_an_engine_without_its_epoch() -> None:
    """Else a search for an epoch would miss lines that the reader believes found."""
    without = [call for call in calls(ENGINE, {"engine_name"}) if not call.args]
    assert all("epoch" not in {keyword.arg for keyword in call.keywords} for call in without)
    introduction = PAGE.partition("\n## Log lines of engines\n")[2].partition("\n### ")[0]
    assert len(re.findall(r"`engine … .*`", introduction)) == len(without) == 2
