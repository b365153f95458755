"""The error log of a slot table: what a reader makes of codes, also of another version's and of
damaged entries."""

from __future__ import annotations

import random
import uuid
from collections.abc import Iterator

import pytest

from kvshm._base.ids import Epoch, Fingerprint
from kvshm._shm.error_log import TEXT_BYTES, ErrorCode
from kvshm._shm.layout import ERROR_BYTES, ERRORS_OFFSET, NUM_ERRORS
from kvshm._shm.own_slot_table import TableSpec

from .served import AnyTable


@pytest.fixture
def table() -> Iterator[AnyTable]:
    spec = TableSpec(f"test-{uuid.uuid4().hex[:12]}", "e", 1, 16, 1, Fingerprint(bytes(32)))
    table = AnyTable.create(spec, Epoch(1))
    yield table
    table.close()


def test_numbers_are_never_given_again() -> None:
    assert {code.value: code.number for code in ErrorCode} == {
        "other": 0, "cannot-share": 1, "refused": 2, "no-lease-bit": 3, "load-failed": 4,
        "hook-failed": 5, "weights-written": 6, "other-version": 7, "unknown": -1,
    }  # fmt: skip


def test_an_error_is_read_with_its_code_and_parts(table: AnyTable) -> None:
    table.log_error("b", "dtype", "is 1 here, 2 there", code=ErrorCode.CANNOT_SHARE)
    table.log_error(code=ErrorCode.NO_LEASE_BIT)
    table.log_error("a text")
    differs, no_bit, other = table.errors()
    assert differs.code is ErrorCode.CANNOT_SHARE
    assert differs.about == ("b", "dtype", "is 1 here, 2 there")
    assert differs.text == "cannot share with b: dtype is 1 here, 2 there"
    assert (no_bit.code, no_bit.text) == (ErrorCode.NO_LEASE_BIT, ErrorCode.NO_LEASE_BIT.template)
    assert no_bit.about == ()
    assert (other.code, other.text) == (ErrorCode.OTHER, "a text")


def test_errors_of_one_text_and_two_codes_are_two(table: AnyTable) -> None:
    for code in (ErrorCode.LOAD_FAILED, ErrorCode.HOOK_FAILED, ErrorCode.LOAD_FAILED):
        table.log_error("x", code=code)
    assert {error.code: error.times for error in table.errors()} == {
        ErrorCode.LOAD_FAILED: 2,
        ErrorCode.HOOK_FAILED: 1,
    }


def test_a_part_with_a_zero_byte_is_no_two_parts(table: AnyTable) -> None:
    table.log_error("b\0c", "dtype", "", code=ErrorCode.CANNOT_SHARE)
    (error,) = table.errors()
    assert error.about[:2] == ("b c", "dtype")


@pytest.mark.parametrize("number", [8, 99, 2**32 - 1])
def test_a_code_of_another_version_is_unknown(table: AnyTable, number: int) -> None:
    table.log_error("what it says")
    offset = ERRORS_OFFSET + 4
    table._segment.buffer[offset : offset + 4] = number.to_bytes(4, "little")
    (error,) = table.errors()
    assert (error.code, error.text) == (ErrorCode.UNKNOWN, "what it says")


def test_no_entry_however_damaged_keeps_others_from_being_read(table: AnyTable) -> None:
    size, draw = NUM_ERRORS * ERROR_BYTES, random.Random(1)
    for code in range(9):
        for parts in (b"", b"\0", b"\0\0\0\0x", b"{}\0{0}\0%s", b"\xff" * TEXT_BYTES):
            entry = (1).to_bytes(4, "little") + code.to_bytes(4, "little") + draw.randbytes(16)
            log = (entry + parts.ljust(TEXT_BYTES, b"\0")[:TEXT_BYTES]).ljust(size, b"\0")
            table._segment.buffer[ERRORS_OFFSET : ERRORS_OFFSET + size] = log
            (error,) = table.errors()
            assert error.text == error.text.rstrip()
    for _ in range(200):
        table._segment.buffer[ERRORS_OFFSET : ERRORS_OFFSET + size] = draw.randbytes(size)
        assert len(table.errors()) == NUM_ERRORS
        table.log_error("the next one")
        assert "the next one" in [error.text for error in table.errors()]


def test_a_count_stays_at_its_bound(table: AnyTable) -> None:
    table.log_error("often")
    table._segment.buffer[ERRORS_OFFSET : ERRORS_OFFSET + 4] = b"\xff" * 4
    table.log_error("often")
    (error,) = table.errors()
    assert error.times == 2**32 - 1
