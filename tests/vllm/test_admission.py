"""Which vLLM kvshm shares on: told from its source.  No engine."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

import vllm

from kvshm.hooks.vllm.admission import (
    ABSENT,
    Admission,
    Difference,
    Examined,
    admit,
    examine,
    known_sources,
)
from kvshm.hooks.vllm.source_digests import code_digests

from .odd_vllm import (
    FILE,
    copy_of_vllm,
    with_another_method,
    with_another_statement,
)

ROOT = Path(vllm.__file__).parent
KNOWN: Mapping[str, Any] = known_sources()["files"]
TESTED: list[str] = known_sources()["versions"]
FILES = [file for file in KNOWN if (ROOT / file).exists()]


def without(*fast: str) -> dict[str, Any]:
    """What is known, without the digests that are fast to compute."""
    return {file: {**known, **{key: {} for key in fast}} for file, known in KNOWN.items()}


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    return copy_of_vllm(tmp_path, FILES).parent


def own_parts(file: str) -> list[str]:
    """The names in a file that this vLLM has."""
    own = code_digests((ROOT / file).read_bytes(), KNOWN[file]["parts"])
    return [name for name in own if own[name] is not None]


# -- what the source says


def test_this_vllm_has_all_that_kvshm_relies_on() -> None:
    assert examine(ROOT, KNOWN) == Examined()
    assert examine(ROOT, without("whole")) == Examined()
    assert admit(False) == Admission()


def test_a_changed_line_is_noticed_by_the_facts_that_rest_on_it(copied: Path) -> None:
    """In each function and class of which a digest is known."""
    for file in FILES:
        text = (ROOT / file).read_text()
        for name in own_parts(file):
            (copied / file).write_text(with_another_statement(text, name))
            found = examine(copied, {file: KNOWN[file]}).different
            assert Difference(file, name, tuple(KNOWN[file]["parts"][name]["facts"])) in found
            # Else only what holds it, or what it holds.
            assert all(one.name.startswith(name) or name.startswith(one.name) for one in found)
        (copied / file).write_text(text)


CORE, SCHEDULER = "v1/engine/core.py", "v1/core/sched/scheduler.py"
ASYNC, MANAGERS = "v1/core/sched/async_scheduler.py", "v1/core/single_type_kv_cache_manager.py"
CPU_WORKER, CPU_RUNNER = "v1/worker/cpu_worker.py", "v1/worker/cpu_model_runner.py"
SLEEPS = "weights-sleep-and-wake-by-methods-of-these-names"
RESETS = "sleep-resets-first-and-only-a-full-wake-up-resumes-steps"
LOADS = "weights-are-loaded-by-methods-of-these-names"
FAILS = "a-load-that-failed-leaves-its-request-as-new"
HASHES = "the-hash-before-the-first-block-is-chosen-after-the-connectors"
TABLES = "block-tables-are-kept-by-request"


@pytest.mark.parametrize(
    ("file", "name", "fact"),
    [
        (CORE, "EngineCoreProc.pause_scheduler", RESETS),
        (CORE, "EngineCore.resume_scheduler", RESETS),
        (CORE, "EngineCore.reset_prefix_cache", RESETS),
        (CPU_WORKER, "CPUWorker.sleep", SLEEPS),
        (CPU_WORKER, "CPUWorker.wake_up", SLEEPS),
        (CPU_WORKER, "CPUWorker.discard", SLEEPS),
        (CPU_RUNNER, "CPUModelRunner.load_model", LOADS),
        (
            CPU_RUNNER,
            "CPUModelRunner.initialize_kv_cache",
            "the-model-runner-registers-the-caches-itself",
        ),
        (
            SCHEDULER,
            "Scheduler._update_requests_with_invalid_blocks",
            "an-output-is-taken-in-in-this-order",
        ),
        (SCHEDULER, "Scheduler._free_request", "an-importer-makes-vllm-hold-freed-blocks-back"),
        (FILE, "BlockHashToBlockMap.insert", "own-blocks-complete-what-a-peer-holds"),
        (FILE, "BlockHashToBlockMap.pop", "every-change-of-a-block-passes-the-wrapped-methods"),
        ("v1/core/kv_cache_utils.py", "hash_block_tokens", HASHES),
    ],
)
def test_who_does_the_work_of_a_fact_is_known(
    file: str, name: str, fact: str, tmp_path: Path
) -> None:
    """Not only who is called for it: what stands in its place, and what it calls in turn."""
    copy_of_vllm(tmp_path, [file])
    known = {file: KNOWN[file]}
    assert examine(tmp_path, known) == Examined()
    (tmp_path / file).write_text(with_another_statement((ROOT / file).read_text(), name))
    [found] = examine(tmp_path, known).different
    assert (found.file, found.name) == (file, name)
    assert fact in found.facts


@pytest.mark.parametrize(
    ("file", "name", "fact"),
    [
        (ASYNC, "AsyncScheduler._free_blocks", FAILS),
        (ASYNC, "AsyncScheduler._update_from_kv_xfer_finished", "a-load-is-reported-once"),
        (MANAGERS, "FullAttentionManager.free", TABLES),
        (MANAGERS, "FullAttentionManager.pop_blocks_for_free", TABLES),
        (MANAGERS, "SlidingWindowManager.allocate_new_blocks", TABLES),
        (CORE, "DPEngineCoreProc.pause_scheduler", RESETS),
        (CORE, "EngineCoreProc.step", "the-core-takes-outputs-in-by-the-schedulers-own-method"),
        (CPU_WORKER, "CPUWorker.update_weights", LOADS),
        ("v1/worker/cpu/model_runner.py", "CPUModelRunner.load_model", LOADS),
        (
            "v1/core/kv_cache_coordinator.py",
            "UnitaryKVCacheCoordinator.cache_blocks",
            "blocks-are-hashed-when-they-are-scheduled",
        ),
    ],
)
@pytest.mark.parametrize("first", [True, False])
def test_a_subclass_that_overrides_a_method_is_noticed(
    file: str, name: str, fact: str, first: bool, tmp_path: Path
) -> None:
    """Though its class had none, and others in the file have one of that name."""
    copy_of_vllm(tmp_path, [file])
    known = {file: {**KNOWN[file], "whole": {}}}
    assert examine(tmp_path, known) == Examined()
    assert {*KNOWN[file]["parts"][name]["digests"]} == {ABSENT}
    of, method = name.split(".")
    text = with_another_method((ROOT / file).read_text(), of, method, first)
    (tmp_path / file).write_text(text)
    assert examine(tmp_path, known).different == (
        Difference(file, name, tuple(KNOWN[file]["parts"][name]["facts"])),
    )
    assert fact in KNOWN[file]["parts"][name]["facts"]


def test_comments_docstrings_and_other_functions_do_not_count(copied: Path) -> None:
    added = "# A comment.\ndef kvshm_test(): return 1\n\n"
    for file in FILES:
        text = (ROOT / file).read_text()
        lines = [f"{line}  # comment" if line.endswith(":") else line for line in text.splitlines()]
        (copied / file).write_text("\n".join(lines) + f"\n{added}")
    assert examine(copied, KNOWN) == Examined()


def test_another_layout_does_not_count(copied: Path) -> None:
    texts = {file: (ROOT / file).read_text() for file in FILES}
    for file, text in texts.items():
        (copied / file).write_text(ast.unparse(ast.parse(text)))
    assert examine(copied, KNOWN) == Examined()
    for file, text in texts.items():
        (copied / file).write_bytes(b"\xef\xbb\xbf" + text.replace("\n", "\r\n").encode())
    assert examine(copied, KNOWN) == Examined()


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"def f(:",
        b"\0",
        b"class BlockPool:\n    def touch(self):\n        0\0",
        (ROOT / FILE).read_bytes() + b"x = '\xff'\n",
        (ROOT / FILE).read_bytes() + b"\0",
        (ROOT / FILE).read_bytes() + b"if x:\n\tx = " + b"(" * 9999 + b")" * 9999,
        (ROOT / FILE).read_bytes() + b"if x:\n\tx = " + b"-" * 99999 + b"1\n",
        b"# coding: odd\n" + (ROOT / FILE).read_bytes(),
        None,
    ],
)
def test_a_damaged_or_missing_file_differs(copied: Path, content: bytes | None) -> None:
    (copied / FILE).unlink()
    if content is not None:
        (copied / FILE).write_bytes(content)
    found = examine(copied, KNOWN)
    assert {one.file for one in found.different} == {FILE}
    assert (found.different[0].name == "") == (content is None)
    assert not found.unreadable


@pytest.mark.parametrize(
    ("compiled", "beside", "unreadable"),
    [
        ("block_pool.abi3.so", False, True),
        ("block_pool.pyc", False, True),
        # Python imports these although the source is there
        ("block_pool.abi3.so", True, True),
        ("block_pool/__init__.py", True, True),
        # and the source although these are there
        ("block_pool.pyc", True, False),
        ("block_pool.old.so", True, False),
    ],
)
def test_what_python_does_not_import_from_source_cannot_be_read(
    copied: Path, compiled: str, beside: bool, unreadable: bool
) -> None:
    made = copied / "v1" / "core" / compiled
    made.parent.mkdir(exist_ok=True)
    made.touch()
    if not beside:
        (copied / FILE).unlink()
    assert examine(copied, KNOWN) == Examined(unreadable=(FILE,) if unreadable else ())


def test_nor_what_is_in_an_archive(tmp_path: Path) -> None:
    assert examine(tmp_path / "vllm.zip" / "vllm", KNOWN) == Examined(unreadable=tuple(KNOWN))


# -- the data file


def test_every_digest_is_of_tested_versions() -> None:
    assert sorted(TESTED, key=lambda version: [*map(int, version.split("."))]) == TESTED
    for known in KNOWN.values():
        for part in known["parts"].values():
            of = [version for versions in part["digests"].values() for version in versions]
            assert sorted({*of}) == sorted(TESTED)
