"""The floors of the house, read from the source: who may import whom, and how big things get."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
COMPONENTS = {"coordinator", "transport", "hooks", "tools"}
PRODUCT = sorted(p for d in {"kvshm", *COMPONENTS} for p in (ROOT / d).rglob("*.py"))
FOLDERS = ("tests", "examples", "benchmarks", "docs")
OTHERS = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))
IN_C = ("kvshm", *sorted(COMPONENTS), "tests")
C_FILES = sorted(p for d in IN_C for p in (ROOT / d).rglob("*.[ch]"))
NATIVE = ROOT / "kvshm" / "native"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
HOOKS, VLLM, TRANSFORMERS = "hooks", "hooks/vllm", "hooks/transformers"
IDENTITY, IMPORTS = "hooks/vllm/identity", "hooks/vllm/imports"
CUDA, KV = "transport/cuda", "tools/kv"
TOOLS, TOP, METRICS = "tools", "tools/top", "tools/metrics"
FOR_TESTS = {"pytest", "hypothesis", "unittest", *FOLDERS, *(path.stem for path in OTHERS)}
NOWHERE: dict[str, set[str]] = {module: set() for module in FOR_TESTS}
MAY_IMPORT = NOWHERE | {
    "vllm": {VLLM, IDENTITY, IMPORTS},
    "transformers": {TRANSFORMERS},
    "torch": {HOOKS, VLLM, IDENTITY, TRANSFORMERS, CUDA},
    "triton": {CUDA},
    "cuda": {CUDA},
    "numpy": {KV},
    "safetensors": {KV},
    "opentelemetry": {IMPORTS},
    "prometheus_client": {METRICS},
    "rich": {TOP},
    "shtab": {TOOLS},
}
"""Rooms: the folders of the product that may import it."""
REQUIRED = {re.split(r"\W", requirement)[0] for requirement in PROJECT["dependencies"]}
ALL_IMPORT = {"kvshm", *sys.stdlib_module_names, *({"pyzmq": "zmq"}.get(r, r) for r in REQUIRED)}
"""What each room may import, unless MAY_IMPORT names its rooms."""
FAKES = ("fake", "double", "mock", "stub", "dummy")
"""In the name of a file or folder, they say that it is for tests."""
NAMELESS = {"utils", "util", "helpers", "helper", "common", "misc"}
"""Words that name no concept: no module and no folder has them in its name."""
FINDS_MODULES = {"importlib", "pkgutil", "runpy", "builtins", "pydoc", "zipimport"}
COMPUTES = {
    "__import__", "__builtins__", "__loader__", "eval", "exec", "entry_points", "modules",
    "import_module", "import_from_path", "import_plugin", "resolve_obj_by_qualname", "LazyLoader",
}  # fmt: skip
"""Names by which a module is reached without an import: of Python, and of vLLM's import_utils."""
COMPUTES_BY_DESIGN = {
    "kvshm/interfaces.py": {"importlib.metadata.entry_points", "entry_points"},  # of transports
    "tools/doctor/bundle.py": {"importlib.metadata"},  # versions of installed packages
    "hooks/vllm/identity/fields.py": {"modules"},  # to read a model's source
    "hooks/vllm/shutdown.py": {"modules"},  # who has imported what is replaced
    "hooks/transformers/parts.py": {"modules"},  # to find functions that were replaced
}
C_LIBRARY = {"stdatomic.h", "stdbool.h", "stddef.h", "stdint.h", "string.h"}
"""What the native core needs of the C library."""


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
    """The other tests would not see it.  Only transports are: by their entry points.  A method
    may be called ``eval`` or ``modules``, as torch's are."""
    known = COMPUTES_BY_DESIGN.get(name_of(path), set())
    for level, name in imports(path):
        computed = not level and name.split(".")[0] in FINDS_MODULES
        computed |= name.rpartition(".")[2] in COMPUTES
        assert not computed or name in known, f"imports {name}"
    nodes = list(ast.walk(ast.parse(path.read_text())))
    methods = {
        n.func for n in nodes if isinstance(n, ast.Call) and isinstance(n.func, ast.Attribute)
    }
    names = {n.attr for n in nodes if isinstance(n, ast.Attribute) and n not in methods}
    names |= {n.attr for n in methods} - {"eval", "modules"}
    names |= {n.id for n in nodes if isinstance(n, ast.Name) and n.id != "modules"}
    assert not names & COMPUTES - known


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
    """An engine is imported by its own folder in hooks/ only, torch also by what these folders have
    in common and by the CUDA transport, triton by that; what is there for tests by no module of the
    product; and what pyproject.toml does not require by none either."""
    room = name_of(path.parent)
    assert not [fake for fake in FAKES if fake in name_of(path)], "belongs to tests/"
    for level, name in imports(path):
        top = name.split(".")[0]
        rooms = MAY_IMPORT.get(top, {room} if top in ALL_IMPORT else set())
        assert level or room in rooms, f"may not import {top}"


