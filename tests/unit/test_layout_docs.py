"""docs/layout.md and layout.h say what layout.py says: every number, and every constant."""

from __future__ import annotations

import re
import runpy
from itertools import pairwise
from pathlib import Path

import pytest

from kvshm.shm import layout as records

PAGE = Path(__file__).parents[2] / "docs" / "layout.md"
ROW = re.compile(r"\| (\d+) \| (?:(\d+) \| )?`?([A-Z_]*)`? \| .* \|")
NAMED = re.compile(r"[A-Z_]+_(?:OFFSET|BYTES)|(?:NUM|MAX)_[A-Z_]+|LAYOUT_VERSION")


def rows(section: str) -> list[tuple[int, int, str]]:
    """Return (number, bytes or 0, constant) of each table row of a section."""
    found = map(ROW.fullmatch, section.splitlines())
    return [(int(m[1]), int(m[2] or 0), m[3]) for m in found if m]


SECTIONS = re.split(r"^#+ ", PAGE.read_text(), flags=re.MULTILINE)[1:]
ROWS = [row for section in SECTIONS for row in rows(section)]
CONSTANTS = sorted(name for name in vars(records) if NAMED.fullmatch(name) and name != "HASH_BYTES")


def test_the_committed_page_and_header_are_the_generated_ones() -> None:
    generator = runpy.run_path(str(PAGE.with_name("generate.py")))
    assert generator["layout"](PAGE.read_text()) == PAGE.read_text(), "make docs"
    assert generator["header"](records.numbers()) == generator["HEADER"].read_text(), "make docs"


@pytest.mark.parametrize("constant", CONSTANTS)
def test_page_gives_each_constant_its_value(constant: str) -> None:
    assert [number for number, _, name in ROWS if name == constant] == [getattr(records, constant)]


def test_page_names_no_constant_that_does_not_exist() -> None:
    assert {name for _, _, name in ROWS if name} <= set(CONSTANTS)


@pytest.mark.parametrize("section", SECTIONS, ids=lambda section: section.splitlines()[0])
def test_fields_do_not_overlap(section: str) -> None:
    fields = [(offset, size) for offset, size, _ in rows(section) if size]
    for (offset, size), (following, _) in pairwise(fields):
        assert offset + size <= following
