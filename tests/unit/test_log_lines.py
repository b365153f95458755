"""Every line of engines and coordinator stands in a list, each list in docs/operations.md."""

from __future__ import annotations

import ast
import re
import runpy
from collections.abc import Iterator
from pathlib import Path

from kvshm._base.core_lines import CoreLine
from kvshm._base.log_lines import LogLine
from kvshm.coordinator.log_lines import Event
from kvshm.hooks.log_lines import HookLine
from kvshm.transport.log_lines import TransportLine

ROOT = Path(__file__).parents[2]
LISTS: tuple[type[LogLine], ...] = (CoreLine, HookLine, TransportLine, Event)
LEVELS = {"debug", "info", "warning", "error", "critical", "exception", "log"}
THE_LOG = {"log.py", "log_file.py", "log_output.py"}
"""Modules of kvshm/_base that the loggers are made of."""


def sources() -> Iterator[tuple[str, ast.Module]]:
    for folder in ("kvshm", "hooks", "transport", "coordinator"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            if not path.name.endswith("_lines.py"):
                yield path.relative_to(ROOT).as_posix(), ast.parse(path.read_text())


def calls(tree: ast.Module, names: set[str]) -> Iterator[ast.Call]:
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Attribute(value=ast.Name(id="log" | "_log"), attr=name)):
                if name in names:
                    yield node


def test_no_line_is_logged_by_a_text_of_its_own() -> None:
    literal = [
        f"{path}:{call.lineno}"
        for path, tree in sources()
        if Path(path).name not in THE_LOG
        for call in calls(tree, LEVELS)
    ]
    assert not literal, "list the line, and log it by Logger.line"


def test_lines_are_logged_at_all() -> None:
    assert sum(1 for _, tree in sources() for _ in calls(tree, {"line", "filled"})) > 60


def test_every_listed_line_is_used() -> None:
    used = {
        (node.value.id, node.attr)
        for _, tree in sources()
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
    }
    listed = {(lines.__name__, line.name) for lines in LISTS for line in lines}
    assert not listed - used


def test_no_two_lines_look_alike() -> None:
    listed = [(line.level, line.text) for lines in LISTS for line in lines]
    assert len(set(listed)) == len(listed)
    assert all(line.remedy for lines in LISTS for line in lines)
    assert all(len(lines.__members__) == len(lines) for lines in LISTS), "an alias"


def filled(tree: ast.Module) -> Iterator[tuple[ast.Attribute, list[ast.expr]]]:
    """Yield the listed lines that are logged or filled, with their arguments."""
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Attribute(attr="line"), args=[ast.Attribute() as line, *args]):
                yield line, args
            case ast.Call(func=ast.Attribute(value=ast.Attribute() as line, attr="fill")):
                yield line, node.args


def test_each_call_fills_the_places_of_its_line() -> None:
    """With another number the line would be lost when it is logged."""
    known = {(lines.__name__, line.name): line.text for lines in LISTS for line in lines}
    wrong, right = [], 0
    for path, tree in sources():
        for line, args in filled(tree):
            text = known.get((getattr(line.value, "id", ""), line.attr))
            if text is None or any(isinstance(arg, ast.Starred) for arg in args):
                continue
            right += 1
            if len(args) != len(re.findall(r"%[0-9.]*[a-z]", text)):
                wrong.append(f"{path}:{line.lineno}")
    assert not wrong
    assert right > 60


def test_the_page_has_all_lines() -> None:
    page = (ROOT / "docs/operations.md").read_text()
    assert runpy.run_path(str(ROOT / "docs/generate.py"))["operations"](page) == page, "make docs"
