"""The table at the head of kvshm/native/core.c names every atomic operation of the native code."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

CORE = Path(__file__).parents[2] / "kvshm" / "native"
FILES = sorted([*CORE.glob("*.c"), *CORE.glob("*.h")])
KINDS = {
    "load": "load", "store": "store", "compare_exchange_strong": "CAS", "fetch_add": "add",
    "fetch_sub": "sub", "thread_fence": "fence",
}  # fmt: skip
ROW = re.compile(r"^ \*     (\w+) +((?:load|store|CAS|add|sub|fence) \w+(?:/\w+)?)  +\S", re.M)
ATOMIC = re.compile(r"\batomic_(?!int\b)(\w+?)(?:_explicit)?\s*\(|__(?:atomic|sync)_(\w+)")

Operation = tuple[str, str]


def without_comments(text: str) -> str:
    return re.sub(r"/\*.*?\*/", "", text, flags=re.S)


def functions(text: str) -> Iterator[tuple[str, str]]:
    """Name and text of each function: what begins at the left margin, up to the next."""
    parts = re.split(r"^(?=[a-z_][^;=]*?\b\w+\([^;]*?\)\s*\{)", without_comments(text), flags=re.M)
    for part in parts[1:]:
        named = re.search(r"(\w+)\(", part)
        assert named is not None
        yield named[1], part[named.end() :]


def atomics(body: str) -> Iterator[str]:
    for found in ATOMIC.finditer(body):
        orders = re.findall(r"memory_order_(\w+)", body[found.end() :].split(";")[0])
        kind = KINDS.get(found[1], found[1])
        yield f"{kind} {'/'.join(orders[: 1 + (kind == 'CAS')]) or 'seq_cst'}"


def operations(texts: dict[str, str]) -> set[Operation]:
    """All operations of all files; those of get, put, get_acquire and swap where they are used."""
    bodies = [named for text in texts.values() for named in functions(text)]
    helping = ("get", "get_half", "get_acquire", "put", "swap")
    helpers = {name: next(atomics(body)) for name, body in bodies if name in helping}
    used = re.compile(r"\b(" + "|".join(helpers) + r")\s*\(")
    return {
        (name, operation)
        for name, body in bodies
        if name not in helpers
        for operation in [*atomics(body), *(helpers[h] for h in used.findall(body))]
    }


@pytest.fixture
def texts() -> dict[str, str]:
    return {path.name: path.read_text() for path in FILES}


def rows(texts: dict[str, str]) -> set[Operation]:
    return {(found[1], found[2]) for found in ROW.finditer(texts["core.c"])}


def test_the_table_and_the_code_name_the_same_operations(texts: dict[str, str]) -> None:
    assert operations(texts) == rows(texts)


def test_every_atomic_of_the_files_lies_in_a_function_that_is_looked_at(
    texts: dict[str, str],
) -> None:
    spelled = sum(len(ATOMIC.findall(without_comments(text))) for text in texts.values())
    seen = sum(1 for text in texts.values() for _, b in functions(text) for _ in atomics(b))
    assert seen == spelled > 15


@pytest.mark.parametrize(
    ("file", "before", "after"),
    [
        ("importer.c", "atomic_thread_fence(memory_order_acquire);\n    table_view", "table_view"),
        ("importer.c", "uint64_t word = get_acquire(slot);", "uint64_t word = get(slot);"),
        ("importer.c", "memory_order_release, memory_order_relaxed", "memory_order_relaxed"),
        ("exporter.c", "(memory_order_seq_cst)", "(memory_order_release)"),
        ("lookup.c", "get_acquire(sequence)", "get(sequence)"),
        ("core.c", "return KVSHM_OK;\n", "atomic_signal(); return KVSHM_OK;\n"),
    ],
)
def test_a_changed_order_is_noticed(
    texts: dict[str, str], file: str, before: str, after: str
) -> None:
    assert before in texts[file]
    table = rows(texts)
    texts[file] = texts[file].replace(before, after, 1)
    assert operations(texts) != table
