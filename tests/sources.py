"""The source files of this tree as tests read them: each is read and parsed once."""

from __future__ import annotations

import ast
import gc
from collections.abc import Iterable, Iterator
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
COMPONENTS = {"coordinator", "transport", "hooks", "tools"}
FOLDERS = ("tests", "examples", "benchmarks", "docs")


class Import(NamedTuple):
    line: int
    level: int
    name: str
    full: str
    """The dotted name, without leading dots."""
    runs: bool
    """False if only type checkers read it."""


class Source:
    def __init__(self, name: str, text: str) -> None:
        self.name = name
        self.text = text
        self.lines = text.splitlines()
        self.folder = PurePosixPath(name).parent.as_posix()

    @cached_property
    def tree(self) -> ast.Module:
        gc.disable()  # parsing leaves no garbage, and a collection looks at all nodes of all files
        try:
            return ast.parse(self.text)
        finally:
            gc.enable()

    @cached_property
    def nodes(self) -> list[ast.AST]:
        return list(ast.walk(self.tree))

    @cached_property
    def functions(self) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
        """Found among statements: most nodes are parts of expressions, and hold none."""
        found, coming = [], [*self.tree.body]
        while coming:
            statement = coming.pop()
            for field in ("body", "orelse", "finalbody", "handlers", "cases"):
                coming += getattr(statement, field, ())
            if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
                found.append(statement)
        return found

    @cached_property
    def imports(self) -> list[Import]:
        return list(self._imports())

    def _imports(self) -> Iterator[Import]:
        """``import a.b`` yields ``a`` too: it binds it."""
        package = installed(self.folder).split(".")
        only_checked = {
            node
            for branch in self.nodes
            if isinstance(branch, ast.If) and ast.unparse(branch.test) == "TYPE_CHECKING"
            for part in branch.body
            for node in ast.walk(part)
        }
        for node in self.nodes:
            if isinstance(node, ast.Import):
                names = {alias.name for alias in node.names}
                names |= {alias.name.split(".")[0] for alias in node.names if not alias.asname}
                level = 0
            elif isinstance(node, ast.ImportFrom):
                names = {f"{node.module or ''}.{alias.name}".strip(".") for alias in node.names}
                level = node.level
            else:
                continue
            for name in sorted(names):
                full = ".".join([*package[: len(package) + 1 - level], name]) if level else name
                yield Import(node.lineno, level, name, full, node not in only_checked)


def installed(name: str) -> str:
    parts = PurePosixPath(name).with_suffix("").parts
    return ".".join(("kvshm", *parts) if parts[0] in COMPONENTS else parts)


def parents(name: str) -> set[str]:
    """``a`` and ``a.b`` of ``a.b.c``."""
    parts = name.split(".")
    return {".".join(parts[:length]) for length in range(1, len(parts))}


def read(folders: Iterable[str], pattern: str) -> list[Source]:
    paths = sorted(path for folder in folders for path in (ROOT / folder).rglob(pattern))
    assert paths, f"{pattern} finds no file"
    return [Source(path.relative_to(ROOT).as_posix(), path.read_text()) for path in paths]


PRODUCT = read({"kvshm", *COMPONENTS}, "*.py")
OTHERS = read(FOLDERS, "*.py")
C_FILES = read({"kvshm", *COMPONENTS, "tests"}, "*.[ch]")
