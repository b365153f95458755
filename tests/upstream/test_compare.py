"""What fails `make test-upstream`: on made-up outcomes, without vLLM."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from .compare import as_text, lines_of, offences, read
from .selection import Selection

FILE, TEST = "tests/a/test_a.py", "tests/a/test_a.py::test_one"
CHOSEN = Selection((FILE,), (), (), {}, {}, {}, {})
PASSED: Mapping[str, Any] = {
    f"{TEST}[{i}]": {"outcome": "passed", "attached": i, "published": 3 * i} for i in (0, 1)
}


def changed(**told: Any) -> dict[str, Any]:
    """The outcomes, but for those of one test."""
    return {**PASSED, f"{TEST}[1]": {**PASSED[f"{TEST}[1]"], **told}}


def without(test: str) -> dict[str, Any]:
    return {name: told for name, told in PASSED.items() if name != test}


LIST = read(as_text(lines_of(PASSED, PASSED)))


def test_the_list_is_read_as_it_is_written() -> None:
    assert LIST == {TEST: "2 passed; attached 1; published 3"}
    assert not list(offences(PASSED, PASSED, LIST, CHOSEN))


@pytest.mark.parametrize(
    ("runs", "listed", "said"),
    [
        ((PASSED, changed(outcome="failed")), LIST, f"{TEST}[1]: passed without kvshm, failed"),
        ((PASSED, without(f"{TEST}[1]")), LIST, f"{TEST}[1]: passed without kvshm, missing"),
        ((without(f"{TEST}[1]"),) * 2, LIST, f"{TEST}: 1 passed; attached 0; in the list: 2"),
        ((changed(outcome="skipped"),) * 2, LIST, f"{TEST}: 1 passed, 1 skipped; attached 1; pub"),
        ((PASSED, PASSED), LIST | {"b::gone": "1 passed"}, "b::gone: has not run; in the list"),
        ((PASSED, PASSED), {}, f"{TEST}: 2 passed; attached 1; published 3; in the list: not"),
        ((PASSED, changed(published=0)), LIST, f"{TEST}: 2 passed; attached 1; in the list: 2"),
        ((PASSED, changed(published=4)), LIST, f"{TEST}: 2 passed; attached 1; published 4; in"),
        (
            (PASSED, changed(attached=0)),
            LIST,
            f"{FILE}: no scheduler and no KV cache manager was attached",
        ),
    ],
)
def test_what_is_not_as_listed_is_named(
    runs: tuple[Mapping[str, Any], Mapping[str, Any]], listed: Mapping[str, str], said: str
) -> None:
    found = list(offences(*runs, listed, CHOSEN))
    assert any(offence.startswith(said) for offence in found), found


def test_a_difference_that_has_a_reason_must_still_be_as_listed() -> None:
    chosen = Selection((FILE,), (), (), {}, {}, {TEST: "vLLM does so with any connector"}, {})
    runs = PASSED, changed(outcome="failed")
    listed = lines_of(*runs)
    assert listed == {TEST: "2 passed; 1 passed, 1 failed with; attached 1; published 3"}
    assert not list(offences(*runs, listed, chosen))
    assert list(offences(PASSED, PASSED, listed, chosen))


def test_a_file_whose_connectors_kvshm_must_refuse_shows_a_refusal() -> None:
    chosen = Selection((), (FILE,), (), {}, {}, {}, {})
    said = f"{FILE}: no scheduler and no KV cache manager was unshared"
    assert list(offences(PASSED, PASSED, LIST, chosen)) == [said]
    refused = changed(unshared=1)
    assert not list(offences(PASSED, refused, lines_of(PASSED, refused), chosen))


def test_each_of_vllms_files_runs_or_has_a_reason(tmp_path: Path) -> None:
    names = [f"tests/v1/core/deep/test_{name}.py" for name in ("chosen", "vendor_a", "new")]
    for file in (tmp_path / name for name in (*names, "tests/v1/core/deep/conftest.py")):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    chosen = Selection((), (), (names[0],), {}, {}, {}, {"tests/v1/core/*/test_vendor_*.py": "why"})
    assert list(chosen.unexplained(tmp_path)) == [names[2]]
