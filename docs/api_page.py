"""Write the part of docs/api.md that the docstrings of the public surface state.

It reads the source and imports nothing: fields have docstrings in the source only.  What begins
with "Internal" or "Only" in its docstring is left out: it is public by name alone.
"""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
WIDTH = 140
CODE_WIDTH = 100
CHAPTERS = {
    "Joining": ("allocate", "join", "Identity", "Region", "Group", "Config"),
    "The joined engine": ("Node", "Held", "prefix_keys"),
    "Finding and loading": ("Found", "Part", "Owner", "Load", "LoadState"),
    "Single blocks": (
        "join_like",
        "EngineLayout",
        "BlockNode",
        "News",
        "Change",
        "BlockName",
        "BlockContent",
        "FoundBlocks",
        "LoadOfBlocks",
    ),
    "Reading from anywhere": ("Reader", "EngineView", "PublishedBlock"),
    "Errors": ("KvshmError", "MisuseError", "ConfigError", "TransportError"),
    "Versions": ("API_VERSION", "__version__"),
}
"""All names of ``kvshm.api``, in the order of the page."""
BRIEF = {
    "Engines with several processes": "kvshm.halves",
    "Writing a transport": "kvshm.interfaces",
    "A coordinator within a program": "kvshm.coordinator.in_process",
}
"""Other public modules, told in brief."""
LEFT_OUT = ("Internal", "Only ")
SETTINGS = {"_setting", "_flag", "_one_of"}
"""They make the fields of Config, which docs/configuration.md lists."""

Definition = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


class Entry(NamedTuple):
    """A public name: of a module, or a member of a class."""

    name: str
    shown: str
    """As a caller writes it, with types."""
    text: str
    """Its docstring; empty if it has none."""
    members: tuple[Entry, ...] = ()
    is_field: bool = False


def names() -> str:
    """Return the chapters about all names."""
    brief = (line for title, module in BRIEF.items() for line in _brief(title, module))
    return "\n".join([*_chapters(surface()), *brief])


def _brief(title: str, module: str) -> Iterator[str]:
    """A chapter about another public module: each name, and the first sentence about it."""
    yield f"## {title}\n"
    yield f"`{module}` has these names. Their modules explain them in full.\n"
    for entry in surface(module=module.replace(".", "/") + ".py").values():
        first = re.split(r"(?<=[^.]\.)\s", " ".join(entry.text.split()), maxsplit=1)[0]
        yield _item(entry._replace(shown=entry.name, text=first)) if first else f"- `{entry.shown}`"
    yield ""


def surface(root: Path = ROOT, module: str = "kvshm/api.py") -> dict[str, Entry]:
    """Return every name in a module's ``__all__`` or, without one, what it defines and what it
    imports as the same name."""
    path = root / module
    tree = ast.parse(path.read_text("utf-8"))
    found: dict[str, Entry] = {}
    again: list[str] = []
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("kvshm"):
            source = root.joinpath(*(node.module or "").split(".")).with_suffix(".py")
            found |= {alias.name: _entry(source, alias.name) for alias in node.names}
            again += [alias.name for alias in node.names if alias.asname == alias.name]
    listed = [n for n in tree.body if isinstance(n, ast.Assign) and _target(n) == "__all__"]
    names = ast.literal_eval(listed[0].value) if listed else [*again, *_defined(tree)]
    return {name: found.get(name) or _entry(path, name) for name in names}


def _defined(tree: ast.Module) -> list[str]:
    kinds = (*FUNCTIONS, ast.ClassDef, ast.Assign, ast.AnnAssign)
    made = [node for node in tree.body if isinstance(node, kinds)]
    names = [_target(n) if isinstance(n, ast.Assign | ast.AnnAssign) else n.name for n in made]
    return [name for name in names if not name.startswith("_")]


def undocumented(entries: dict[str, Entry]) -> list[str]:
    """Return the public names without a docstring."""
    every = list(entries.items())
    every += [(f"{n}.{member.name}", member) for n, e in entries.items() for member in e.members]
    return [name for name, entry in every if not entry.text]


def _chapters(entries: dict[str, Entry]) -> Iterator[str]:
    listed = [name for names in CHAPTERS.values() for name in names]
    if sorted(listed) != sorted(entries):
        differ = sorted({*listed} ^ {*entries})
        raise ValueError(f"CHAPTERS of {__file__} and kvshm/api.py differ in {differ}")
    for title, names in CHAPTERS.items():
        yield f"## {title}\n"
        for name in names:
            yield from _section(entries[name])


