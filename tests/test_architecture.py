"""The floors of the house, read from the source: who may import whom, and how big things get.

A rule yields the offences of one file as ``line: what``; a test shows those of all files at once.
"""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Callable, Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import PurePosixPath

from .sources import (
    C_FILES,
    COMPONENTS,
    FOLDERS,
    OTHERS,
    PRODUCT,
    ROOT,
    Source,
    installed,
    parents,
)

NATIVE = "kvshm/native/"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
MAX_LINES, MAX_FUNCTION_LINES, MAX_ATTRIBUTES = 500, 60, 15
Rule = Callable[[Source], Iterator[str]]


def check(rule: Rule, sources: list[Source]) -> None:
    found = [f"{source.name}:{offence}" for source in sources for offence in rule(source)]
    assert not found, "\n" + "\n".join(found)


# -- imports

FINDS_MODULES = {"importlib", "pkgutil", "runpy", "builtins", "pydoc", "zipimport"}
COMPUTES = {
    "__import__", "__builtins__", "__loader__", "eval", "exec", "entry_points", "modules",
    "import_module", "import_from_path", "import_plugin", "resolve_obj_by_qualname", "LazyLoader",
}  # fmt: skip
"""Names by which a module is reached without an import: of Python, and of vLLM's import_utils."""
COMPUTES_BY_DESIGN = {
    "kvshm/interfaces.py": {"importlib.metadata.entry_points", "entry_points"},  # of transports
    "tools/doctor/bundle.py": {"importlib.metadata"},  # versions of installed packages
    "tools/up.py": {"importlib.metadata.PackageNotFoundError", "importlib.metadata.version"},
    "hooks/vllm/identity/fields.py": {"modules"},  # to read a model's source
    "hooks/vllm/shutdown.py": {"modules"},  # who has imported what is replaced
    "hooks/transformers/parts.py": {"modules"},  # to find functions that were replaced
}


def computed_imports(source: Source) -> Iterator[str]:
    """A method may be called ``eval`` or ``modules``, as torch's are."""
    known = COMPUTES_BY_DESIGN.get(source.name, set())
    for each in source.imports:
        computed = not each.level and each.name.split(".")[0] in FINDS_MODULES
        computed |= each.name.rpartition(".")[2] in COMPUTES
        if computed and each.name not in known:
            yield f"{each.line}: imports {each.name}"
    called = {node.func for node in source.nodes if isinstance(node, ast.Call)}
    for node in source.nodes:
        if isinstance(node, ast.Attribute):
            name, harmless = node.attr, {"eval", "modules"} if node in called else set()
        elif isinstance(node, ast.Name):
            name, harmless = node.id, {"modules"}
        else:
            continue
        if name in COMPUTES - known - harmless:
            yield f"{node.lineno}: {name}"


def test_no_module_is_imported_by_a_computed_name() -> None:
    """The other tests would not see it.  Only transports are: by their entry points."""
    check(computed_imports, PRODUCT)


def imports_of_components(source: Source) -> Iterator[str]:
    in_component = source.name.split("/")[0] in COMPONENTS
    for each in source.imports:
        parts = each.name.split(".")
        if each.level >= len(PurePosixPath(source.name).parts):
            yield f"{each.line}: {'.' * each.level}{each.name} climbs out"
        spelled = parts[0] if each.level or parts[0] != "kvshm" else ".".join(parts[1:2])
        if not (each.level and in_component) and spelled in COMPONENTS:
            yield f"{each.line}: imports component {each.name}"


def test_components_meet_only_in_the_core() -> None:
    """No component is imported by name, from another one or from the core, and no import
    climbs: so the names under which components are installed stand in pyproject.toml alone."""
    check(imports_of_components, PRODUCT)


