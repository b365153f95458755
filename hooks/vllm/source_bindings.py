"""Which statements of a module decide what a name stands for.

A dotted name, ``Class.method``, stands for what its class has.  Statements count that bind the name
in its scope, each with the conditions under which it runs, and those that may change what is bound:
``Class.method = ...``, calls and decorators that are handed it (``patch(Class)``).  Of what
functions do when they are called, only ``global`` counts.  Pure.
"""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Iterable, Iterator
from typing import NamedTuple

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)

ANY = "*"
"""Stands for every name, or for every attribute of one: ``Class.*``."""
_OF_ALL_ATTRIBUTES = frozenset({"__dict__", "__class__", "__bases__"})
_BIND_ANY = frozenset({"globals", "locals", "vars", "exec"})
"""Functions by which any name may be bound."""
_BIND_ATTRIBUTES = frozenset({"setattr", "delattr"})

_GLOBAL = re.compile(rb"[\r\n;:][ \t\f]*global\b")

Condition = tuple[str, tuple[ast.AST, ...]]
"""A branch of a statement, and what decides whether it runs."""


class Binding(NamedTuple):
    """A statement, or a part of one, that binds or changes names."""

    names: frozenset[str]
    """``name.attribute`` for an attribute that it sets, ``name.*`` if it may set any; ``*``."""
    under: tuple[Condition, ...]  # the conditions under which it runs, the outermost first
    node: ast.AST

    def binds(self, path: list[str]) -> bool:
        """Whether it may bind the dotted name of these parts, and not only change what is bound."""
        if self.names & {".".join(path[:2]), ANY}:
            return True
        is_function = isinstance(self.node, ast.FunctionDef | ast.AsyncFunctionDef)
        return path[0] in self.names and not is_function  # of which there are no parts


class Scope:
    """What the statements of a module or class bind, in their order."""

    def __init__(self, bindings: Iterable[Binding]) -> None:
        self._all = [*bindings]
        self._inner: dict[ast.ClassDef, Scope] = {}
        self._by_root: dict[str, list[int]] = {}
        for number, binding in enumerate(self._all):
            for root in {name.partition(".")[0] for name in binding.names}:
                self._by_root.setdefault(root, []).append(number)

    @classmethod
    def of_module(cls, content: bytes) -> Scope:
        """Parse a module's file, in the encoding in which Python reads it.  Raises SyntaxError,
        RecursionError and MemoryError for what is nested too deeply, ValueError for a NUL byte up
        to Python 3.11.3."""
        with warnings.catch_warnings(action="ignore"):  # of vLLM's own escapes, for instance
            tree = ast.parse(content)
        # Looked for first: walking through all functions takes long.
        # Bytes with an encoding of their own may hide the word.
        may_declare = not content.isascii() or b"coding" in content or _GLOBAL.search(content)
        declared = _declared_global(tree) if may_declare else ()
        return cls([*_of_statements(tree.body, ()), *declared])

    def of_class(self, node: ast.ClassDef) -> Scope:
        """Return what a class of this scope binds."""
        if node not in self._inner:
            self._inner[node] = Scope(_of_statements(node.body, ()))
        return self._inner[node]

    def bindings(self, path: list[str]) -> Iterator[Binding]:
        """Yield what concerns the dotted name of these parts, also the definition of its class."""
        root = path[0]
        wanted = {root, ANY, f"{root}.{ANY}", ".".join(path[:2])}
        for number in sorted({*self._by_root.get(root, ()), *self._by_root.get(ANY, ())}):
            binding = self._all[number]
            if len(path) == 1 or binding.names & wanted:
                yield binding


def _declared_global(tree: ast.Module) -> Iterator[Binding]:
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            inside = ast.walk(function)
            names = {name for node in inside if isinstance(node, ast.Global) for name in node.names}
            if names:
                yield Binding(frozenset(names), (("when called", ()),), function)


# -- statements


def _of_statements(body: Iterable[ast.stmt], under: tuple[Condition, ...]) -> Iterator[Binding]:
    """What a scope's statements bind, also below ``if``, ``try`` and the like."""
    for node in body:
        if isinstance(node, DEFINITIONS):
            yield from _of_definition(node, under)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            yield from _of_import(node, under)
        elif branches := [*_branches(node)]:
            for (kind, deciding), statements in branches:
                for expression in deciding:
                    yield from _of_expression(expression, under)
                yield from _of_statements(statements, (*under, (kind, deciding)))
        else:
            yield from _of_expression(node, under)


