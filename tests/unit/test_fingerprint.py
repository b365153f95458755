"""The fingerprint: equal fields share, any difference is named."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvshm._base.fingerprint import FIELDS, MODEL, WEIGHTS, differences, fingerprint

fields = st.dictionaries(st.text(max_size=8), st.text(max_size=8), max_size=5)
SOME = {name: f"value of {name}" for name in FIELDS}


@given(fields, fields)
def test_fingerprints_are_equal_exactly_if_the_fields_are(
    a: dict[str, str], b: dict[str, str]
) -> None:
    assert (fingerprint(a) == fingerprint(b)) == (a == b)
    assert bool(differences(a, b)) == (a != b)


def test_it_is_32_bytes_and_knows_no_order() -> None:
    assert len(fingerprint(SOME)) == 32
    assert fingerprint(dict(reversed(SOME.items()))) == fingerprint(SOME)


def test_the_border_between_name_and_value_counts() -> None:
    assert fingerprint({"ab": "c"}) != fingerprint({"a": "bc"})
    assert fingerprint({"a": "b", "c": "d"}) != fingerprint({"a": "bc", "": "d"})


def test_another_process_computes_the_same() -> None:
    code = f"from kvshm._base.fingerprint import *; print(fingerprint({SOME!r}).hex())"
    reported = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout
    assert reported.strip() == fingerprint(SOME).hex()


def test_each_field_counts_and_is_named(subtests: pytest.Subtests) -> None:
    for name in FIELDS:
        with subtests.test(name=name):
            other = SOME | {name: "another"}
            assert fingerprint(other) != fingerprint(SOME)
            assert differences(SOME, other) == {name: (f"value of {name}", "another")}


def test_the_most_telling_difference_comes_first() -> None:
    other = SOME | {WEIGHTS: "w", MODEL: "m", "from the future": "1"}
    assert list(differences(SOME, other)) == [MODEL, WEIGHTS, "from the future"]
    assert differences(SOME, other)["from the future"] == ("", "1")


def test_nothing_differs_from_itself() -> None:
    assert differences(SOME, dict(SOME)) == {}
