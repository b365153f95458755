"""What docs/sglang.md says of SGLang is in SGLang's own source: docs/sglang-facts.toml.

Tests marked nightly fetch the wheel, of the version that the facts name or of SGLANG, and only read
it: nothing of SGLang is imported or installed.  No cheaper test knows what SGLang does.
"""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
import tomllib
import types
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvshm.hooks.vllm.source_digests import code_digests

from .pages import ROOT

PAGE = (ROOT / "docs/sglang.md").read_text("utf-8")
READ = tomllib.loads((ROOT / "docs/sglang-facts.toml").read_text("utf-8"))
FACTS = {fact["key"]: fact for fact in READ["fact"]}
VERSION = os.environ.get("SGLANG") or READ["version"]
WHEELS = ROOT / ".cache/sglang"

TREE = "srt/mem_cache/unified_cache/"
FREED = "_release_page_ids"


def test_the_page_rests_on_these_facts_and_this_version() -> None:
    cited = re.findall(r"`([a-z-]+)`", " ".join(re.findall(r"\(((?:`[a-z-]+`,?\s*)+)\)", PAGE)))
    assert FACTS
    assert len(FACTS) == len(READ["fact"])
    assert {*cited} == {*FACTS}
    assert {*re.findall(r"SGLang (\d+\.\d+\.\d+)", PAGE)} == {READ["version"]}


# -- in the wheel


class Wheel:
    """The source of one version of SGLang."""

    def __init__(self, path: Path) -> None:
        self._archive = zipfile.ZipFile(path)

    def read(self, file: str) -> bytes:
        """Return a file of the package; an empty one if there is none."""
        try:
            return self._archive.read(f"sglang/{file}")
        except KeyError:
            return b""

    def definition(self, file: str, name: str) -> ast.AST:
        """Return a class, or a function of one, as the last definition of the name has it."""
        found: ast.AST = ast.parse(self.read(file))
        for part in name.split("."):
            (*_, found) = (n for n in _bodies(found) if getattr(n, "name", "") == part)
        return found


def _bodies(node: ast.AST) -> Iterator[ast.AST]:
    yield from getattr(node, "body", ())


@pytest.fixture(scope="module")
def wheel() -> Wheel:
    found = [*WHEELS.glob(f"sglang-{VERSION}-*.whl")]
    if not found:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        command += ["--only-binary", "sglang", "--dest", str(WHEELS), f"sglang=={VERSION}"]
        subprocess.run(command, check=True)
        found = [*WHEELS.glob(f"sglang-{VERSION}-*.whl")]
    return Wheel(found[0])


@pytest.mark.nightly
def test_each_fact_rests_on_what_was_read(wheel: Wheel) -> None:
    changed = []
    for fact in FACTS.values():
        for source, digest in fact["sources"].items():
            file, name = source.split(": ")
            if (found := code_digests(wheel.read(file), [name])[name]) != digest:
                changed.append(f"{fact['key']}: {fact['says']}\n    {source} is {found}")
    assert not changed, f"SGLang {VERSION} differs:\n" + "\n".join(changed)


@pytest.mark.nightly
def test_a_linker_has_the_methods_that_the_page_lists(wheel: Wheel) -> None:
    """None of them could hear of an eviction."""
    linker = wheel.definition(f"{TREE}unified_cache_linker.py", "UnifiedCacheLinker")
    abstract = {
        node.name
        for node in _bodies(linker)
        if isinstance(node, ast.FunctionDef)
        and "abstractmethod" in map(ast.unparse, node.decorator_list)
    }
    rows = re.findall(r"^\| ((?:`\w+`(?:, )?)+) \|", PAGE, re.MULTILINE)
    assert abstract == {*re.findall(r"`(\w+)`", " ".join(rows))}


@pytest.mark.nightly
def test_the_configuration_on_the_page_is_accepted(wheel: Wheel) -> None:
    """By the very code; it imports nothing of SGLang."""
    module = types.ModuleType("linker_config")
    sys.modules[module.__name__] = module  # dataclasses look for it
    exec(wheel.read(f"{TREE}linker_config.py"), vars(module))
    (shown,) = re.findall(r"^ *--unified-cache-external-linker-config '(.*)'$", PAGE, re.MULTILINE)
    made = module.UnifiedCacheLinkerConfig.from_dict(json.loads(shown))
    assert (made.linker_module_path, made.linker) == ("kvshm_sglang", "KvshmLinker")
    for wrong in ({}, {**json.loads(shown), "more": 1}):
        with pytest.raises(ValueError, match="linker-config"):
            module.UnifiedCacheLinkerConfig.from_dict(wrong)


@pytest.mark.nightly
def test_a_refused_load_is_computed(wheel: Wheel) -> None:
    """What was allocated for it is given back, and nothing is said to be loaded."""
    name = "UnifiedCacheLinkerWrapper.load_back"
    load_back = wheel.definition(f"{TREE}unified_cache_linker.py", name)
    (refused,) = (
        node
        for node in ast.walk(load_back)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "not queued"
    )
    undo, end = refused.body
    assert "ExternalLinkerLoadPhase.ABORT" in ast.unparse(undo)
    assert ast.unparse(end) == "return (0, req.last_node)"


@pytest.mark.nightly
def test_every_freed_page_passes_a_method_that_the_page_wraps(wheel: Wheel) -> None:
    """``free_group_end`` frees what those two were given; ``clear`` takes all."""
    name = "PagedTokenToKVPoolAllocator"
    allocator = wheel.definition("srt/mem_cache/allocator/paged.py", name)
    methods = {n.name: ast.unparse(n) for n in _bodies(allocator) if isinstance(n, ast.FunctionDef)}
    calling = {method for method, text in methods.items() if f"self.{FREED}(" in text}
    assert calling == {"free", "free_page_ids", "free_group_end"}
    assert "free_page_ids" in methods["free_segment"]
    changing = r"self\.(?:free_pages|staged_pages)(?:: [\w.\[\]]+)? = |staged_pages\.extend"
    growing = {method for method, text in methods.items() if re.search(changing, text)}
    allocating = {"alloc", "alloc_extend", "alloc_decode"}
    assert growing - allocating == {FREED, "merge_and_sort_free", "clear"}


@pytest.mark.nightly
def test_pools_of_these_kinds_alone_are_described_for_linkers(wheel: Wheel) -> None:
    module = ast.parse(wheel.read("srt/mem_cache/hybrid_cache/hybrid_pool_assembler.py"))
    describing = {
        node.name
        for node in module.body
        if isinstance(node, ast.ClassDef)
        and "build_direct_linker_pool_group" in {getattr(n, "name", "") for n in node.body}
    }
    plain = {"_PlainKvStrategy", "_SwaStrategy"}
    assert plain <= {getattr(node, "name", "") for node in module.body}
    assert describing - {"StackStrategy"}
    assert not describing & plain


@pytest.mark.nightly
def test_the_tree_is_rust_by_default(wheel: Wheel) -> None:
    envs = ast.unparse(wheel.definition("srt/environ.py", "Envs"))
    assert "SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND = EnvStr('rust')" in envs