HOOKS, VLLM, TRANSFORMERS = "hooks", "hooks/vllm", "hooks/transformers"
IDENTITY, IMPORTS = "hooks/vllm/identity", "hooks/vllm/imports"
CUDA, KV, KEEPER = "transport/cuda", "tools/kv", "tools/keeper"
TOOLS, TOP, METRICS, SERVE = "tools", "tools/top", "tools/metrics", "tools/serve"
FOR_TESTS = {
    "pytest", "hypothesis", "unittest", *FOLDERS,
    *(PurePosixPath(source.name).stem for source in OTHERS),
}  # fmt: skip
RUNS_WHAT_IT_READS = {"cloudpickle", "dill", "joblib", "marshal", "pickle", "shelve"}
PHONES = {"aiohttp", "httpx", "requests", "sentry_sdk", "smtplib", "urllib3"}
NOWHERE: dict[str, set[str]] = {module: set() for module in FOR_TESTS | RUNS_WHAT_IT_READS | PHONES}
MAY_IMPORT = NOWHERE | {
    "vllm": {VLLM, IDENTITY, IMPORTS},
    "transformers": {TRANSFORMERS},
    "blake3": {VLLM},
    "torch": {HOOKS, VLLM, IDENTITY, TRANSFORMERS, CUDA},
    "triton": {CUDA},
    "cuda": {CUDA},
    "mooncake": {KEEPER},
    "numpy": {KV},
    "safetensors": {KV},
    "opentelemetry": {IMPORTS},
    "prometheus_client": {METRICS},
    "rich": {TOP},
    "shtab": {TOOLS},
    "h11": {SERVE},
    "starlette": {SERVE},
    "uvicorn": {SERVE},
}
"""Rooms: the folders of the product that may import it."""
REQUIRED = {re.split(r"\W", requirement)[0] for requirement in PROJECT["dependencies"]}
ALL_IMPORT = {"kvshm", *sys.stdlib_module_names, *({"pyzmq": "zmq"}.get(r, r) for r in REQUIRED)}
"""What each room may import, unless MAY_IMPORT names its rooms."""
FAKES = ("fake", "double", "mock", "stub", "dummy")
"""In the name of a file or folder, they say that it is for tests."""


def imports_out_of_their_room(source: Source) -> Iterator[str]:
    if any(fake in source.name for fake in FAKES):
        yield "1: belongs to tests/"
    for each in source.imports:
        top = each.name.split(".")[0]
        rooms = MAY_IMPORT.get(top, {source.folder} if top in ALL_IMPORT else set())
        if not each.level and source.folder not in rooms:
            yield f"{each.line}: may not import {top}"


def test_engines_devices_and_tests_stay_in_their_rooms() -> None:
    """An engine is imported by its own folder in hooks/ only, torch also by what these folders have
    in common and by the CUDA transport, triton by that; what is there for tests by no module of the
    product; and what pyproject.toml does not require by none either."""
    check(imports_out_of_their_room, PRODUCT)


def imports_of_cuda(source: Source) -> Iterator[str]:
    package = installed(CUDA)
    for each in source.imports if source.folder != CUDA else ():
        if package in {each.full, *parents(each.full)}:
            yield f"{each.line}: imports {each.full}"


def test_only_its_entry_point_leads_to_the_cuda_transport() -> None:
    """So an engine that does not use CUDA does not import it."""
    check(imports_of_cuda, PRODUCT)
    entries = PROJECT["entry-points"]["kvshm.transports"]
    assert [name for name, at in entries.items() if installed(CUDA) in parents(at)] == ["cuda_ipc"]


INSIDE = {installed(s.folder) for s in PRODUCT if re.match(r"kvshm/_\w+/", s.name)}
INSIDE -= {"kvshm._base"}


def hooks_inside_the_node(source: Source) -> Iterator[str]:
    for each in source.imports if source.name.startswith("hooks/") else ():
        if INSIDE & {each.full, *parents(each.full)}:
            yield f"{each.line}: imports {each.full}"


def test_hooks_meet_the_node_through_the_public_surface_only() -> None:
    """There is no second way in: what an engine needs of kvshm is offered to every engine.  Names,
    log lines and the like (the ground) are the house's own."""
    check(hooks_inside_the_node, PRODUCT)


