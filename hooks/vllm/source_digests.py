"""Digests of functions and classes in Python source, equal for equal code.

Comments, docstrings, blank lines and the layout of the code do not count, and every Python from
3.11 on computes the same digests.  Pure: nothing here reads files or imports what it digests.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterable, Iterator
from functools import cached_property
from hashlib import sha256
from itertools import chain
from typing import NamedTuple

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)

_WITHOUT_MEANING = frozenset({"ctx", "kind", "type_comment"})
"""Fields of nodes: ``ctx`` follows from the place, ``kind`` is the u of u"text"."""
_BEGINS = r"[^\s#)\]}]"
"""What a line begins with that is no comment, and not the end of a head of several lines."""
_FUNCTION, _CLASS = re.compile(r"def[ \t]+(\w+)"), re.compile(r"class[ \t]+(\w+)")
"""Not one pattern for both, nor with the line's beginning: a search begins with a literal text,
which ``re`` looks for several times as fast."""
_CONTINUED = re.compile(r"\\\r?\n")
_CUT_TRIES = 8
"""How many places may look like the end of a definition before all of the file is parsed."""


def bytes_digest(content: bytes) -> str:
    """Return the digest of source as it stands, comments included."""
    return sha256(content).hexdigest()[:16]


class Source:
    """The text of a module.  Names of what it defines are dotted: ``Class.method``."""

    def __init__(self, text: str) -> None:
        self._text = text

    def digests(self, names: Iterable[str]) -> dict[str, str | None]:
        """Return the digest of each definition, parsing all of the text; None if there is none.

        A name that is defined several times, for instance in both branches of an ``if``, has one
        digest of all its definitions.  Raises SyntaxError, and for a NUL byte ValueError up to
        Python 3.11.3.
        """
        tree = ast.parse(self._text)
        return {name: _digest(found) if (found := _find(tree, name)) else None for name in names}

    def is_absent(self, name: str) -> bool:
        """Return whether no line begins a definition of this name; parses nothing.  False also
        where it cannot be told from a definition of the same name elsewhere."""
        *outer, last = name.split(".")
        if any(part not in self._heads for part in (*outer, last)):
            return True
        if len(outer) != 1 or (span := self._span(outer[0])) is None:
            return False
        begin, end = span
        if any(begin < place.start < end for place in self._heads[last]):
            return False
        return _is_closed(self._text[begin : end + 1])

    def lines_digest(self, name: str) -> str | None:
        """Return the digest of a definition's lines as they stand, parsing nothing; None if they
        cannot be told.

        Lines that look like the end of the definition may stand in a string of it: whoever records
        this digest uses ``whole_lines_digest``.
        """
        return None if (lines := self._lines(name)) is None else bytes_digest(lines.encode())

    def whole_lines_digest(self, name: str) -> str | None:
        """Return ``lines_digest``, or None unless these lines are the whole definition, so that
        whatever other source has the same lines has the same definition."""
        if (lines := self._lines(name)) is None or (place := self._place(name)) is None:
            return None
        node = _parse_one(lines, place.indent)
        whole = node is not None and _digest([node]) == self.digests([name])[name]
        return bytes_digest(lines.encode()) if whole else None

    def cut_digest(self, name: str) -> str | None:
        """Return the digest of ``digests``, parsing only the lines of the definition; None if these
        cannot be told for sure.

        May be wrong only where text inside a string looks like the definition: whoever gets a
        digest that is not the expected one asks ``digests``.
        """
        if (place := self._place(name)) is None:
            return None
        for stop in self._stops(place):
            if (node := _parse_one(self._text[place.start : stop], place.indent)) is not None:
                return _digest([node]) if node.name == name.rpartition(".")[2] else None
        return None

    def definition(self, name: str) -> str:
        """Return the lines of a definition as they stand, empty if there is none.  Raises
        SyntaxError."""
        lines, found = self._text.splitlines(keepends=True), _find(ast.parse(self._text), name)
        return "".join("".join(lines[_first_line(node) - 1 : node.end_lineno]) for node in found)

    def names(self) -> list[str]:
        """Return the names of all functions and classes, and of what classes hold, each once.
        Raises SyntaxError."""
        return list(dict.fromkeys(_names(ast.parse(self._text), "")))

    # -- finding lines without parsing

    @cached_property
    def _heads(self) -> dict[str, list[_Place]]:
        """Where lines begin definitions, by the defined name."""
        heads: dict[str, list[_Place]] = {}
        for found in chain(_FUNCTION.finditer(self._text), _CLASS.finditer(self._text)):
            start = self._text.rfind("\n", 0, found.start()) + 1
            before = self._text[start : found.start()]
            if before.strip(" \t") in ("", "async"):
                indent = before[: len(before) - len(before.lstrip(" \t"))]
                heads.setdefault(found[1], []).append(_Place(start, found.end(), indent))
        return heads

    def _place(self, name: str) -> _Place | None:
        *outer, last = name.split(".")
        heads = self._heads.get(last, [])
        if outer:
            if len(outer) > 1 or (span := self._span(outer[0])) is None:
                return None
            begin, end = span
            heads = [place for place in heads if begin < place.start < end]
        if len(heads) != 1 or bool(heads[0].indent) != bool(outer):
            return None
        return heads[0]._replace(start=self._first_decorator(heads[0]))

    def _span(self, of: str) -> tuple[int, int] | None:
        """Where the methods of a class lie, if it is defined once."""
        if len(classes := self._heads.get(of, [])) != 1:
            return None
        begin = classes[0].head
        # Not the end of the class, but no later method of it lies behind.
        following = self._text.find("\nclass ", begin)
        return begin, len(self._text) if following == -1 else following

    def _first_decorator(self, head: _Place) -> int:
        line, start = _code_within(head.indent), head.start
        while start:
            above = self._text.rfind(f"\n{head.indent}@", 0, start)
            if above == -1 and not self._text.startswith(f"{head.indent}@"):
                break
            behind = line.search(self._text, above + len(head.indent) + 2)
            if behind is None or behind.start() + 1 != start:  # it decorates something else
                break
            start = above + 1
        return start

    def _lines(self, name: str) -> str | None:
        if (place := self._place(name)) is None:
            return None
        return self._text[place.start : next(self._stops(place))]

    def _stops(self, place: _Place) -> Iterator[int]:
        """Yield where the definition may end, the likeliest first: before a line that stands no
        deeper than its own."""
        line = _code_within(place.indent)
        tries, end = 0, place.head
        while tries < _CUT_TRIES and (found := line.search(self._text, end)):
            end = found.start() + 1
            tries += 1
            yield end
        if tries < _CUT_TRIES:
            yield len(self._text)


def _is_closed(text: str) -> bool:
    """Whether text that begins in code ends in code, not in a string of several lines.  May be
    wrong only where another string, or a comment, has an odd number of the string's quotes."""
    return not (text.count('"""') % 2 or text.count("'''") % 2 or _CONTINUED.search(text))


