"""docs/compat.md names every call of kvshm.compat and every error of its own."""

from __future__ import annotations

import inspect
from types import ModuleType

import pytest

from kvshm.compat import kv_pipe, lookup_buffer, prefill, retrieval
from kvshm.errors import KvshmError

from .pages import ROOT

TEXT = (ROOT / "docs/compat.md").read_text()


@pytest.mark.parametrize("module", [retrieval, lookup_buffer, kv_pipe, prefill])
def test_the_page_names_each_call(module: ModuleType) -> None:
    own = {name: getattr(module, name) for name in module.__all__}
    names = {name for name, value in own.items() if inspect.isfunction(value)}
    for name, value in own.items():
        if inspect.isclass(value) and issubclass(value, KvshmError):
            names.add(name)
        elif inspect.isclass(value) and not issubclass(value, tuple):
            methods = {n for n, v in vars(value).items() if inspect.isfunction(v)}
            names |= {name, *methods} - {"close"}
    assert {name for name in names if name[0] != "_" and name not in TEXT} == set()
    assert module.__name__ in TEXT
