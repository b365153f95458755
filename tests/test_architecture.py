"""The floors of the house, read from the source: who may import whom, and how big things get."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
COMPONENTS = {"coordinator", "transport", "hooks", "tools"}
PRODUCT = sorted(p for d in {"kvshm", *COMPONENTS} for p in (ROOT / d).rglob("*.py"))
FOLDERS = ("tests", "examples", "benchmarks", "docs")
OTHERS = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))
C_FILES = sorted(p for d in ("kvshm", "tests") for e in "ch" for p in (ROOT / d).rglob(f"*.{e}"))
VLLM, CUDA = "hooks/vllm", "transport/cuda"
FOR_TESTS = {"pytest", "hypothesis", "unittest", *FOLDERS, *(path.stem for path in OTHERS)}
NOWHERE: dict[str, set[str]] = {module: set() for module in FOR_TESTS}
MAY_IMPORT = NOWHERE | {"vllm": {VLLM}, "torch": {VLLM, CUDA}, "triton": {CUDA}}
"""Rooms: the folders of the product that may import it."""
FAKES = ("fake", "double", "mock")
"""In the name of a file or folder, they say that it is for tests."""
NAMELESS = {"utils", "util", "helpers", "common", "misc"}
"""Module names that name no concept."""


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """Yield (level, dotted name) of every import of a file; level counts leading dots."""
    yield from imports_of(ast.parse(path.read_text()))


def imports_of(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """``imports`` of a file that has been parsed.  ``import a.b`` yields ``a`` too: it binds it."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((0, alias.name) for alias in node.names)
            yield from ((0, a.name.split(".")[0]) for a in node.names if not a.asname)
        elif isinstance(node, ast.ImportFrom):
            yield from (
                (node.level, f"{node.module or ''}.{a.name}".strip(".")) for a in node.names
            )


