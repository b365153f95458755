"""Which classes of vLLM have another as a base: what can stand in the place of a class on which a
fact rests (docs/vllm-facts.toml)."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

Named = tuple[str, str]
"""File below vLLM's package, and the dotted name of a class or function in it."""

_CLASS = re.compile(r"^[ \t]*class[ \t]+\w+\s*\(([^)]*)\)", re.MULTILINE)
_RENAMED = re.compile(r"(\w+)\s+as\s+(\w+)")
_ANYWHERE = ""
"""Stands for the file of a base that is named by a way which is not followed: a package that hands
a name on, ``module.Class``.  It may be each class of that name."""


def read_all(package: Path) -> dict[str, str]:
    """Return the text of all Python files below vLLM's package that have classes with a base."""
    texts = {
        str(path.relative_to(package)): path.read_text("utf-8", errors="replace")
        for path in sorted(package.rglob("*.py"))
    }
    return {file: text for file, text in texts.items() if _CLASS.search(text)}


def subclasses(texts: Mapping[str, str], of: Iterable[Named]) -> dict[Named, set[Named]]:
    """Return the classes that name one of ``of``, or one that is found thus, as a base, by that
    base; nothing for a class that has none.

    ``texts``: vLLM's source by file.  One class too many is found rather than one too few: by its
    name alone where it is not clear which class of that name a base is.  Raises SyntaxError.
    """
    bases = {file: _names_of_bases(text) for file, text in texts.items()}
    parsed: dict[str, list[tuple[str, list[Named]]]] = {}
    found: dict[Named, set[Named]] = {}
    waiting = [*dict.fromkeys(of)]
    for base in waiting:  # grows
        alike = {base, (_ANYWHERE, base[1])}
        for file in (file for file in texts if base[1] in bases[file]):
            if file not in parsed:
                parsed[file] = [*_classes(file, texts)]
            for name, its_bases in parsed[file]:
                if (file, name) != base and not alike.isdisjoint(its_bases):
                    found.setdefault(base, set()).add((file, name))
        waiting += [sub for sub in found.get(base, ()) if sub not in waiting]
    return found


def _names_of_bases(text: str) -> set[str]:
    """The words where the classes of a file name their bases, and what these are called where they
    come from.  Takes no parsing: most files have no class that counts."""
    words = {word for bases in _CLASS.findall(text) for word in re.findall(r"\w+", bases)}
    return words | {old for old, new in _RENAMED.findall(text) if new in words}


def _classes(file: str, texts: Mapping[str, str]) -> Iterator[tuple[str, list[Named]]]:
    """All classes of a file, those in functions too, with their bases."""
    tree = ast.parse(texts[file])
    nodes = [*ast.walk(tree)]
    known = {node.name: (file, node.name) for node in nodes if isinstance(node, ast.ClassDef)}
    for node in nodes:
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                place = _place(_module(file, node), alias.name, texts)
                known.setdefault(alias.asname or alias.name, place)
    for node in nodes:
        if isinstance(node, ast.ClassDef):
            yield node.name, [_base(base, known) for base in node.bases]


def _base(base: ast.expr, known: Mapping[str, Named]) -> Named:
    if isinstance(base, ast.Subscript):  # Base[T]
        base = base.value
    if isinstance(base, ast.Name):
        return known.get(base.id, (_ANYWHERE, base.id))
    return _ANYWHERE, base.attr if isinstance(base, ast.Attribute) else ""


def _module(file: str, node: ast.ImportFrom) -> str:
    """The dotted name of the module from which something is imported."""
    if not node.level:
        return node.module or ""
    package = ["vllm", *file.split("/")[:-1]]
    return ".".join([*package[: len(package) + 1 - node.level], *filter(None, [node.module])])


def _place(module: str, name: str, texts: Mapping[str, str]) -> Named:
    """Where an imported class is defined."""
    top, *inner = module.split(".")
    if top != "vllm":
        return f"<{module}>", name
    file = "/".join(inner) + ".py"
    defined = re.search(rf"^[ \t]*class[ \t]+{name}\b", texts.get(file, ""), re.MULTILINE)
    return (file, name) if defined else (_ANYWHERE, name)
