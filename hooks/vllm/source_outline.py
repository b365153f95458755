"""The text of a module without the definitions that say nothing about some names.

Parsing all of vLLM's source takes too long for each start of an engine.  Pure: nothing is parsed.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

_SINGLE = r"""
    " (?!"") [^"\\\n]*+ (?: \\. [^"\\\n]*+ )*+ "
  | ' (?!'') [^'\\\n]*+ (?: \\. [^'\\\n]*+ )*+ '
"""
_TRIPLE = r'''
    """ [^"\\]*+ (?: (?: \\. | " (?!"") ) [^"\\]*+ )*+ """
  | \'\'\' [^'\\]*+ (?: (?: \\. | ' (?!'') ) [^'\\]*+ )*+ \'\'\'
'''
_TOKEN = re.compile(
    rf"""\# [^\n]* |{_TRIPLE}|{_SINGLE}| \\ \n | " | ' | \\""", re.DOTALL | re.VERBOSE
)
"""A comment, a string, a line that goes on; else a quote or backslash that begins none of them.
Each alternative begins with a letter, for speed."""
_BEGINS_NONE = frozenset("\"'\\")
_WHOLE_FIELDS = re.compile(
    r"""(?: [^{}] | \{\{ | \}\}
          | \{ (?: [^{}'"#] | '[^'{}#]*' | "[^"{}#]*" | \{ [^{}'"#]* \} )*+ \} )*+""",
    re.DOTALL | re.VERBOSE,
)
"""What is between the quotes of a format, if all its fields end there."""
_INDENTS_OTHERWISE = "\t\f\v\0\r"
"""A file with one of these is not cut: tabs and form feeds count in ways of their own."""
_HEAD = re.compile(r"\n( *)(?:async +)?(def|class) +([A-Za-z0-9_]+) *[\[(:]")
"""``def`` and ``class`` begin a statement wherever they begin a line outside of strings."""
_IMPORT = re.compile(r"\n(?:import|from [.\w]+ import) [^\n(*;]*(?:\([^)*]*\))?(?=\n)")
"""An import of names at the margin."""
_BINDS_OUTSIDE = re.compile(r":=|global\b[^\n]*")
"""What binds a name of the module from within a definition."""
_NEAR = 200  # letters
_WORD = re.compile(r"\w+")
_LINE_END_INSIDE = "\0"
"""Stands for the end of a line within a string, or within a statement after a backslash."""
_DROPPED = "def _(): 0"
"""Stands for a definition that may be decorated, or all that a block has: decorators stay, and
apply to this."""


def outline(text: str, names: Iterable[str]) -> str | None:
    """Return a module's text without what says nothing about these dotted names: comments, blank
    lines, and all imports and definitions of other names that cannot bind these.  None if that is
    not certain.

    What is left may fail to parse, for instance where brackets go on further left than their
    statement: then only the whole text decides.
    """
    if (code := _code(text)) is None:
        return None
    wanted = _Wanted.of(names)
    code = _IMPORT.sub(lambda found: found[0] if wanted.is_any_in(found[0]) else "", code)
    kept = "".join(_kept(code, wanted))
    return kept.replace(_LINE_END_INSIDE, "\n").strip("\n") + "\n"


def _code(text: str) -> str | None:
    """The text without comments and blank lines, of which each line that begins within a string or
    after a backslash is joined to the one before; None if that is not certain."""
    if any(letter in text for letter in _INDENTS_OTHERWISE):
        return None
    pieces: list[str] = ["\n"]
    end = 0
    for found in _TOKEN.finditer(text):
        token, before = found[0], text[end : found.start()]
        end = found.end()
        # Not ASCII: Python reads some letters as others.
        if not before.isascii() or token in _BEGINS_NONE:
            return None
        if token[0] == "#":
            pieces.append(before.rstrip(" "))
            continue
        if "{" in token and not _ends_here(before, token):
            return None
        pieces += before, token.replace("\n", _LINE_END_INSIDE)
    pieces += text[end:], "\n"
    return re.sub("\n\n+", "\n", "".join(pieces)) if pieces[-2].isascii() else None


class _Wanted(NamedTuple):
    """What must be kept."""

    inside: frozenset[str]  # classes of which parts are wanted
    whole: frozenset[str]

    @classmethod
    def of(cls, names: Iterable[str]) -> _Wanted:
        paths = [name.split(".") for name in names]
        return cls(
            frozenset(part for path in paths for part in path[:-1]),
            frozenset(path[-1] for path in paths),
        )

    def is_any_in(self, text: str) -> bool:
        words = _WORD.findall(text)
        return not (self.inside.isdisjoint(words) and self.whole.isdisjoint(words))

    def may_be_bound(self, code: str, start: int, end: int) -> bool:
        """Whether a definition of something else may bind a wanted name."""
        for found in _BINDS_OUTSIDE.finditer(code, start, end):
            names = found[0]
            if names == ":=":
                # The word before; further away is none.
                before = code[max(start, found.start() - _NEAR) : found.start()]
                names = "".join(_WORD.findall(before)[-1:])
            if not names or self.is_any_in(names):
                return True
        return False


def _kept(code: str, wanted: _Wanted) -> Iterator[str]:
    """Yield the pieces that stay."""
    written = begin = end = 0
    while found := _HEAD.search(code, begin):
        last, begin = end, found.end()
        end = found.end(3)
        depth, kind, name = len(found[1]), found[2], found[3]
        if name in wanted.whole or (kind == "def" and name in wanted.inside):
            # Nothing within it is left out.  Not only up to its end, which is not known for sure.
            begin = _next_head(code, begin, depth)
        elif name not in wanted.inside:
            stop = _end(code, begin, depth)
            if wanted.may_be_bound(code, found.start(), stop):
                begin = _next_head(code, begin, depth)
                continue
            yield code[written : found.start()]
            if _needs_statement(code[last : found.start()], found[1]):
                yield f"\n{found[1]}{_DROPPED}"
            written = begin = end = stop
    yield code[written:]


def _needs_statement(before: str, indent: str) -> bool:
    """Whether a definition may need what stands before it, or be all that a block has."""
    return f"\n{indent}@" in before or before.rstrip(" ").endswith(":")


def _next_head(code: str, begin: int, depth: int) -> int:
    found = re.compile(rf"\n {{0,{depth}}}(?:async +)?(?:def|class) ").search(code, begin)
    return len(code) if found is None else found.start()


def _end(code: str, begin: int, depth: int) -> int:
    """Where a definition ends: before a line that stands no deeper, but for a bracket's end."""
    found = re.compile(rf"\n {{0,{depth}}}[^ \n)\]}}]").search(code, begin)
    return len(code) if found is None else found.start()


def _ends_here(before: str, token: str) -> bool:
    """Whether a string ends where it seems to: from Python 3.12 on fields of formats have
    quotes."""
    if not {*before[-2:].lower()} & {"f", "t"}:
        return True
    quotes = 3 if token.startswith(token[0] * 3) else 1
    return _WHOLE_FIELDS.fullmatch(token, quotes, len(token) - quotes) is not None
