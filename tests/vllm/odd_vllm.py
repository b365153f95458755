"""vLLM as it might be elsewhere: older, newer, or changed."""

from __future__ import annotations

import ast
import os
import re
import shutil
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path

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


def installed() -> Path:
    """Return the folder of vLLM's package, which is not imported."""
    spec = find_spec("vllm")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent


def copy_of_vllm(directory: Path, files: Iterable[str]) -> Path:
    """Copy files of vLLM, enough for kvshm to examine them; return its package's file there."""
    for file in files:
        (directory / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(installed() / file, directory / file)
    return directory / "__init__.py"


def changed_copy(directory: Path) -> Path:
    """The same, of a vLLM in which a function that kvshm relies on does one thing more."""
    known = known_sources()["files"]
    package = copy_of_vllm(directory, [file for file in known if (installed() / file).exists()])
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


def with_another_method(text: str, of: str, name: str, first: bool) -> str:
    """The same code, and one method more of a class: before its first, or behind its last."""
    lines = text.splitlines()
    classes = (node for node in ast.parse(text).body if isinstance(node, ast.ClassDef))
    scope = next(node for node in classes if node.name == of)
    method = next(node for node in scope.body if isinstance(node, ast.FunctionDef))
    begin = min([method.lineno, *(one.lineno for one in method.decorator_list)]) - 1
    lines.insert(begin if first else scope.end_lineno or 0, f"    def {name}(self): return 1\n")
    return "\n".join(lines) + "\n"


def linked_vllm(directory: Path) -> Path:
    """Make a package of links to vLLM's files below a folder, of which a test may exchange some."""
    package = directory / "vllm"
    shutil.copytree(
        installed(),
        package,
        copy_function=os.symlink,
        ignore=shutil.ignore_patterns("__pycache__"),
    )
    return package


def rename(package: Path, old: str, new: str) -> None:
    """Give something another name everywhere in a package of links."""
    for path in package.rglob("*.py"):
        if path.is_symlink() and old in (text := path.read_text()):
            path.unlink()
            path.write_text(re.sub(rf"\b{old}\b", new, text))
