"""vLLM as it might be elsewhere: older, newer, or changed."""

from __future__ import annotations

import ast
import os
import shutil
from collections.abc import Iterable
from pathlib import Path

import vllm

from kvshm.hooks.vllm.admission import known_sources, minors

_TESTED = minors(known_sources()["versions"])
_MAJOR, _MINOR = _TESTED[0]
TOO_OLD = (_MAJOR, _MINOR - 1, 2)
_MAJOR, _MINOR = _TESTED[-1]
UNTESTED = (_MAJOR, _MINOR + 1, 0)

VERSION = """
import sys, types
made = types.ModuleType("vllm._version")
made.__version__, made.__version_tuple__ = {version!r}, {numbers!r}
sys.modules[made.__name__] = made
"""
"""As sitecustomize.py: vLLM takes its version from the module that its build wrote."""


def dotted(version: tuple[int | str, ...]) -> str:
    """Return a version as it is written."""
    return ".".join(map(str, version))


def with_version(directory: Path, version: str) -> dict[str, str]:
    """Return the environment in which vLLM is of this version in all of its processes."""
    numbers = tuple(map(int, version.split(".")))
    text = VERSION.format(version=version, numbers=numbers)
    (directory / "sitecustomize.py").write_text(text)
    paths = [str(directory), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {"PYTHONPATH": os.pathsep.join(paths)}


FILE, NAME = "v1/core/block_pool.py", "BlockPool.touch"
"""A function on which a fact rests."""


def copy_of_vllm(directory: Path, files: Iterable[str]) -> Path:
    """Copy files of vLLM, enough for kvshm to examine them; return its package's file there."""
    for file in files:
        (directory / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(Path(vllm.__file__).parent / file, directory / file)
    return directory / "__init__.py"


def changed_copy(directory: Path) -> Path:
    """The same, of a vLLM in which a function that kvshm relies on does one thing more."""
    known = known_sources()["files"]
    root = Path(vllm.__file__).parent
    package = copy_of_vllm(directory, [file for file in known if (root / file).exists()])
    text = (directory / FILE).read_text()
    (directory / FILE).write_text(with_another_statement(text, NAME))
    return package


def with_another_statement(text: str, name: str) -> str:
    """The same code, and one statement more at the end of the definition of a name."""
    lines = text.splitlines()
    scope: ast.AST = ast.parse(text)
    for part in name.split("."):
        scope = next(node for node in ast.walk(scope) if getattr(node, "name", None) == part)
    assert isinstance(scope, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
    last = scope.body[-1]
    lines.insert(last.end_lineno or 0, " " * last.col_offset + "kvshm_test = 1")
    return "\n".join(lines) + "\n"
