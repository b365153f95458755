"""``kvshm kv compare``: its numbers, against numbers worked out by hand."""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path
from typing import Any

import numpy
import pytest

from kvshm._base.fingerprint import fingerprint
from kvshm.tools import cli
from kvshm.tools.kv import block_file
from kvshm.tools.kv.block_file import BlockKey, Description
from kvshm.tools.kv.errors_between import Distance
from kvshm.tools.kv.number_formats import dtype_of

NAN, INF = math.nan, math.inf


def distance(a: list[float], b: list[float], dtype: str = "float32") -> Distance:
    found = Distance()
    found.add(raw(a, dtype), raw(b, dtype), dtype)
    return found


def raw(numbers: list[float], dtype: str) -> Any:
    if dtype == "bfloat16":  # those used here fit: the lower half of the float32 is zero
        packed = b"".join(struct.pack("<f", number)[2:] for number in numbers)
    else:
        packed = struct.pack(f"<{len(numbers)}{'e' if dtype == 'float16' else 'f'}", *numbers)
    return numpy.frombuffer(packed, numpy.uint8)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_measures_are_those_worked_out_by_hand(dtype: str) -> None:
    found = distance([3.0, -4.0, 0.0, 12.0], [3.0, -3.0, 2.0, 12.0], dtype)
    assert (found.count, found.not_finite) == (4, 0)
    assert found.max_abs == 2
    assert found.mean_abs == 0.75
    assert found.rmse == pytest.approx(math.sqrt(5 / 4))
    assert found.snr_db == pytest.approx(10 * math.log10(169 / 5))
    assert found.cosine == pytest.approx((9 + 12 + 144) / (13 * math.sqrt(9 + 9 + 4 + 144)))


def test_equal_numbers_have_no_error() -> None:
    found = distance([1.0, -2.0, NAN, INF, -INF], [1.0, -2.0, NAN, INF, -INF])
    assert (found.max_abs, found.mean_abs, found.rmse) == (0, 0, 0)
    assert (found.snr_db, found.not_finite, found.different_bytes) == (INF, 0, 0)
    assert found.cosine == pytest.approx(1)


def test_a_number_that_only_one_side_has_finite_is_an_infinite_error(
    subtests: pytest.Subtests,
) -> None:
    for pair in [(NAN, 1.0), (1.0, NAN), (INF, 1.0), (INF, -INF), (NAN, INF)]:
        with subtests.test(pair=pair):
            found = distance([2.0, pair[0]], [2.0, pair[1]])
            assert found.not_finite == 1
            assert (found.max_abs, found.mean_abs, found.rmse, found.snr_db) == (
                INF,
                INF,
                INF,
                -INF,
            )
            assert math.isnan(found.cosine)


def test_a_nan_that_both_have_spoils_no_mean() -> None:
    found = distance([1.0, NAN], [2.0, NAN])
    assert (found.max_abs, found.mean_abs, found.rmse) == (1, 1, 1)


@pytest.mark.parametrize(
    ("dtype", "packed"), [("bfloat16", "817f"), ("float16", "017c"), ("float32", "0100807f")]
)
@pytest.mark.filterwarnings("error")
def test_a_signalling_nan_is_a_nan(dtype: str, packed: str) -> None:
    number, found = numpy.frombuffer(bytes.fromhex(packed), numpy.uint8), Distance()
    found.add(number, number, dtype)
    found.add(number, numpy.zeros_like(number), dtype)
    assert (found.count, found.not_finite) == (2, 1)


def test_zero_has_a_direction_only_beside_zero() -> None:
    assert distance([0.0], [0.0]).cosine == 1
    assert distance([0.0], [0.0]).snr_db == INF
    assert math.isnan(distance([0.0], [1.0]).cosine)
    assert distance([0.0], [1.0]).snr_db == -INF


def test_minus_zero_is_zero_but_of_other_bytes() -> None:
    found = distance([0.0], [-0.0])
    assert (found.max_abs, found.different_bytes) == (0, 1)


def test_large_numbers_do_not_overflow() -> None:
    found = distance([3e38, -3e38], [-3e38, 3e38])
    assert found.max_abs == pytest.approx(6e38)
    assert found.cosine == pytest.approx(-1)


def test_several_parts_add_up_to_the_whole() -> None:
    parts = Distance()
    for a, b in ((1.0, 2.0), (5.0, 2.0)):
        parts.add(raw([a], "float32"), raw([b], "float32"), "float32")
    whole = distance([1.0, 5.0], [2.0, 2.0])
    assert vars(parts) == vars(whole)


