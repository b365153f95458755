"""What is public is listed: a change of a name, parameter, default, value or field shows here.

``public_surface.txt`` lists the surface of API_VERSION.  After a change on purpose raise
API_VERSION (kvshm/api.py: the minor version for what is new, the major one for what breaks callers)
and write the list again::

    .venv/bin/python -m tests.unit.test_public_surface
"""

from __future__ import annotations

import difflib
import dis
import enum
import inspect
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, UnionType
from typing import Any, Protocol

import pytest

import kvshm
from kvshm import api, halves, interfaces
from kvshm.compat import kv_pipe, lookup_buffer, prefill, retrieval
from kvshm.coordinator import in_process

PUBLIC = (api, halves, interfaces, in_process, kv_pipe, lookup_buffer, prefill, retrieval)

LIST = Path(__file__).with_name("public_surface.txt")
COMMAND = ".venv/bin/python -m tests.unit.test_public_surface"
MADE_BY_KVSHM = {"Found", "Load", "Node", "LoadPlanner", "RankHalf", "CoordinatorThread"}
"""Callers do not construct them."""
NOT_NAMES = {"API_VERSION", "__version__"}
QUOTED = re.compile(r"ForwardRef\('([^']*)'\)|(?<=: )'([^']*)'(?=[,)= ])|(?<=-> )'([^']*)'")
PROTOCOLS = {"__enter__", "__exit__", "__await__", "__bool__", "__iter__", "__len__"}


def surface() -> list[str]:
    """One line for each public thing, in the order of their names."""
    lines = [f"API_VERSION = {api.API_VERSION}"]
    for module in PUBLIC:
        prefix = "" if module is api else module.__name__.rpartition(".")[2] + "."
        for name in sorted(names_of(module) - NOT_NAMES):
            lines += [prefix + line for line in about(name, getattr(module, name))]
    return [QUOTED.sub(lambda m: "".join(m.groups("")), line) for line in lines]


def names_of(module: ModuleType) -> set[str]:
    """``__all__``, or the names without underscore of what a module defines itself, and what it
    imports as the same name."""
    if named := (kvshm if module is api else module).__dict__.get("__all__"):
        return {*named}
    made_in = {
        name: getattr(thing, "__module__", module.__name__)
        for name, thing in vars(module).items()
        if name[0] != "_" and not inspect.ismodule(thing)
    }
    again = re.findall(r"import (\w+) as \1$", inspect.getsource(module), re.MULTILINE)
    return {*again, *(name for name, where in made_in.items() if where == module.__name__)}


def kind_of(thing: object) -> str:
    """The name of its class; Python 3.14 has one class for all unions, and calls it Union."""
    return "UnionType" if isinstance(thing, UnionType) else type(thing).__name__


def about(name: str, thing: Any) -> Iterator[str]:
    if inspect.isfunction(thing):
        yield f"{name}{inspect.signature(thing)}"
    elif not inspect.isclass(thing):
        plain = isinstance(thing, int | float | str | dict | tuple)
        yield f"{name}: {kind_of(thing)}" + (f" = {json.dumps(thing)}" if plain else "")
    elif issubclass(thing, enum.Enum):
        yield f"class {name}({thing.__base__.__name__})"
        yield from (f"{name}.{one.name} = {one.value!r}" for one in thing)
    elif issubclass(thing, BaseException):
        yield f"class {name}({', '.join(base.__name__ for base in thing.__mro__[1:-2])})"
    else:
        made = name in MADE_BY_KVSHM or Protocol in thing.__bases__
        yield f"class {name}" if made else f"class {name}{_constructor(thing)}"
        for member in sorted(members(thing)):
            yield f"{name}.{_member(member, inspect.getattr_static(thing, member, None))}"


def _constructor(thing: type) -> str:
    found = inspect.signature(thing)
    annotations = {n: a for cls in thing.__mro__ for n, a in inspect.get_annotations(cls).items()}
    parameters = [
        one.replace(annotation=annotations.get(name, one.annotation))
        for name, one in found.parameters.items()
    ]
    return str(found.replace(parameters=parameters, return_annotation=inspect.Signature.empty))