def test_only_its_entry_point_leads_to_the_cuda_transport() -> None:
    """So an engine that does not use CUDA does not import it."""
    package = installed(ROOT / CUDA)
    for path in PRODUCT:
        for full in full_imports(path, ast.parse(path.read_text())):
            inside = name_of(path.parent) == CUDA
            assert inside or package not in {full, *parents(full)}, f"{name_of(path)}: {full}"
    entries = PROJECT["entry-points"]["kvshm.transports"]
    assert [name for name, at in entries.items() if package in parents(at)] == ["cuda_ipc"]


@pytest.mark.parametrize("path", [*PRODUCT, *OTHERS, *C_FILES], ids=name_of)
def test_every_module_and_folder_is_named_after_a_thing(path: Path) -> None:
    assert not NAMELESS & {*re.split(r"[/_.]", name_of(path))}


@pytest.mark.parametrize("path", [*PRODUCT, *OTHERS], ids=name_of)
def test_nothing_grows_too_big(path: Path) -> None:
    """Files have at most 400 lines, functions 60."""
    source = path.read_text()
    assert len(source.splitlines()) <= 400
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert (node.end_lineno or 0) - node.lineno < 60, f"{node.name} is too long"


@pytest.mark.parametrize("path", C_FILES, ids=name_of)
def test_no_c_file_grows_too_big(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= 400


def test_only_the_glue_knows_python() -> None:
    """C is in kvshm/native only.  All files there but py_* are the core, which includes its own
    files and the C library and uses no name of Python's; layout.h, which is generated, includes
    nothing of ours."""
    product = [path for path in C_FILES if not path.is_relative_to(ROOT / "tests")]
    assert not [name_of(path) for path in product if not path.is_relative_to(NATIVE)]
    core = {path.relative_to(NATIVE).as_posix(): path.read_text() for path in product}
    core = {
        name: source for name, source in core.items() if "/" in name or not name.startswith("py_")
    }
    assert {"core.c", "exporter.c", "importer.c", "lookup.c", "replica.c", "layout.h"} <= {*core}
    for name, source in core.items():
        code = re.sub(r"/\*.*?\*/|//[^\n]*", "", source, flags=re.DOTALL)
        ours = set() if name == "layout.h" else {f'"{other}"' for other in core}
        included = {*re.findall(r"^\s*#\s*include\s*(.*?)\s*$", code, re.MULTILINE)}
        strange = included - ours - {f"<{header}>" for header in C_LIBRARY}
        assert not strange, f"{name} includes {strange}"
        assert not re.findall(r"\b_?Py\w*", code), f"{name} uses Python"


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


def test_hooks_meet_the_node_through_the_public_surface_only() -> None:
    """There is no second way in: what an engine needs of kvshm is offered to every engine.  Names,
    log lines and the like (the ground) are the house's own."""
    inside = {f"kvshm.{folder.name}" for folder in (ROOT / "kvshm").glob("_*/")} - {"kvshm._base"}
    assert "kvshm._engine" in inside
    for path in (ROOT / "hooks").rglob("*.py"):
        for full in full_imports(path, ast.parse(path.read_text())):
            assert not inside & {full, *parents(full)}, f"{name_of(path)} imports {full}"


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
    assert graph["kvshm.hooks.vllm.connector"] >= {
        "kvshm.hooks.vllm.scheduler_side",
        "kvshm.errors",
    }
    stands_in = "kvshm.hooks.vllm.plain_connector"
    assert graph["kvshm.hooks.connector"] >= {"kvshm.hooks.vllm", stands_in}
    assert graph[stands_in] >= {"kvshm.hooks.vllm.connector"}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as exc:
        pytest.fail(" -> ".join(exc.args[1]))


def test_a_folder_of_the_core_imports_only_those_drawn_below_it() -> None:
    """The floors are the folders of kvshm/, in the order in which docs/architecture.md draws
    them; modules that lie in no folder stand on the ground and the C core only, but for those
    drawn above all folders and the package itself, which only pass names on."""
    inner = [path for path in PRODUCT if path.is_relative_to(ROOT / "kvshm")]
    depth = len((ROOT / "kvshm").parts)
    folder_of = {path: path.parent.parts[depth] for path in inner if len(path.parent.parts) > depth}
    drawing = (ROOT / "docs/architecture.md").read_text().partition("\n kvshm/\n")[2]
    floors = re.findall(r"^   (\w+)/ ", drawing.partition("```")[0], re.MULTILINE)
    assert floors[-1] == "native"
    roof = re.findall(r"\w+", drawing.split("  the public surface")[0])
    assert "api" in roof
    assert sorted(floors[:-1]) == sorted({*folder_of.values()})
    for path in inner:
        if path.parent == ROOT / "kvshm" and path.stem in {*roof, "__init__"}:
            continue
        above = floors[: floors.index(folder_of.get(path, "_base"))]
        for full in full_imports(path, ast.parse(path.read_text())):
            assert not {f"kvshm.{folder}" for folder in above} & {full, *parents(full)}, (
                f"{name_of(path)} imports {full}, of a floor above"
            )
