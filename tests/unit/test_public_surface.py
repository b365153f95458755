"""What is public is listed: a change of a name, parameter, default, value or field shows here.

``public_surface.txt`` lists the surface of API_VERSION.  After a change on purpose raise
API_VERSION (kvshm/api.py: the minor version for what is new, the major one for what breaks callers)
and write the list again::

    .venv/bin/python -m tests.unit.test_public_surface
"""

from __future__ import annotations

import difflib
import enum
import inspect
import typing
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from kvshm import api

LIST = Path(__file__).with_name("public_surface.txt")
COMMAND = ".venv/bin/python -m tests.unit.test_public_surface"
INTERNAL = {
    "Found": {"node", "plan"},
    "Load": {"end", "load_id"},
    "Node": {"advance_loads", "begin", "cancel_load", "forget_in_child", "lengths_of"},
}
"""Names without an underscore that modules of kvshm use among themselves; nothing is promised."""
EVERYBODYS = {"add_note", "args", "with_traceback", "count", "index", "from_bytes", "to_bytes"}
"""What every exception, tuple or number has."""


def surface(*modules: ModuleType) -> list[str]:
    """One line for each public thing, in the order of their names."""
    major, minor = api.API_VERSION
    lines = [f"API_VERSION = ({major}, {minor})"]
    for module in modules:
        for name in sorted(module.__all__):
            if name not in ("API_VERSION", "__version__"):
                prefix = "" if module is api else module.__name__.rpartition(".")[2] + "."
                lines += [prefix + line for line in _about(name, getattr(module, name))]
    return lines


def _about(name: str, thing: Any) -> Iterator[str]:
    if not inspect.isclass(thing):
        yield f"{name}{inspect.signature(thing)}" if callable(thing) else f"{name} = {thing!r}"
        return
    bases = ", ".join(base.__name__ for base in thing.__bases__ if base is not object)
    yield f"class {name}({bases})"
    if issubclass(thing, enum.Enum):
        yield from (f"{name}.{one.name} = {one.value!r}" for one in thing)
        return
    if issubclass(thing, tuple):
        for field in thing._fields:
            yield f"{name}.{field}: {thing.__annotations__[field]}"
    elif not issubclass(thing, BaseException) and name not in INTERNAL:
        yield f"{name}{inspect.signature(thing)}"
    for member in sorted(_members(name, thing)):
        yield f"{name}.{_member(member, inspect.getattr_static(thing, member, None), thing)}"


def _members(name: str, thing: type) -> set[str]:
    """The public attributes that the class, or its constructor, defines."""
    own = {n for cls in thing.__mro__ if cls.__module__.startswith("kvshm") for n in vars(cls)}
    kept = {"__enter__", "__aenter__", "__await__", "__bool__", "__iter__", "__len__"}
    public = {n for n in own if not n.startswith("_") or n in kept}
    public |= {n for n in _set_by_constructor(thing) if not n.startswith("_")}
    return public - INTERNAL.get(name, set()) - set(getattr(thing, "_fields", ())) - EVERYBODYS


def _set_by_constructor(thing: type) -> set[str]:
    code = getattr(thing.__init__, "__code__", None)
    if code is None or code.co_filename.endswith(("dataclasses.py", "<string>")):
        return set()
    instructions = __import__("dis").get_instructions(code)
    return {str(i.argval) for i in instructions if i.opname == "STORE_ATTR"}


def _member(name: str, member: Any, thing: type) -> str:
    if isinstance(member, property):
        return f"{name} -> {inspect.signature(member.fget).return_annotation}"
    if isinstance(member, classmethod | staticmethod):
        return f"{name}{inspect.signature(member.__func__)} [{type(member).__name__}]"
    if inspect.isfunction(member):
        wait = "async " if inspect.iscoroutinefunction(member) else ""
        return f"{wait}{name}{inspect.signature(member)}"
    kind = typing.get_type_hints(thing).get(name) if inspect.isclass(thing) else None
    return f"{name}: {getattr(kind, '__name__', kind)}" if kind is not None else name


def public_modules() -> list[ModuleType]:
    """kvshm.api, and kvshm.halves if it is there."""
    modules = [api]
    if (Path(api.__file__).with_name("halves.py")).exists():
        from kvshm import halves

        modules.append(halves)
    return modules


def written() -> str:
    return "\n".join(surface(*public_modules())) + "\n"


def test_the_surface_is_as_listed() -> None:
    listed, found = LIST.read_text().splitlines(), written().splitlines()
    changes = [
        line
        for line in difflib.unified_diff(listed, found, "listed", "found", lineterm="", n=0)
        if not line.startswith(("---", "+++", "@@"))
    ]
    if not changes:
        return
    told = "\n".join(changes)
    if listed[0] == found[0]:
        pytest.fail(
            f"the public surface has changed:\n{told}\nIf that is meant, raise API_VERSION in "
            f"kvshm/api.py (minor: something new; major: callers break), then run\n    {COMMAND}"
        )
    pytest.fail(f"API_VERSION was raised for\n{told}\nNow run\n    {COMMAND}")