def test_the_format_is_that_of_the_fields(subtests: pytest.Subtests) -> None:
    for fields, dtype in [
        ({"kv_dtype": "auto", "dtype": "torch.bfloat16"}, "bfloat16"),
        ({"kv_dtype": "torch.float16", "dtype": "torch.bfloat16"}, "float16"),
        ({"dtype": "float32"}, "float32"),
        ({"kv_dtype": "fp8_e4m3", "dtype": "torch.bfloat16"}, "uint8"),
        ({}, "uint8"),
    ]:
        with subtests.test(fields=fields, dtype=dtype):
            assert dtype_of(fields) == dtype


# -- the command


def write(path: Path, rows: dict[int, list[float]], **fields: str) -> Path:
    reported = {"kv_dtype": "auto", "dtype": "torch.float32", **fields}
    keys = [BlockKey(bytes([key]) * 32, bytes(8), 0, 0) for key in rows]
    width = 4 * len(next(iter(rows.values())))
    what = Description(
        fingerprint(reported), reported, "e", "m", 16, [[width]], keys, [[0] * len(keys)]
    )
    data = numpy.stack([raw(row, "float32") for row in rows.values()])
    block_file.write(path, what, [[data]], force=False)
    return path


def compared(*arguments: object) -> int:
    return cli.main(["kv", "compare", *map(str, arguments)])


def test_blocks_are_paired_by_key(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a = write(tmp_path / "a", {1: [1.0, 1.0], 2: [2.0, 2.0], 3: [3.0, 3.0], 4: [0.0, 0.0]})
    b = write(tmp_path / "b", {3: [3.0, 3.0], 9: [9.0, 9.0], 1: [1.0, 1.5], 2: [2.0, 2.0]})
    assert compared(a, b, "--json") == 1
    reported = json.loads(capsys.readouterr().out)
    assert (reported["equal"], reported["dtype"], reported["blocks"]) == (False, "float32", 3)
    assert (reported["only_in_a"], reported["only_in_b"]) == (1, 1)
    (measured,) = reported["tensors"].values()
    assert measured["numbers"] == 6
    assert measured["max_abs"] == 0.5
    assert measured["mean_abs"] == pytest.approx(0.5 / 6)
    assert compared(a, b, "--tolerance", "0.5") == 0
    assert compared(a, b, "--tolerance", "0.49") == 1
    assert compared(a, b, "--dtype", "uint8", "--tolerance", "0.5") == 1
    assert "different: 3 blocks as uint8" in capsys.readouterr().out


def test_equal_files_are_equal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = {1: [1.0, NAN], 2: [INF, 2.0]}
    a, b = write(tmp_path / "a", rows), write(tmp_path / "b", rows)
    assert compared(a, b) == 0
    assert "equal: 2 blocks as float32" in capsys.readouterr().out
    assert compared(a, b, "--json") == 0
    (measured,) = json.loads(capsys.readouterr().out)["tensors"].values()
    assert measured["snr_db"] is None  # infinite


def test_what_cannot_be_compared_is_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a, b = write(tmp_path / "a", {1: [1.0]}), write(tmp_path / "b", {2: [1.0]})
    assert compared(a, b) == 2
    assert "have no block in common" in capsys.readouterr().err
    other = write(tmp_path / "other", {1: [1.0]}, weights="w", model="x")
    assert compared(a, other) == 2
    said = capsys.readouterr().err
    assert "the fingerprints differ: model is '' in the first file, 'x' in the second" in said
    assert "; also weights" in said
    assert compared(a, other, "--any-fingerprint") == 0
    wide = write(tmp_path / "wide", {1: [1.0, 2.0]})
    assert compared(a, wide) == 2
    assert "different sizes or regions" in capsys.readouterr().err


def test_bytes_that_are_no_numbers_of_the_format_are_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    reported = {"dtype": "float32"}
    block = BlockKey(bytes(32), bytes(8), 0, 0)
    what = Description(fingerprint(reported), reported, "e", "m", 16, [[6]], [block], [[0]])
    block_file.write(tmp_path / "a", what, [[numpy.zeros((1, 6), numpy.uint8)]], force=False)
    assert compared(tmp_path / "a", tmp_path / "a") == 2
    assert "no numbers of float32" in capsys.readouterr().err
    assert compared(tmp_path / "a", tmp_path / "a", "--dtype", "bfloat16") == 0


def test_memory_that_ends_while_comparing_is_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise MemoryError

    a = write(tmp_path / "a", {1: [1.0]})
    monkeypatch.setattr(Distance, "add", full)
    assert compared(a, a) == 2
    assert capsys.readouterr().err == "kvshm kv compare: not enough memory\n"
