"""What docs/layout.md draws and says of shared memory is what the constants and struct formats
say; test_layout_docs.py compares the constants themselves."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

from kvshm._base.ids import HASH_BYTES
from kvshm._replica.index_layout import ENTRY_STRUCT, ROW_STRUCT, Row
from kvshm._shm import error_log, layout, progress, segment, slot_table, table_header, traffic
from kvshm._shm.layout import BlockRecord

PAGE = (Path(__file__).parents[2] / "docs" / "layout.md").read_text("utf-8")

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
    "KEEPS": 8,
    "WITHDRAWN": 8,
    "IN_DRAIN": 8,
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


class Field(NamedTuple):
    """One field of a drawing; ``name`` is empty where a cell only states a type."""

    nbytes: int
    name: str
    code: str
    """How a struct format states it."""


def size_of(cell: str) -> int:
    """Bytes of what a cell draws."""
    if found := re.search(r"(\d+) (?:bytes|text)\b", cell):
        return int(found[1])
    return int(re.search(r"\b[iu](16|32|64)\b", cell)[1]) // 8


def field(cell: str) -> Field:
    found = re.match(r"[a-z_ ]+?(?:\+1)?(?= +[iu]\d| +\d| +\(|$)", cell)
    name, nbytes = found[0] if found else "", size_of(cell)
    if name == "reserved" or cell in ("u32", "u64"):
        code = f"{nbytes}x"
    else:
        codes = {" u64": "Q", " i64": "q", " u32": "I", " u16": "H"}
        code = codes.get(cell[len(name) :][:4], f"{nbytes}s")
    return Field(nbytes, name, code)


def format_of(drawn: list[Field]) -> str:
    return "<" + "".join(field.code for field in drawn)


def drawing(name: str) -> list[Field]:
    """The fields of the page's drawing with this name, which may go on in further lines."""
    [drawn] = re.findall(rf"^    {name} +((?:.*\n {{5,}}\|)*.*)$", PAGE, re.MULTILINE)
    return [field(cell.strip()) for cell in drawn.split("|")]


def format_in(sizes: dict[str, int]) -> str:
    """The struct format of consecutive fields of these sizes, as the page's tables give them."""
    text = {"MAGIC", "FINGERPRINT", "SLOT_HASH"}
    codes = {8: "Q", 4: "I"}
    return "".join(f"{n}s" if name in text else codes[n] for name, n in sizes.items())


def test_the_fields_whose_offsets_have_constants_are_all_compared() -> None:
    compared = TABLE_BYTES.keys() | SLOT_BYTES.keys() | INDEX_BYTES.keys() | ROW_BYTES.keys()
    assert {f"{name}_OFFSET" for name in compared} == {
        name for name in vars(layout) if name.endswith("_OFFSET")
    }


def test_drawings_and_tables_are_what_the_struct_formats_say() -> None:
    assert f"<{format_in(COMMON_BYTES)}" == segment._PREFIX.format
    fixed = ("FINGERPRINT", "NUM_BLOCKS", "BLOCK_SIZE", "NUM_RANKS")
    assert f"<{format_in({name: TABLE_BYTES[name] for name in fixed})}" == table_header.FIXED.format
    assert f"<Q{format_in(SLOT_BYTES)}" == slot_table._SLOT.format
    assert format_of(drawing("error")) == error_log._ENTRY.format
    assert format_of(drawing("traffic")) == traffic._ROW.format
    assert format_of(drawing("loop")) == progress._LOOP.format


def test_a_row_is_drawn_as_it_is() -> None:
    drawn = drawing("row")
    assert format_of(drawn) == ROW_STRUCT.format
    names = [field.name.removesuffix("+1") for field in drawn if field.name]
    assert names == list(Row._fields[1:])
    starts = {f.name: sum(g.nbytes for g in drawn[:i]) for i, f in enumerate(drawn)}
    assert (starts["state"], starts["entries"]) == (
        layout.ROW_STATE_OFFSET,
        layout.ROW_ENTRIES_OFFSET,
    )


def test_a_record_is_drawn_as_it_is() -> None:
    drawn = drawing("record")
    assert format_of(drawn) == layout._RECORD.format
    assert tuple(field.name for field in drawn) == BlockRecord._fields


def test_an_entry_is_drawn_as_it_is() -> None:
    """``test_index.py`` compares what is stored, byte for byte."""
    assert ENTRY_STRUCT.format == "<QII"
    parts = r"tag u64 \| place u64 = (\w+) << 32 \| (row \+ 1) << (\d+) \| (\w+)"
    shift = str(layout.ENTRY_ROW_SHIFT)
    assert re.findall(parts, PAGE) == [("generation", "row + 1", shift, "block_id")]
    assert layout.MAX_BLOCKS == 1 << layout.ENTRY_ROW_SHIFT
    assert (layout.NUM_ROWS + 1) << layout.ENTRY_ROW_SHIFT <= 1 << 32


def test_the_word_of_a_slot_is_drawn_as_it_is() -> None:
    shifts = layout.GENERATION_SHIFT, layout.STATE_SHIFT
    [bits] = re.findall(r"^ +63 +(\d+) (\d+) +(\d+) (\d+) +0\n.*\n(.*)$", PAGE, re.MULTILINE)
    assert [int(bit) for bit in bits[:4]] == [shifts[0], shifts[0] - 1, shifts[1], shifts[1] - 1]
    assert re.findall(r"\| +(\w+)", bits[4]) == ["generation", "state", "leases"]


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
        f"A histogram has {layout.NUM_BUCKETS} counts",
        f"kind u16 ({layout.RecordKind.PUBLISH} publish, {layout.RecordKind.RETRACT} retract)",
    ):
        assert told in PAGE