def members(thing: type) -> set[str]:
    """The public attributes that the class, or its constructor, defines."""
    own = [cls for cls in thing.__mro__ if cls.__module__.startswith("kvshm")]
    names = {name for cls in own for name in {*vars(cls), *inspect.get_annotations(cls)}}
    names = {name for name in names if name in PROTOCOLS or name[0] != "_"}
    for cls in own:
        if (code := getattr(vars(cls).get("__init__"), "__code__", None)) is not None:
            stored = {str(i.argval) for i in dis.get_instructions(code) if "STORE_ATTR" in i.opname}
            names |= {name for name in stored if name[0] != "_"}
    fields = {*getattr(thing, "_fields", ()), *getattr(thing, "__struct_fields__", ())}
    fields |= {*getattr(thing, "__dataclass_fields__", ())}
    names -= fields  # these are the constructor's
    names -= {"forget_in_child"}  # forks.py calls it
    documented = {name: getattr(thing, name, None).__doc__ or "" for name in names}
    return {name for name in names if not documented[name].startswith("Internal")}


def _member(name: str, member: Any) -> str:
    if isinstance(member, property):
        return f"{name} -> {inspect.signature(member.fget).return_annotation}"
    if isinstance(member, classmethod | staticmethod):
        return f"{name}{inspect.signature(member.__func__)}"
    if inspect.isfunction(member):
        wait = " [async]" if inspect.iscoroutinefunction(member) else ""
        return f"{name}{inspect.signature(member)}{wait}"
    return name


def written() -> str:
    return "\n".join(surface()) + "\n"


def test_the_surface_is_as_listed() -> None:
    listed, found = LIST.read_text().splitlines(), written().splitlines()
    changes = [
        line
        for line in difflib.unified_diff(listed, found, "listed", "found", lineterm="", n=0)
        if not line.startswith(("---", "+++", "@@"))
    ]
    if not changes:
        return
    reported = "\n".join(changes)
    if listed[0] == found[0]:
        pytest.fail(
            f"the public surface has changed:\n{reported}\nIf that is meant, raise API_VERSION in "
            f"kvshm/api.py (minor: something new; major: callers break), then run\n    {COMMAND}"
        )
    pytest.fail(f"API_VERSION was raised for\n{reported}\nNow run\n    {COMMAND}")


def test_the_package_has_the_names_of_the_api() -> None:
    assert kvshm.__all__ == sorted(kvshm.__all__, key=order)
    for name in kvshm.__all__:
        assert getattr(kvshm, name) is getattr(api, name)
    with pytest.raises(AttributeError, match="no attribute 'Segment'"):
        kvshm.Segment  # noqa: B018


def order(name: str) -> tuple[bool, bool, str]:
    """Constants, then classes, then functions: as ruff sorts them."""
    return not name.isupper(), name[0].islower() or name[0] == "_", name


def test_the_package_imports_its_names_when_they_are_used() -> None:
    program = """
import sys, kvshm
heavy = {"zmq", "msgspec", "kvshm.api", "kvshm.halves", "kvshm._native", "asyncio", "torch"}
assert not heavy & {*sys.modules}, heavy & {*sys.modules}
kvshm.__version__
assert "kvshm.api" not in sys.modules
kvshm.Config
assert "kvshm.api" in sys.modules
assert not {"torch", "vllm", "kvshm.halves"} & {*sys.modules}
"""
    subprocess.run([sys.executable, "-c", program], check=True)


DOCUMENTED = {
    f"{module.__name__}.{name}": thing
    for module in PUBLIC
    for name, thing in sorted(vars(module).items())
    if name in names_of(module) and (inspect.isfunction(thing) or inspect.isclass(thing))
}


def without_docstring(name: str, thing: Any) -> Iterator[str]:
    if not inspect.getdoc(thing):
        yield name
    if not inspect.isclass(thing) or issubclass(thing, enum.Enum):
        return
    for each in members(thing) - PROTOCOLS:
        member = inspect.getattr_static(thing, each, None)
        callable_ = isinstance(member, property | classmethod | staticmethod)
        if (callable_ or inspect.isfunction(member)) and not inspect.getdoc(member):
            yield f"{name}.{each}"


def test_everything_public_says_what_it_does() -> None:
    assert len(DOCUMENTED) > 50
    assert [each for n, thing in DOCUMENTED.items() for each in without_docstring(n, thing)] == []


if __name__ == "__main__":
    LIST.write_text(written())