def _section(entry: Entry) -> Iterator[str]:
    yield f"### `{entry.name}`\n"
    yield f"```python\n{entry.shown}\n```\n"
    yield _markdown(entry.text) + "\n"
    shown = [m for m in entry.members if not m.text.startswith(LEFT_OUT)]
    if fields := [member for member in shown if member.is_field]:
        yield "\n".join(_item(field) for field in fields) + "\n"
    for method in shown:
        if not method.is_field:
            yield f"#### `{entry.name}.{method.name}`\n"
            yield f"```python\n{method.shown}\n```\n"
            yield _markdown(method.text) + "\n"


def _item(field: Entry) -> str:
    text = " ".join(_markdown(field.text, width=10_000).split("\n"))
    lines = textwrap.wrap(f"- `{field.shown}`: {text}", WIDTH, subsequent_indent="  ")
    return "\n".join(lines)


def _markdown(docstring: str, width: int = WIDTH) -> str:
    """A docstring as a page has it: paragraphs filled, names in single backticks, code fenced."""
    paragraphs = []
    for paragraph in re.split(r"\n\s*\n", docstring):
        if paragraph.startswith("    "):
            paragraphs.append(f"```\n{textwrap.dedent(paragraph)}\n```")
        elif (text := " ".join(paragraph.split()).replace("``", "`")) != "::":
            lines = textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False)
            paragraphs.append("\n".join(lines))
    return "\n\n".join(paragraphs)


def _entry(source: Path, name: str) -> Entry:
    """The definition of ``name`` in a module."""
    body = ast.parse(source.read_text("utf-8")).body
    for node, text in _documented(body):
        if isinstance(node, Definition) and node.name == name:
            if isinstance(node, ast.ClassDef):
                return _class(node, list(_bases(source, body, node)))
            return Entry(name, _signature(node), ast.get_docstring(node) or "")
        if isinstance(node, ast.Assign | ast.AnnAssign) and _target(node) == name:
            return Entry(name, _code(node), text)
    raise ValueError(f"nothing defines {name}")


def _bases(source: Path, body: list[ast.stmt], node: ast.ClassDef) -> Iterator[ast.ClassDef]:
    """The classes of sibling modules from which a class inherits, the most general first."""
    names = {_code(base) for base in node.bases}
    for found in body:
        if not isinstance(found, ast.ImportFrom) or found.level != 1:
            continue
        if names & {alias.name for alias in found.names}:
            sibling = source.with_name(f"{found.module}.py")
            theirs = ast.parse(sibling.read_text("utf-8")).body
            for base in theirs:
                if isinstance(base, ast.ClassDef) and base.name in names:
                    yield from _bases(sibling, theirs, base)
                    yield base


def _class(node: ast.ClassDef, inherited: Sequence[ast.ClassDef] = ()) -> Entry:
    fields = list(_fields(node))
    statements = [n for each in (*inherited, node) for n in each.body]
    methods = [n for n in statements if isinstance(n, FUNCTIONS)]
    methods = list({n.name: n for n in methods}.values())  # the last one overrides the others
    init = next((n for n in methods if n.name == "__init__"), None)
    shown = f"class {node.name}"
    bases = [_code(base) for base in node.bases]
    if init is not None:
        text = ast.get_docstring(init) or ""
        if not text.startswith(LEFT_OUT):
            shown = _signature(init, node.name)
            node_text = f"{ast.get_docstring(node)}\n\n{text}"
        else:
            node_text = ast.get_docstring(node) or ""
        fields += _attributes(init)
    else:
        node_text = ast.get_docstring(node) or ""
        if bases and bases[0].endswith(("Error", "Exception", "Enum")):
            shown += f"({bases[0]})"
        elif not bases or bases[0] != "NamedTuple":
            shown = _constructor(node, fields)
    members = (*fields, *(_method(n) for n in methods if not n.name.startswith("_")))
    return Entry(node.name, shown, node_text, members)


def _fields(node: ast.ClassDef) -> Iterator[Entry]:
    """Fields and constants that stand in the body of a class."""
    for statement, text in _documented(node.body):
        if isinstance(statement, ast.Assign | ast.AnnAssign):
            name = _target(statement)
            made_by = statement.value.func if isinstance(statement.value, ast.Call) else None
            if not name.startswith("_") and not (made_by and _code(made_by) in SETTINGS):
                yield Entry(name, _short(statement), text, is_field=True)