def _of_definition(node: Definition, under: tuple[Condition, ...]) -> Iterator[Binding]:
    for decorator in node.decorator_list:
        yield from _of_expression(decorator, under)
        if root := _changed(decorator.func if isinstance(decorator, ast.Call) else decorator):
            yield Binding(frozenset({root}), under, decorator)  # @name.register
    yield Binding(frozenset({node.name}), under, node)
    head = [*node.bases, *node.keywords] if isinstance(node, ast.ClassDef) else [node.args]
    for part in head:
        for inner in ast.walk(part):
            if isinstance(inner, ast.NamedExpr):
                yield from _of_expression(inner.target, under)


def _of_import(
    node: ast.Import | ast.ImportFrom, under: tuple[Condition, ...]
) -> Iterator[Binding]:
    for alias in node.names:
        # By itself: what else it imports says nothing of this name.
        if isinstance(node, ast.ImportFrom):
            bound = alias.asname or alias.name
            alone: ast.stmt = ast.ImportFrom(node.module, [alias], node.level)
        else:
            bound = alias.asname or alias.name.partition(".")[0]
            alone = ast.Import([alias])
        yield Binding(frozenset({bound}), under, ast.copy_location(alone, node))


def _branches(node: ast.stmt) -> Iterator[tuple[Condition, list[ast.stmt]]]:
    """Yield what runs under a condition, nothing if it is no such statement."""
    kind = type(node).__name__
    if isinstance(node, ast.If | ast.While):
        yield (kind, (node.test,)), node.body
        yield (f"{kind} else", (node.test,)), node.orelse
    elif isinstance(node, ast.For | ast.AsyncFor):
        yield (kind, (node.target, node.iter)), node.body
        yield (f"{kind} else", (node.target, node.iter)), node.orelse
    elif isinstance(node, ast.With | ast.AsyncWith):
        yield (kind, (*node.items,)), node.body
    elif isinstance(node, ast.Match):
        for case in node.cases:
            guard = () if case.guard is None else (case.guard,)
            yield (kind, (node.subject, case.pattern, *guard)), case.body
    elif isinstance(node, ast.Try | ast.TryStar):
        caught = (*(handler.type for handler in node.handlers if handler.type is not None),)
        yield (kind, caught), node.body
        for handler in node.handlers:
            # The handler's own statements are not what decides.
            head = ast.copy_location(ast.ExceptHandler(handler.type, handler.name, []), handler)
            yield (f"{kind} except", (head,)), handler.body
        yield (f"{kind} else", caught), node.orelse
        yield (f"{kind} finally", ()), node.finalbody


# -- expressions


def _of_expression(node: ast.AST, under: tuple[Condition, ...]) -> Iterator[Binding]:
    if names := {name for inner in ast.walk(node) for name in _bound_by(inner)}:
        yield Binding(frozenset(names), under, node)


def _bound_by(node: ast.AST) -> Iterator[str]:
    """What one node binds or may change."""
    if isinstance(node, ast.Call):
        yield from _changed_by_call(node)
    elif isinstance(node, ast.Name | ast.Attribute | ast.Subscript):
        if not isinstance(node.ctx, ast.Load):
            yield from filter(None, [node.id if isinstance(node, ast.Name) else _changed(node)])
        if _changed(node) == "sys.modules":  # sys.modules[__name__]
            yield ANY
    elif isinstance(node, ast.ExceptHandler | ast.MatchAs | ast.MatchStar):
        yield from filter(None, [node.name])
    elif isinstance(node, ast.MatchMapping):
        yield from filter(None, [node.rest])


def _changed(node: ast.expr) -> str | None:
    """What an assignment to an attribute or an element changes: ``name.attribute``."""
    attribute: str | None = None
    while isinstance(node, ast.Attribute | ast.Subscript):
        is_one = isinstance(node, ast.Attribute) and node.attr not in _OF_ALL_ATTRIBUTES
        attribute = node.attr if isinstance(node, ast.Attribute) and is_one else ANY
        node = node.value
    return f"{node.id}.{attribute}" if isinstance(node, ast.Name) and attribute else None


def _changed_by_call(node: ast.Call) -> Iterator[str]:
    called = node.func.id if isinstance(node.func, ast.Name) else ""
    handed = [*node.args, *(keyword.value for keyword in node.keywords)]
    if called in _BIND_ANY:
        yield ANY
    elif called in _BIND_ATTRIBUTES and len(handed) > 1 and isinstance(handed[1], ast.Constant):
        changed = ast.Attribute(handed[0], str(handed[1].value), ast.Store())
        yield from filter(None, [_changed(changed)])
    else:
        for argument in handed:
            if isinstance(argument, ast.Starred):
                argument = argument.value
            if isinstance(argument, ast.Name):
                yield f"{argument.id}.{ANY}"