def installed(path: Path) -> str:
    """The dotted name under which a module or a folder of the product is imported."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(("kvshm", *parts) if parts[0] in COMPONENTS else parts)


def full_imports(path: Path, tree: ast.AST) -> Iterator[str]:
    """Yield the dotted names of ``imports_of``, without leading dots."""
    package = installed(path.parent).split(".")
    for level, name in imports_of(tree):
        yield ".".join([*package[: len(package) + 1 - level], name]) if level else name


@pytest.mark.parametrize("path", PRODUCT, ids=name_of)
def test_no_module_is_imported_by_a_computed_name(path: Path) -> None:
    """The other tests would not see it.  Only transports are: by their entry points."""
    source = path.read_text()
    assert "__import__" not in source
    known = {"kvshm/interfaces.py": {"importlib.metadata.entry_points"}}.get(name_of(path), set())
    for _, name in imports(path):
        computed = name.split(".")[0] in {"importlib", "pkgutil", "runpy", "builtins"}
        assert not computed or name in known, f"imports {name}"


@pytest.mark.parametrize("path", PRODUCT, ids=name_of)
def test_components_meet_only_in_the_core(path: Path) -> None:
    """No component is imported by name, from another one or from the core, and no import
    climbs: so the names under which components are installed stand in pyproject.toml alone."""
    for level, name in imports(path):
        parts = name.split(".")
        assert level < len(path.relative_to(ROOT).parts), f"{'.' * level}{name} climbs out"
        spelled = parts[0] if level or parts[0] != "kvshm" else ".".join(parts[1:2])
        in_component = name_of(path).split("/")[0] in COMPONENTS
        if not (level and in_component):
            assert spelled not in COMPONENTS, f"imports component {name}"


@pytest.mark.parametrize("path", PRODUCT, ids=name_of)
def test_engines_devices_and_tests_stay_in_their_rooms(path: Path) -> None:
    """vLLM is imported by hooks/vllm only, torch also by the CUDA transport, triton by that; and
    what is there for tests by no module of the product."""
    room = name_of(path.parent)
    assert not [fake for fake in FAKES if fake in name_of(path)], "belongs to tests/"
    for level, name in imports(path):
        top = name.split(".")[0]
        assert level or room in MAY_IMPORT.get(top, {room}), f"may not import {top}"


@pytest.mark.parametrize("path", [*PRODUCT, *OTHERS], ids=name_of)
def test_nothing_grows_too_big(path: Path) -> None:
    """Files have at most 400 lines, functions 60, and every module is named after a thing."""
    source = path.read_text()
    assert path.stem not in NAMELESS
    assert len(source.splitlines()) <= 400
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert (node.end_lineno or 0) - node.lineno < 60, f"{node.name} is too long"


@pytest.mark.parametrize("path", C_FILES, ids=name_of)
def test_no_c_file_grows_too_big(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= 400


def test_only_the_glue_knows_python() -> None:
    """The files of the native core, which are all but py_*, include each other and the C library;
    layout.h, which is generated, includes nothing of ours."""
    core = {path.name: path.read_text() for path in C_FILES if path.parent.name == "native"}
    core = {name: source for name, source in core.items() if not name.startswith("py_")}
    assert {"core.c", "exporter.c", "importer.c", "lookup.c", "replica.c", "layout.h"} <= {*core}
    for name, source in core.items():
        ours = {*re.findall(r'^\s*#\s*include\s+"(.*)"', source, re.MULTILINE)}
        assert ours <= (set() if name == "layout.h" else {*core}), f"{name} includes {ours}"
        library = " ".join(re.findall(r"^\s*#\s*include\s+<(.*)>", source, re.MULTILINE))
        assert not re.search(r"\bpy", library, re.IGNORECASE), f"{name} includes {library}"


def parents(name: str) -> set[str]:
    """``a`` and ``a.b`` of ``a.b.c``."""
    parts = name.split(".")
    return {".".join(parts[:length]) for length in range(1, len(parts))}


@pytest.mark.parametrize("path", PRODUCT, ids=name_of)
def test_no_thread_waits_for_a_simple_queue_for_a_time(path: Path) -> None:
    """``SimpleQueue.get`` with a timeout waits for ever if the thread is held up inside the call
    for longer than the timeout (CPython 3.11, Modules/_queuemodule.c): ``queue.Queue`` does not."""
    nodes = list(ast.walk(ast.parse(path.read_text())))
    names = {ast.unparse(n) for n in nodes if isinstance(n, ast.Name | ast.Attribute)}
    if not names & {"SimpleQueue", "queue.SimpleQueue"}:
        return
    for call in [node for node in nodes if isinstance(node, ast.Call)]:
        timed = any(keyword.arg == "timeout" for keyword in call.keywords) or len(call.args) > 1
        assert not (timed and ast.unparse(call.func).endswith(".get")), f"line {call.lineno}"


def test_no_import_leads_back_to_where_it_came_from() -> None:
    """Not even one within a function; only what type checkers alone read may.  Packages count:
    an import runs the ``__init__`` of each that it enters.  None is imported itself, since its
    name gives access to all its modules."""
    modules = {installed(path).removesuffix(".__init__"): path for path in PRODUCT}
    packages = {name for name, path in modules.items() if path.stem == "__init__"}
    graph: dict[str, set[str]] = {"kvshm._native": set()}
    graph |= {module: set() for module in modules}
    for module, path in modules.items():
        tree = ast.parse(path.read_text())
        for checked in [n for n in ast.walk(tree) if isinstance(n, ast.If)]:
            if ast.unparse(checked.test) == "TYPE_CHECKING":
                checked.body = []
        for full in full_imports(path, tree):
            name = full if full in graph else full.rpartition(".")[0]
            assert name not in packages, f"{module} imports {full}, of a package"
            if name in graph:
                graph[module] |= {name} | (parents(name) & packages) - parents(module) - {module}
    assert graph["kvshm.hooks.vllm.connector"] >= {"kvshm.hooks.vllm.scheduler", "kvshm.config"}
    assert graph["kvshm.hooks.connector"] >= {"kvshm.hooks.vllm", "kvshm.hooks.vllm.connector"}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as exc:
        pytest.fail(" -> ".join(exc.args[1]))


def test_a_folder_of_the_core_imports_only_those_drawn_below_it() -> None:
    """The floors are the folders of kvshm/, in the order in which docs/architecture.md draws
    them; modules that lie in no folder are the ground, and stand on the C core only."""
    folders = {path.parent.name for path in PRODUCT if path.parent.parent == ROOT / "kvshm"}
    drawing = (ROOT / "docs/architecture.md").read_text().partition("\n kvshm/\n")[2]
    floors = re.findall(r"^   (\w+)/ ", drawing.partition("```")[0], re.MULTILINE)
    assert floors[-1] == "native"
    assert sorted(floors[:-1]) == sorted(folders)
    for path in PRODUCT:
        if not path.is_relative_to(ROOT / "kvshm"):
            continue
        floor = path.parent.name if path.parent.name in folders else "native"
        above = floors[: floors.index(floor)]
        for full in full_imports(path, ast.parse(path.read_text())):
            assert not {f"kvshm.{folder}" for folder in above} & {full, *parents(full)}, (
                f"{name_of(path)} imports {full}, of a floor above"
            )
