"""Digests of functions and classes in Python source, equal for equal code in every Python from 3.11
on: comments, docstrings, blank lines and layout do not count.  Pure."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable
from functools import cache
from hashlib import sha256

from .source_bindings import Scope

_WITHOUT_MEANING = frozenset({"ctx", "kind", "type_comment"})
"""Fields of nodes: ``ctx`` follows from the place, ``kind`` is the u of u"text"."""


def bytes_digest(content: bytes) -> str:
    """Return the digest of source as it stands, comments included."""
    return sha256(content).hexdigest()[:16]


def code_digests(content: bytes, names: Iterable[str]) -> dict[str, str | None]:
    """Return the digest of all that decides what each name stands for (source_bindings), None if
    nothing binds it.  Names are dotted: ``Class.method``.  Raises as ``Scope.of_module``."""
    scope = Scope.of_module(content)
    return {name: _digest(scope, name.split(".")) for name in names}


def _digest(scope: Scope, path: list[str]) -> str | None:
    parts: list[str] = []
    is_bound = _write_bindings(scope, path, parts.append)
    return sha256("".join(parts).encode()).hexdigest()[:16] if is_bound else None


def _write_bindings(scope: Scope, path: list[str], put: Callable[[str], None]) -> bool:
    """Write what concerns a name; return whether any of it binds the name."""
    is_bound = False
    for binding in scope.bindings(path):
        node = binding.node
        for kind, deciding in binding.under:
            put(f"{kind}:")
            for condition in deciding:
                _write(condition, put)
        if len(path) > 1 and isinstance(node, ast.ClassDef) and node.name == path[0]:
            _write_head(node, put)
            put("{")
            is_bound |= _write_bindings(scope.of_class(node), path[1:], put)
            put("}")
        else:
            _write(node, put)
            is_bound |= binding.binds(path)
    return is_bound


def _write_head(node: ast.ClassDef, put: Callable[[str], None]) -> None:
    """Write a class without what it has, but for its name."""
    for name in node._fields:
        if name not in {"name", "body"} and (value := getattr(node, name)):
            put(name)
            _write_list(value, put)


def _write(node: ast.AST, put: Callable[[str], None]) -> None:
    """Write a node as in all Pythons: ``ast.dump`` and the set of fields differ between them."""
    kind = type(node).__name__
    put(f"{kind}(")
    for name in _fields(kind):
        value = getattr(node, name, None)
        if isinstance(value, ast.AST):
            put(name)
            _write(value, put)
        elif isinstance(value, list):
            if kind == "JoinedStr":
                value = [part for part in value if not _is_empty_text(part)]
            if value:
                put(name)
                _write_list(value, put)
        elif value is not None or kind == "Constant":
            put(f"{name}={value!a},")
    put(")")


@cache
def _fields(kind: str) -> tuple[str, ...]:
    fields: tuple[str, ...] = getattr(ast, kind)._fields
    return (*(name for name in fields if name not in _WITHOUT_MEANING),)


def _write_list(values: list[object], put: Callable[[str], None]) -> None:
    put("[")
    for value in values:
        if not isinstance(value, ast.AST):
            put(f"{value!a},")
        elif not _says_nothing(value):
            _write(value, put)
    put("]")


def _is_empty_text(part: ast.expr) -> bool:
    """Whether this is what 3.12.1 puts behind the last field of a format."""
    return type(part) is ast.Constant and part.value == ""


def _says_nothing(node: ast.AST) -> bool:
    """``pass``, or a statement that is only a string: a docstring, or that of an attribute."""
    return type(node) is ast.Pass or (
        type(node) is ast.Expr
        and type(node.value) is ast.Constant
        and type(node.value.value) is str
    )