def _code_within(indent: str) -> re.Pattern[str]:
    """Matches the beginning of a line of code that stands no deeper than ``indent``."""
    return re.compile(rf"\n[ \t]{{0,{len(indent)}}}{_BEGINS}")


class _Place(NamedTuple):
    """Where the lines of a definition begin."""

    start: int
    """Where the line of its name, or of its first decorator, begins."""
    head: int
    """Where its name ends."""
    indent: str


# -- finding


def _names(scope: ast.AST, prefix: str) -> Iterator[str]:
    for node in _definitions(scope):
        yield prefix + node.name
        if isinstance(node, ast.ClassDef):
            yield from _names(node, f"{prefix}{node.name}.")


def _first_line(node: Definition) -> int:
    return min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])


def _find(tree: ast.Module, name: str) -> list[Definition]:
    scopes: list[ast.AST] = [tree]
    found: list[Definition] = []
    for part in name.split("."):
        found = [node for scope in scopes for node in _definitions(scope) if node.name == part]
        scopes = [node for node in found if isinstance(node, ast.ClassDef)]
    return found


def _definitions(scope: ast.AST) -> Iterator[Definition]:
    """What a module or class defines, also below ``if``, ``try`` and ``with``; not what its
    functions define in turn."""
    for child in ast.iter_child_nodes(scope):
        if isinstance(child, _DEFINITIONS):
            yield child
        elif isinstance(child, ast.stmt | ast.excepthandler | ast.match_case):
            yield from _definitions(child)


def _parse_one(text: str, indent: str) -> Definition | None:
    try:
        # Not dedented: that would change strings of several lines.
        body = ast.parse(f"if 1:\n{text}" if indent else text).body
    except (SyntaxError, ValueError):  # not these lines alone; a NUL byte, to Python 3.11.3
        return None
    if indent and isinstance(body[0], ast.If):
        body = body[0].body
    node = body[0] if len(body) == 1 else None
    return node if isinstance(node, _DEFINITIONS) else None


# -- digesting


def _digest(nodes: Iterable[ast.AST]) -> str:
    parts: list[str] = []
    for node in nodes:
        _write(node, parts.append)
    return sha256("".join(parts).encode()).hexdigest()[:16]


def _write(node: ast.AST, put: Callable[[str], None]) -> None:
    """Write a node without what Python's versions have in different ways: ``ast.dump`` differs
    between them, and so does the set of fields, where new ones are empty in older code."""
    put(type(node).__name__)
    put("(")
    for name in node._fields:
        if name in _WITHOUT_MEANING:
            continue
        value = getattr(node, name, None)
        if type(node) is ast.JoinedStr:
            value = [part for part in node.values if not _is_empty_text(part)]
        if isinstance(value, ast.AST):
            put(name)
            _write(value, put)
        elif isinstance(value, list):
            if value:
                put(name)
                _write_list(value, put)
        elif value is not None or type(node) is ast.Constant:
            put(f"{name}={value!a},")
    put(")")


def _write_list(values: list[object], put: Callable[[str], None]) -> None:
    put("[")
    for value in values:
        if not isinstance(value, ast.AST):
            put(f"{value!a},")
        elif not _says_nothing(value):
            _write(value, put)
    put("]")


def _is_empty_text(part: ast.expr) -> bool:
    """What 3.12.1 puts behind the last field of a format."""
    return type(part) is ast.Constant and part.value == ""


def _says_nothing(node: ast.AST) -> bool:
    """``pass``, or a statement that is only a string: a docstring, or that of an attribute."""
    return type(node) is ast.Pass or (
        type(node) is ast.Expr
        and type(node.value) is ast.Constant
        and type(node.value.value) is str
    )
