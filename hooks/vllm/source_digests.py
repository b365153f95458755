"""Digests of functions and classes in Python source, equal for equal code in every Python from 3.11
on: comments, docstrings, blank lines and layout do not count.  Pure."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterable, Iterator
from functools import cache, cached_property
from hashlib import sha256

from .source_bindings import Scope
from .source_outline import outline

_WITHOUT_MEANING = frozenset({"ctx", "kind", "type_comment"})
"""Fields of nodes: ``ctx`` follows from the place, ``kind`` is the u of u"text"."""
_OTHER_ENCODING = re.compile(
    rb"(?:[ \t\f]*(?:#[^\n]*)?\n)?[ \t\f]*#[^\n]*?coding[:=][ \t]*+(?=[-\w.])(?!utf[-_]?8\b)",
    re.IGNORECASE,
)
"""A comment in the first two lines that declares another encoding than UTF-8."""


def bytes_digest(content: bytes) -> str:
    """Return the digest of source as it stands, comments included."""
    return sha256(content).hexdigest()[:16]


class Source:
    """The text of a module.  Names of what it defines are dotted: ``Class.method``."""

    def __init__(self, text: str) -> None:
        # As Python reads it.
        self._text = text.replace("\r\n", "\n").replace("\r", "\n") if "\r" in text else text
        self._last: tuple[tuple[str, ...], str | None] | None = None
        """The names of the last outline, and the outline."""

    @classmethod
    def decoded(cls, content: bytes) -> Source:
        """Return the source in a file.  Raises ValueError unless it is UTF-8."""
        if _OTHER_ENCODING.match(content):
            raise ValueError("it declares another encoding than UTF-8")
        return cls(content.decode("utf-8-sig"))

    def digests(self, names: Iterable[str]) -> dict[str, str | None]:
        """Return the digest of all that decides what each name stands for (source_bindings), None
        if nothing binds it.  Parses what concerns these names.  Raises as ``whole_digests``."""
        names = (*names,)
        if (text := self._outline(names)) is not None:
            try:
                return _digests(Scope.of_module(text), names)
            except (SyntaxError, ValueError):
                pass  # not to be parsed without the rest
        return self.whole_digests(names)

    def whole_digests(self, names: Iterable[str]) -> dict[str, str | None]:
        """Return the same, parsing all of the text.  Raises SyntaxError, RecursionError and
        MemoryError for what is nested too deeply, ValueError for a NUL byte up to Python 3.11.3."""
        return _digests(self._scope, names)

    def outline_digest(self, names: Iterable[str]) -> str | None:
        """Return a digest of the outline for these names, parsing nothing; None if there is none.
        Source with an equal one has equal ``digests``."""
        text = self._outline((*names,))
        return None if text is None else bytes_digest(text.encode())

    def definition(self, name: str) -> str:
        """Return the lines that ``digests`` covers, as they stand.  Raises SyntaxError."""
        lines = self._text.split("\n")
        return "".join(
            "".join(f"{line}\n" for line in lines[first - 1 : last])
            for first, last in _spans(self._scope, name.split("."))
        )

    def names(self) -> list[str]:
        """Return the names of all functions and classes, those in classes included, each once.
        Raises SyntaxError."""
        return list(dict.fromkeys(_names(self._scope, "")))

    def _outline(self, names: tuple[str, ...]) -> str | None:
        if self._last is None or self._last[0] != names:
            self._last = names, outline(self._text, names)
        return self._last[1]

    @cached_property
    def _scope(self) -> Scope:
        return Scope.of_module(self._text)


def _names(scope: Scope, prefix: str) -> Iterator[str]:
    for node in scope.definitions():
        yield prefix + node.name
        if isinstance(node, ast.ClassDef):
            yield from _names(scope.of_class(node), f"{prefix}{node.name}.")


def _spans(scope: Scope, path: list[str]) -> Iterator[tuple[int, int]]:
    """Yield the first and last lines of what concerns a name."""
    for binding in scope.bindings(path):
        node = binding.node
        heads = [node, *getattr(node, "decorator_list", ())]
        first = min(getattr(one, "lineno", 1) for one in heads)
        last = getattr(node, "end_lineno", None) or first
        if len(path) > 1 and isinstance(node, ast.ClassDef) and node.name == path[0]:
            yield first, max(first, min(one.lineno for one in node.body) - 1)
            yield from _spans(scope.of_class(node), path[1:])
        else:
            yield first, last


# -- digesting


def _digests(scope: Scope, names: Iterable[str]) -> dict[str, str | None]:
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
            for one in deciding:
                _write(one, put)
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