def _attributes(init: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[Entry]:
    """What a constructor assigns to public names."""
    types = {a.arg: _code(a.annotation) for a in init.args.args if a.annotation}
    for statement, text in _documented(init.body):
        if isinstance(statement, ast.Assign | ast.AnnAssign):
            owner, _, name = _target(statement).partition(".")
            if owner == "self" and not name.startswith("_"):
                kind = types.get(_code(statement.value)) if statement.value else None
                kind = _code(statement.annotation) if isinstance(statement, ast.AnnAssign) else kind
                yield Entry(name, f"{name}: {kind}" if kind else name, text, is_field=True)


def _method(node: ast.FunctionDef | ast.AsyncFunctionDef) -> Entry:
    text = ast.get_docstring(node) or ""
    decorators = {_code(decorator) for decorator in node.decorator_list}
    if "property" in decorators:
        kind = f": {_code(node.returns)}" if node.returns else ""
        return Entry(node.name, node.name + kind, text, is_field=True)
    return Entry(node.name, _signature(node, bound=True), text)


def _documented(body: list[ast.stmt]) -> Iterator[tuple[ast.stmt, str]]:
    """Yield each statement with the docstring behind it."""
    for node, after in zip(body, [*body[1:], ast.Pass()], strict=True):
        text = ""
        if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
            text = str(after.value.value)
        yield node, re.sub(r"\n +", "\n", text)


def _code(node: ast.AST) -> str:
    """The source of a piece of code, as ruff would lay it out."""
    return ast.unparse(node).replace("'", '"')


def _target(node: ast.Assign | ast.AnnAssign) -> str:
    return _code(node.targets[0] if isinstance(node, ast.Assign) else node.target)


def _short(node: ast.Assign | ast.AnnAssign) -> str:
    """A field as a caller sees it: without a default that only a dataclass understands."""
    if not (isinstance(node, ast.AnnAssign) and isinstance(node.value, ast.Call)):
        return _code(node)
    factories = (k.value for k in node.value.keywords if k.arg == "default_factory")
    default = f" = {_code(factory)}()" if (factory := next(factories, None)) else ""
    return f"{_target(node)}: {_code(node.annotation)}{default}"


def _calls(node: ast.ClassDef) -> Iterator[ast.Call]:
    """The calls that make the fields of a class."""
    for statement in node.body:
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.value, ast.Call):
            yield statement.value


def _constructor(node: ast.ClassDef, fields: list[Entry]) -> str:
    """How a class whose fields are its arguments is called."""
    arguments = [f.shown for f in fields if ":" in f.shown and not f.text.startswith(LEFT_OUT)]
    if any(_code(call.func) in SETTINGS for call in _calls(node)):
        return _call(node.name, ["**settings"], "")
    if any("kw_only=True" in _code(decorator) for decorator in node.decorator_list):
        arguments.insert(0, "*")
    return _call(node.name, arguments, "")


def _signature(
    node: ast.FunctionDef | ast.AsyncFunctionDef, name: str = "", bound: bool = False
) -> str:
    """A function as it is called; ``name``: of the class that it constructs."""
    spec = node.args
    positional = [*spec.posonlyargs, *spec.args]
    defaults = [None] * (len(positional) - len(spec.defaults)) + list(spec.defaults)
    arguments = [_argument(a, d) for a, d in zip(positional, defaults, strict=True)]
    if bound or name:
        arguments = arguments[1:]
    if spec.vararg:
        arguments.append("*" + _argument(spec.vararg, None))
    elif spec.kwonlyargs:
        arguments.append("*")
    arguments += [_argument(a, d) for a, d in zip(spec.kwonlyargs, spec.kw_defaults, strict=True)]
    result = f" -> {_code(node.returns)}" if node.returns and not name else ""
    prefix = "await " if isinstance(node, ast.AsyncFunctionDef) else ""
    return _call(prefix + (name or node.name), arguments, result)


def _argument(argument: ast.arg, default: ast.expr | None) -> str:
    kind = f": {_code(argument.annotation)}" if argument.annotation else ""
    if default is None:
        return argument.arg + kind
    return f"{argument.arg}{kind}{' = ' if kind else '='}{_code(default)}"


def _call(name: str, arguments: list[str], result: str) -> str:
    line = f"{name}({', '.join(arguments)}){result}"
    if len(line) <= CODE_WIDTH:
        return line
    inside = "".join(f"    {argument},\n" for argument in arguments)
    return f"{name}(\n{inside}){result}"
