"""docs/layout.md and layout.h say what layout.py says: every number, and every constant."""

from __future__ import annotations

import os
import re
import runpy
import shutil
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

from kvshm._shm import layout as records

TREE = Path(__file__).parents[2]
PAGE = TREE / "docs" / "layout.md"
ROW = re.compile(r"\| (\d+) \| (?:(\d+) \| )?`?([A-Z_]*)`? \| .* \|")
NAMED = re.compile(r"[A-Z_]+_(?:OFFSET|BYTES)|(?:NUM|MAX)_[A-Z_]+|LAYOUT_VERSION")


def rows(section: str) -> list[tuple[int, int, str]]:
    """Return (number, bytes or 0, constant) of each table row of a section."""
    found = map(ROW.fullmatch, section.splitlines())
    return [(int(m[1]), int(m[2] or 0), m[3]) for m in found if m]


SECTIONS = re.split(r"^#+ ", PAGE.read_text(), flags=re.MULTILINE)[1:]
ROWS = [row for section in SECTIONS for row in rows(section)]
STATES = [*records.SlotState.__members__, *records.RowState.__members__]
CONSTANTS = sorted(name for name in vars(records) if NAMED.fullmatch(name) and name != "HASH_BYTES")
CONSTANTS += STATES
DIGESTS = {
    3: 0xC09F1A24,
    4: 0x94138F6C,
    5: 0x2917B0F8,
    6: 0x754AB820,
    7: 0xE81EBF8D,
    8: 0x6A7CE748,
    9: 0xCB0B786D,
    10: 0x7A7ED105,
}
"""The digest of all numbers of each layout version."""


def test_the_committed_page_and_header_are_the_generated_ones() -> None:
    generator = runpy.run_path(str(PAGE.with_name("generate.py")))
    assert generator["layout"](PAGE.read_text()) == PAGE.read_text(), "make docs"
    assert generator["header"](records.numbers()) == generator["HEADER"].read_text(), "make docs"


def test_a_changed_number_is_a_new_layout_version() -> None:
    """Two engines that state one version but mean other states or offsets would read each other's
    memory wrongly: LAYOUT_VERSION is all that they compare."""
    found, version = records.digest(records.numbers()), records.LAYOUT_VERSION
    assert found == DIGESTS.get(version), (
        f"the numbers of shared memory are not those of layout version {version}: raise "
        f"LAYOUT_VERSION, add a page to docs/decisions/, and put {found:#010x} here"
    )


def test_a_changed_number_reaches_page_and_header(tmp_path: Path) -> None:
    """The native module of the copy was built with the old number and refuses to load."""
    for folder in ("kvshm", "docs"):
        shutil.copytree(TREE / folder, tmp_path / folder)
    module = tmp_path / "kvshm/_shm/layout.py"
    changed, places = re.subn(r"(?m)^NUM_TICKETS = \d+$", "NUM_TICKETS = 77", module.read_text())
    assert places == 1
    module.write_text(changed)

    def run(*what: str) -> subprocess.CompletedProcess[str]:
        environ = {**os.environ, "PYTHONPATH": str(tmp_path)}
        command = [sys.executable, *what]
        return subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True)

    assert "built with another layout" in run("-c", "import kvshm._native").stderr
    generated = run("docs/generate.py")
    assert generated.returncode == 0, generated.stderr
    assert "KVSHM_NUM_TICKETS = 77," in (tmp_path / "kvshm/native/layout.h").read_text()
    assert "| 77 | `NUM_TICKETS` |" in (tmp_path / "docs/layout.md").read_text()


def test_page_gives_each_constant_its_value() -> None:
    numbers = records.numbers()
    shown = {c: [number for number, _, name in ROWS if name == c] for c in CONSTANTS}
    assert len(shown) > 50
    assert shown == {constant: [numbers[constant]] for constant in CONSTANTS}


def test_page_names_no_constant_that_does_not_exist() -> None:
    assert {name for _, _, name in ROWS if name} <= set(CONSTANTS)


def test_fields_do_not_overlap() -> None:
    compared = 0
    for section in SECTIONS:
        fields = [(offset, size, name) for offset, size, name in rows(section) if size]
        for (offset, size, name), (following, _, next_name) in pairwise(fields):
            assert offset + size <= following, f"{name}, {next_name}"
            compared += 1
    assert compared > 20