def test_no_import_leads_back_to_where_it_came_from() -> None:
    """Not even one within a function; only what type checkers alone read may.  Packages count:
    an import runs the ``__init__`` of each that it enters.  None is imported itself, since its
    name gives access to all its modules."""
    graph = graph_of(PRODUCT)
    assert graph["kvshm.hooks.vllm.connector"] >= {
        "kvshm.hooks.vllm.scheduler_side",
        "kvshm.errors",
    }
    stands_in = "kvshm.hooks.vllm.plain_connector"
    assert graph["kvshm.hooks.connector"] >= {"kvshm.hooks.vllm", stands_in}
    assert graph[stands_in] >= {"kvshm.hooks.vllm.connector"}
    assert not circle(graph)


def graph_of(sources: list[Source]) -> dict[str, set[str]]:
    """Which modules and packages each module runs by its imports."""
    modules = {installed(source.name).removesuffix(".__init__"): source for source in sources}
    packages = {name for name, source in modules.items() if source.name.endswith("/__init__.py")}
    graph: dict[str, set[str]] = {name: set() for name in ("kvshm._native", *modules)}
    of_packages = []
    for module, source in modules.items():
        for each in source.imports:
            name = each.full if each.full in graph else each.full.rpartition(".")[0]
            if each.runs and name in packages:
                of_packages.append(f"{source.name}:{each.line}: imports {each.full}, of a package")
            elif each.runs and name in graph:
                graph[module] |= {name} | (parents(name) & packages) - parents(module) - {module}
    assert not of_packages, "\n" + "\n".join(of_packages)
    return graph


def circle(graph: dict[str, set[str]]) -> str:
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as exc:
        return " -> ".join(exc.args[1])
    return ""


DRAWING = (ROOT / "docs/architecture.md").read_text().partition("\n kvshm/\n")[2]
FLOORS = re.findall(r"^   (\w+)/ ", DRAWING.partition("```")[0], re.MULTILINE)
ROOF = re.findall(r"\w+", DRAWING.split("  the public surface")[0])


def imports_from_above(source: Source) -> Iterator[str]:
    first, _, rest = source.name.partition("/")
    if first != "kvshm" or rest.removesuffix(".py") in {*ROOF, "__init__"}:
        return
    floor = rest.split("/")[0] if "/" in rest else "_base"
    above = {f"kvshm.{folder}" for folder in FLOORS[: FLOORS.index(floor)]}
    for each in source.imports:
        if above & {each.full, *parents(each.full)}:
            yield f"{each.line}: imports {each.full}, of a floor above"


def test_a_folder_of_the_core_imports_only_those_drawn_below_it() -> None:
    """The floors are the folders of kvshm/, in the order in which docs/architecture.md draws
    them; modules that lie in no folder stand on the ground and the C core only, but for those
    drawn above all folders and the package itself, which only pass names on."""
    folders = {s.name.split("/")[1] for s in PRODUCT if re.match("kvshm/.*/", s.name)}
    assert sorted(FLOORS) == sorted({*folders, "native"})
    assert FLOORS[-1] == "native"
    assert "api" in ROOF
    check(imports_from_above, PRODUCT)


# -- names and sizes

NAMELESS = {"utils", "util", "helpers", "helper", "common", "misc"}
"""Words that name no concept: no module and no folder has them in its name."""


def nameless(source: Source) -> Iterator[str]:
    if words := NAMELESS & {*re.split(r"[/_.]", source.name)}:
        yield f"1: {', '.join(words)} names no concept"


def test_every_module_and_folder_is_named_after_a_thing() -> None:
    check(nameless, [*PRODUCT, *OTHERS, *C_FILES])


def too_long(source: Source) -> Iterator[str]:
    if len(source.lines) > MAX_LINES:
        yield f"{len(source.lines)}: the file has more than {MAX_LINES} lines"
    for function in source.functions if source.name.endswith(".py") else ():
        if (function.end_lineno or 0) - function.lineno >= MAX_FUNCTION_LINES:
            yield f"{function.lineno}: {function.name} has more than {MAX_FUNCTION_LINES} lines"


def test_no_file_and_no_function_grows_too_long() -> None:
    check(too_long, [*PRODUCT, *OTHERS, *C_FILES])


