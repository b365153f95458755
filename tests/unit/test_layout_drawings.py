"""What the docstring of layout.py and docs/layout.md draw and say of shared memory is what the
constants and struct formats say; test_layout_docs.py compares the constants themselves."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

import pytest

from kvshm._base.ids import HASH_BYTES
from kvshm._replica.index_layout import ENTRY_STRUCT, ROW_STRUCT, Row
from kvshm._shm import error_log, layout, progress, segment, slot_table, table_header, traffic
from kvshm._shm.layout import BlockRecord
from kvshm._shm.slot_table import Slot

PAGE = (Path(__file__).parents[2] / "docs" / "layout.md").read_text("utf-8")
DRAWN = layout.__doc__ or ""
BOXES = re.findall(r"(?:^ {4}.*[|+]\n)+", DRAWN, re.MULTILINE)
TABLE, TRAFFIC, LOOP, SLOT, INDEX, ROW, RECORD = BOXES

COMMON_BYTES = {
    "MAGIC": len(layout.TABLE_MAGIC),
    "VERSION": 4,
    "HEADER_BYTES": 4,
    "SEGMENT_BYTES": 8,
    "EPOCH": 8,
    "PID": 8,
}
TABLE_BYTES = COMMON_BYTES | {
    "FINGERPRINT": 32,
    "NUM_BLOCKS": 4,
    "BLOCK_SIZE": 4,
    "NUM_RANKS": 4,
    "LEASE_BIT": 4,
    "CREATED": 8,
    "HEARTBEAT": 8,
    "LEASES_TAKEN": 8,
    "RETIRED": 8,
    "KEPT_UNTIL": 8,
    "LIFE": 8 * layout.MAX_RANKS,
    "ENGINE_NAME": layout.ENGINE_NAME_BYTES,
    "MODEL_NAME": layout.MODEL_NAME_BYTES,
    "COUNTERS": 8 * layout.NUM_COUNTERS,
    "ERRORS": layout.NUM_ERRORS * layout.ERROR_BYTES,
    "TICKETS": 8 * layout.NUM_TICKETS,
    "PULSES": 8 * (1 + layout.MAX_RANKS),
    "HISTOGRAMS": layout.NUM_HISTOGRAMS * layout.HISTOGRAM_BYTES,
    "TRAFFIC": layout.NUM_TRAFFIC_ROWS * layout.TRAFFIC_ROW_BYTES,
    "LOOPS": layout.NUM_LOOPS * layout.LOOP_BYTES,
    "TICKET_TIMES": 8 * layout.NUM_TICKETS,
}
SLOT_BYTES = {
    "SLOT_HASH": HASH_BYTES,
    "SLOT_PARENT": 8,
    "SLOT_DEPTH": 4,
    "SLOT_PUBLISHED": 4,
    "SLOT_GROUP": 4,
    "SLOT_HELD": 4,
}
INDEX_BYTES = COMMON_BYTES | {
    "CAPACITY": 8,
    "COUNT": 8,
    "SEQUENCE": 8,
    "ROWS": layout.NUM_ROWS * layout.ROW_BYTES,
}
ROW_BYTES = {"ROW_STATE": 4, "ROW_ENTRIES": 8}
"""Size of each field whose offset is a constant."""

CONSTANTS = {
    "layout_version": "VERSION",
    "lease_bit+1": "LEASE_BIT",
    "created_ns": "CREATED",
    "error log": "ERRORS",
    "load tickets": "TICKETS",
}
SLOT_CONSTANTS = {
    "block_hash": "SLOT_HASH",
    "parent_tag": "SLOT_PARENT",
    "depth": "SLOT_DEPTH",
    "published_ms": "SLOT_PUBLISHED",
    "group": "SLOT_GROUP",
    "held_until": "SLOT_HELD",
}
ROW_CONSTANTS = {"state": "ROW_STATE", "entries": "ROW_ENTRIES"}
"""Which constant, without ``_OFFSET``, tells where a field begins that is drawn by another name."""


class Field(NamedTuple):
    """One field of a drawing; ``name`` is empty where a cell only states a type."""

    offset: int
    nbytes: int
    name: str
    code: str
    """How a struct format states it."""


def size_of(cell: str) -> int:
    """Bytes of what a cell draws; 0 if the cell states none."""
    if inner := re.search(r"(\d+) x \((.*)\)", cell):
        return int(inner[1]) * sum(map(size_of, inner[2].split(", ")))
    if found := re.search(r"(?:(\d+) x )?(\d+) (?:bytes|text)\b", cell):
        return int(found[1] or 1) * int(found[2])
    if found := re.search(r"\b[iu](16|32|64)\b(?: x (\d+))?", cell):
        return int(found[1]) // 8 * int(found[2] or 1)
    return 8 if re.search(r'"\w{8}"', cell) else 0


def field(offset: int, cell: str) -> Field:
    found = re.match(r"[a-z_ ]+?(?:\+1)?(?= +[iu]\d| +\d| +\"|[,:]|$)", cell)
    name, nbytes = found[0] if found else "", size_of(cell)
    if name == "reserved" or cell in ("u32", "u64"):
        code = f"{nbytes}x"
    else:
        codes = {" u64": "Q", " i64": "q", " u32": "I", " u16": "H"}
        code = codes.get(cell[len(name) :][:4], f"{nbytes}s")
    return Field(offset, nbytes, name, code)


def fields(box: str) -> list[Field]:
    """The fields of a box, whose labels say where their lines begin.  Only what is reserved may
    have any size."""
    drawn: list[Field] = []
    at, any_size = 0, False
    for line in box.splitlines():
        label, border, content = re.fullmatch(r" {4}(\d*) *([|+])(.*)[|+]", line).groups()
        if label:
            assert any_size or at == int(label), line
            at, any_size = int(label), False
        for cell in content.split("|") if border == "|" else ():
            drawn.append(field(at, cell.strip()))
            at += drawn[-1].nbytes
            any_size |= drawn[-1][1:3] == (0, "reserved")
    return drawn


def format_of(drawn: list[Field]) -> str:
    return "<" + "".join(field.code for field in drawn)


def cells(line: str) -> list[Field]:
    return [field(0, cell.strip()) for cell in line.split("|")]


@pytest.mark.parametrize(
    ("box", "sizes", "constants"),
    [
        (TABLE, TABLE_BYTES, CONSTANTS),
        (SLOT, SLOT_BYTES, SLOT_CONSTANTS),
        (INDEX, INDEX_BYTES, CONSTANTS),
        (ROW, ROW_BYTES, ROW_CONSTANTS),
    ],
    ids=["table", "slot", "index", "row"],
)
def test_a_box_draws_each_field_where_it_is(
    box: str, sizes: dict[str, int], constants: dict[str, str]
) -> None:
    drawn = {
        constants.get(name, name.upper().replace(" ", "_")): (offset, nbytes)
        for offset, nbytes, name, _ in fields(box)
    }
    wanted = {name: (getattr(layout, f"{name}_OFFSET"), size) for name, size in sizes.items()}
    assert {name: drawn.get(name) for name in wanted} == wanted


def test_the_fields_whose_offsets_have_constants_are_all_compared() -> None:
    compared = TABLE_BYTES.keys() | SLOT_BYTES.keys() | INDEX_BYTES.keys() | ROW_BYTES.keys()
    assert {f"{name}_OFFSET" for name in compared} == {
        name for name in vars(layout) if name.endswith("_OFFSET")
    }


def test_what_follows_a_header_is_drawn_where_it_is() -> None:
    slot, _ = [field[:2] for field in fields(TABLE) if field.name == "slot"]
    assert slot == (layout.TABLE_HEADER_BYTES, layout.SLOT_BYTES)
    [entries] = [field[:2] for field in fields(INDEX) if field.name == "entries"]
    assert entries == (layout.INDEX_HEADER_BYTES, layout.ENTRY_BYTES)


def test_boxes_are_what_the_struct_formats_say() -> None:
    assert format_of(fields(TABLE)[:6]) == format_of(fields(INDEX)[:6]) == segment._PREFIX.format
    fixed = [field for field in fields(TABLE) if field.name in ("fingerprint", "num_blocks")]
    fixed += [field for field in fields(TABLE) if field.name in ("block_size", "num_ranks")]
    assert format_of(fixed) == table_header.FIXED.format
    error = re.search(r"error log: \d+ x \((.*)\)", TABLE)[1].replace(",", "|")
    assert format_of(cells(error)) == error_log._ENTRY.format
    slot = [field for field in fields(SLOT) if field.nbytes]
    assert format_of(slot) == slot_table._SLOT.format
    assert tuple(field.name for field in slot[1:]) == Slot._fields[3:]
    assert format_of(fields(TRAFFIC)) == traffic._ROW.format
    assert format_of(fields(LOOP)) == progress._LOOP.format


@pytest.mark.parametrize(
    "drawn",
    [fields(ROW), cells(re.search(r"^    row +(.*)$", PAGE, re.MULTILINE)[1])],
    ids=["docstring", "page"],
)
def test_a_row_is_drawn_as_it_is(drawn: list[Field]) -> None:
    assert format_of(drawn) == ROW_STRUCT.format
    names = [field.name.removesuffix("+1") for field in drawn if field.name]
    assert names == list(Row._fields[1:])


@pytest.mark.parametrize(
    "drawn",
    [fields(RECORD), cells(re.search(r"^    (block_hash .*)$", PAGE, re.MULTILINE)[1])],
    ids=["docstring", "page"],
)
def test_a_record_is_drawn_as_it_is(drawn: list[Field]) -> None:
    assert format_of(drawn) == layout._RECORD.format
    assert tuple(field.name for field in drawn) == BlockRecord._fields


@pytest.mark.parametrize("text", [DRAWN, PAGE], ids=["docstring", "page"])
def test_an_entry_is_drawn_as_it_is(text: str) -> None:
    """``test_index.py`` compares what is stored, byte for byte."""
    assert ENTRY_STRUCT.format == "<QIIII"
    halves = r"tag u64 \| place u64 = (\w+)(?::32)? << 32 \| (\w+)(?::32)?\s+"
    halves += r"\| owner u64 = (\w+)(?::32)? << 32 \| (row \+ 1)"
    assert re.findall(halves, text) == [("generation", "block_id", "depth", "row + 1")]


def test_the_word_of_a_slot_is_drawn_as_it_is() -> None:
    shifts = layout.GENERATION_SHIFT, layout.STATE_SHIFT
    [bits] = re.findall(r"^ +63 +(\d+) (\d+) +(\d+) (\d+) +0\n.*\n(.*)$", PAGE, re.MULTILINE)
    assert [int(bit) for bit in bits[:4]] == [shifts[0], shifts[0] - 1, shifts[1], shifts[1] - 1]
    assert re.findall(r"\| +(\w+)", bits[4]) == ["generation", "state", "leases"]
    widths = [("generation", 64 - shifts[0]), ("state", shifts[0] - shifts[1])]
    widths.append(("leases", layout.NUM_LEASE_BITS))
    assert re.findall(r"(\w+):(\d+)", SLOT) == [(name, str(width)) for name, width in widths]


def test_the_page_gives_each_field_its_size() -> None:
    rows = re.findall(r"^\| \d+ \| (\d+) \| `(\w+)_OFFSET`", PAGE, re.MULTILINE)
    sizes = TABLE_BYTES | SLOT_BYTES | INDEX_BYTES
    assert {name: int(nbytes) for nbytes, name in rows} == sizes
    assert f"| 0 | {layout.SLOT_HASH_OFFSET} | | the word" in PAGE


def test_the_page_tells_the_numbers_of_the_layout() -> None:
    for told in (
        f"`{layout.TABLE_MAGIC.decode()}` or `{layout.INDEX_MAGIC.decode()}`",
        f"| {layout.NUM_COUNTERS} counters;",
        f"| {layout.NUM_ERRORS} distinct errors:",
        f", {error_log.TEXT_BYTES} bytes of text each",
        f"| {layout.NUM_TICKETS} load tickets:",
        f"| {layout.NUM_HISTOGRAMS} histograms;",
        f"| {layout.NUM_TRAFFIC_ROWS} rows:",
        f"progress of {layout.NUM_LOOPS} loops",
        f"padded with zeros to {HASH_BYTES} bytes",
        f"| {layout.NUM_ROWS} rows,",
        f"packed records of {layout.RECORD_BYTES} bytes",
        f"kind u16 ({layout.RecordKind.PUBLISH} publish, {layout.RecordKind.RETRACT} retract)",
    ):
        assert told in PAGE


def test_the_docstring_tells_the_numbers_of_the_layout() -> None:
    for told in (
        f'magic "{layout.TABLE_MAGIC.decode()}"',
        f'magic "{layout.INDEX_MAGIC.decode()}"',
        f"plans and batches ({layout.RECORD_BYTES} bytes)",
        f"writer, {layout.TOMBSTONE_BYTES} bytes per block",
        f"Histogram: {layout.NUM_BUCKETS} counts",
    ):
        assert told in DRAWN
