"""docs/compat.md names every call of kvshm.compat and every error of its own."""

from __future__ import annotations

import inspect
from types import ModuleType

from kvshm.compat import kv_pipe, lookup_buffer, prefill, retrieval
from kvshm.errors import KvshmError

from .pages import ROOT

TEXT = (ROOT / "docs/compat.md").read_text()


def calls(module: ModuleType) -> set[str]:
    own = {name: getattr(module, name) for name in module.__all__}
    names = {name for name, value in own.items() if inspect.isfunction(value)}
    for name, value in own.items():
        if inspect.isclass(value) and issubclass(value, KvshmError):
            names.add(name)
        elif inspect.isclass(value) and not issubclass(value, tuple):
            methods = {n for n, v in vars(value).items() if inspect.isfunction(v)}
            names |= {name, *methods} - {"close"}
    return {module.__name__, *(name for name in names if name[0] != "_")}


def test_the_page_names_each_call() -> None:
    for module in (retrieval, lookup_buffer, kv_pipe, prefill):
        assert len(calls(module)) > 1
        assert {name for name in calls(module) if name not in TEXT} == set()
