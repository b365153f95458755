"""docs/architecture.md names every thread, and no page names a method or an attribute that is
not."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from .pages import ROOT, check_pages

FOLDERS = ("kvshm", "coordinator", "transport", "hooks", "hooks/vllm", "tools")


@cache
def classes() -> dict[str, set[str]]:
    """What each class of the source defines by name, or inherits from one that does."""
    found: dict[str, set[str]] = {}
    bases: dict[str, list[str]] = {}
    for path in (path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                names = {getattr(part, "name", "") for part in node.body}
                names |= {ast.unparse(n.target) for n in node.body if isinstance(n, ast.AnnAssign)}
                stored = (n for n in ast.walk(node) if isinstance(n, ast.Attribute))
                names |= {n.attr for n in stored if isinstance(n.ctx, ast.Store)}
                found.setdefault(node.name, set()).update(names)
                bases.setdefault(node.name, []).extend(map(ast.unparse, node.bases))
    for name, inherited in bases.items():
        found[name].update(*(found.get(base, ()) for base in inherited))
    return found


def test_the_page_names_every_thread_without_a_word_of_its_own() -> None:
    """The others have one there: the client's thread, descriptor servers, load, attach and copy
    threads."""
    known = {"kvshm-client", "kvshm-fds", "kvshm-loads", "kvshm-attach", "kvshm-copy"}
    started = re.compile(r'name="(kvshm-\w+)", daemon|(?:JobThread|__init__)\("(kvshm-\w+)"')
    paths = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")]
    named = (match for path in paths for match in started.findall(path.read_text()))
    found = {one or other for one, other in named}
    assert known < found
    table = (ROOT / "docs/architecture.md").read_text().partition("\nThe threads of an engine:")[2]
    listed = set(re.findall(r"`(kvshm-\w+)`", table.partition("\n## ")[0]))
    assert listed == found - known


def methods(page: Path) -> Iterator[tuple[str, bool]]:
    for class_name, method in re.findall(r"`([A-Z]\w*[a-z])\.([a-z]\w*)`", page.read_text()):
        yield f"{class_name}.{method}", method in classes().get(class_name, ())


def test_methods_in_backticks_exist() -> None:
    check_pages(methods)