DATA = {"NamedTuple", "Struct", "Enum", "StrEnum", "IntEnum", "Flag", "IntFlag"}


def too_wide(source: Source) -> Iterator[str]:
    """An attribute is what the class annotates in its body, or what its methods store in ``self``.
    Data may have any number: a dataclass, NamedTuple, Struct, enum or exception none of
    whose methods stores anything."""
    for node in source.nodes:
        if not isinstance(node, ast.ClassDef):
            continue
        methods = [n for n in node.body if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
        stored = {name for method in methods for name in stored_in_self(method)}
        fields = {ast.unparse(n.target) for n in node.body if isinstance(n, ast.AnnAssign)}
        if (stored or not is_data(node)) and len(stored | fields) > MAX_ATTRIBUTES:
            yield f"{node.lineno}: {node.name} has {len(stored | fields)} attributes"


def stored_in_self(method: ast.AST) -> set[str]:
    attributes = [node for node in ast.walk(method) if isinstance(node, ast.Attribute)]
    return {
        node.attr
        for node in attributes
        if isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self"
    }


def is_data(node: ast.ClassDef) -> bool:
    bases = {ast.unparse(base).rpartition(".")[2] for base in node.bases}
    decorators = [ast.unparse(decorator) for decorator in node.decorator_list]
    raised = any(base.endswith(("Error", "Exception")) for base in bases)
    return bool(DATA & bases) or raised or any("dataclass" in name for name in decorators)


def test_no_class_has_too_many_attributes() -> None:
    check(too_wide, PRODUCT)


def folded_by_hand(source: Source) -> Iterator[str]:
    for function in source.functions:
        signature = range(function.lineno, function.body[0].lineno + 1)
        for line in signature:
            if re.search(r"# fmt: (skip|off)", source.lines[line - 1]):
                yield f"{line}: the signature of {function.name} is not laid out by ruff format"


def test_no_signature_is_laid_out_by_hand() -> None:
    check(folded_by_hand, [*PRODUCT, *OTHERS])


# -- C, and threads

C_LIBRARY = {"stdatomic.h", "stdbool.h", "stddef.h", "stdint.h", "string.h"}
"""What the native core needs of the C library."""


def python_in_the_core(source: Source) -> Iterator[str]:
    """All files in kvshm/native but py_* are the core."""
    name = source.name.removeprefix(NATIVE)
    if name == source.name:
        yield "1: C is in kvshm/native only"
    if name.startswith("py_"):
        return
    # What is taken out leaves its line ends, so that lines keep their numbers.
    code = re.sub(
        r"/\*.*?\*/|//[^\n]*", lambda m: "\n" * m[0].count("\n"), source.text, flags=re.DOTALL
    )
    beside = {s.name.removeprefix(NATIVE) for s in C_FILES if s.name.startswith(NATIVE)}
    ours = {f'"{other}"' for other in beside if not other.startswith("py_")}
    allowed = {f"<{header}>" for header in C_LIBRARY} | (ours if name != "layout.h" else set())
    for number, line in enumerate(code.splitlines(), 1):
        included = re.match(r"\s*#\s*include\s*(.*?)\s*$", line)
        if included and included[1] not in allowed:
            yield f"{number}: includes {included[1]}"
        if used := re.search(r"\b_?Py\w*", line):
            yield f"{number}: uses {used[0]} of Python"


def test_only_the_glue_knows_python() -> None:
    """The core includes its own files and the C library and uses no name of Python's; layout.h,
    which is generated, includes nothing of ours."""
    product = [source for source in C_FILES if not source.name.startswith("tests/")]
    core = {"core.c", "exporter.c", "importer.c", "lookup.c", "replica.c", "layout.h"}
    assert {NATIVE + name for name in core} <= {source.name for source in product}
    check(python_in_the_core, product)


def timed_simple_queues(source: Source) -> Iterator[str]:
    names = {getattr(node, "attr", getattr(node, "id", "")) for node in source.nodes}
    uses = "SimpleQueue" in names
    for call in [node for node in source.nodes if uses and isinstance(node, ast.Call)]:
        timed = any(keyword.arg == "timeout" for keyword in call.keywords) or len(call.args) > 1
        if timed and ast.unparse(call.func).endswith(".get"):
            yield f"{call.lineno}: waits for a SimpleQueue for a time"


def test_no_thread_waits_for_a_simple_queue_for_a_time() -> None:
    """``SimpleQueue.get`` with a timeout waits for ever if the thread is held up inside the call
    for longer than the timeout (CPython 3.11, Modules/_queuemodule.c): ``queue.Queue`` does not."""
    check(timed_simple_queues, PRODUCT)


# -- each rule notices

WIDE = "".join(f"        self.field{number} = 0\n" for number in range(16))
BAD: list[tuple[Rule, str, str, str]] = [
    (computed_imports, "hooks/a.py", "import importlib", "1: imports importlib"),
    (computed_imports, "hooks/a.py", "x = 1\neval('x')", "2: eval"),
    (computed_imports, "hooks/a.py", "import sys\nsys.modules", "2: modules"),
    (imports_of_components, "kvshm/a.py", "from . import hooks", "1: imports component hooks"),
    (imports_of_components, "tools/a.py", "import kvshm.hooks", "1: imports component kvshm.hooks"),
    (imports_of_components, "tools/a.py", "from .. import api", "1: ..api climbs out"),
    (imports_out_of_their_room, "kvshm/a.py", "import torch", "1: may not import torch"),
    (imports_out_of_their_room, "tools/a.py", "import pytest", "1: may not import pytest"),
    (imports_out_of_their_room, "tools/a.py", "import attrs", "1: may not import attrs"),
    (imports_out_of_their_room, "tools/mocks.py", "", "1: belongs to tests/"),
    (
        imports_of_cuda, "transport/a.py", "from .cuda import vmm",
        "1: imports kvshm.transport.cuda.vmm",
    ),
    (
        hooks_inside_the_node, "hooks/vllm/a.py", "from kvshm._node import peers",
        "1: imports kvshm._node.peers",
    ),
    (
        imports_from_above, "kvshm/_shm/a.py", "from kvshm._node import peers",
        "1: imports kvshm._node.peers, of a floor above",
    ),
    (nameless, "tools/path_utils.py", "", "1: utils names no concept"),
    (too_long, "tools/a.py", "\n" * 501, "501: the file has more than 500 lines"),
    (
        too_long, "tools/a.py", "def f():\n" + "    pass\n" * 60,
        "1: f has more than 60 lines",
    ),
    (
        too_wide, "tools/a.py", f"class A:\n    def __init__(self):\n{WIDE}",
        "1: A has 16 attributes",
    ),
    (
        too_wide, "tools/a.py", f"@dataclass\nclass A:\n    def __init__(self):\n{WIDE}",
        "2: A has 16 attributes",
    ),
    (
        folded_by_hand, "tools/a.py", "def f(\n    a, b,\n):  # fmt: skip\n    pass",
        "3: the signature of f is not laid out by ruff format",
    ),
    (python_in_the_core, "tools/a.c", "", "1: C is in kvshm/native only"),
    (python_in_the_core, NATIVE + "a.c", "/*\n*/ PyObject *a;", "2: uses PyObject of Python"),
    (
        python_in_the_core, NATIVE + "a.c", '#include "py_module.h"',
        '1: includes "py_module.h"',
    ),
    (
        timed_simple_queues, "tools/a.py", "q = SimpleQueue()\nq.get(timeout=1)",
        "2: waits for a SimpleQueue for a time",
    ),
]  # fmt: skip


def test_each_rule_notices_a_bad_source() -> None:
    for rule, name, text, offence in BAD:
        assert offence in list(rule(Source(name, text))), f"{rule.__name__}: {text}"
    back = [Source("tools/a.py", "from . import b"), Source("tools/b.py", "from . import a")]
    assert circle(graph_of(back))
    back[1] = Source("tools/b.py", "if TYPE_CHECKING:\n    from . import a")
    assert not circle(graph_of(back))
