"""The protocols hold in the models, every mutant is caught, and the page says so."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from .cases import CHECKED, FULL, PROPERTIES, Case
from .mutants import MUTANTS
from .run_models import NOT_CHECKED
from .run_weak_memory import CHECKS
from .search import MODELS, Outcome, SearchFailed, read_report, spin_is_missing
from .stamps import searched
from .tables import found_row, mutant_row

PAGE = Path(__file__).parents[2] / "docs" / "model-checking.md"
CASES = [*CHECKED, *MUTANTS]

needs_spin = pytest.mark.skipif(spin_is_missing(), reason=f"{NOT_CHECKED}: no spin")


@needs_spin
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_search_ends_as_it_should(
    case: Case, record_property: Callable[[str, object], None]
) -> None:
    outcome, content, earlier = searched(case)
    record_property("search", "earlier" if earlier else "now")
    print(f"{outcome.states:,} states, {'by a stamp' if earlier else 'searched'}: {content[:16]}")
    assert outcome.violated == case.violates


def cells(row: str, count: int) -> list[str]:
    return [cell.strip() for cell in row.split("|")[1 : count + 1]]


def test_the_page_shows_every_property_search_and_mutant() -> None:
    """As they are run; what a search went through is another matter: it depends on spin."""
    rows = PAGE.read_text().splitlines()
    found = Outcome("", 0, 0, 0, 0, 0)
    expected = [[f"`{name}`", about] for name, about in PROPERTIES.items()]
    expected += [cells(found_row(case, found), 4) for case in (*CHECKED, *FULL)]
    expected += [cells(mutant_row(c, replace(found, violated=c.violates)), 4) for c in MUTANTS]
    assert [row for row in expected if row not in [cells(r, len(row)) for r in rows]] == []


def test_every_property_catches_a_mutant_or_is_searched_for() -> None:
    caught = {case.violates for case in MUTANTS}
    assert PROPERTIES.keys() - caught == {"runs_for_ever"}
    assert {case.model for case in (*CHECKED, *FULL) if case.loops} == {"slots", "join"}


def test_the_page_shows_every_check_under_weak_memory() -> None:
    rows = [cells(row, 4) for row in PAGE.read_text().splitlines()]
    for check in CHECKS:
        name = f"`{check.scenario}`" + (f" `{check.needed}`" if check.needed else "")
        (results,) = (row[2:] for row in rows if row[:2] == [name, check.about])
        assert all(r.startswith("holds") for r in results) == (not check.needed)


def test_every_switch_of_a_mutant_stands_in_its_model() -> None:
    texts = {path.name: path.read_text() for path in sorted(MODELS.iterdir()) if path.is_file()}
    models = {
        model: "".join(t for name, t in texts.items() if re.match(rf"{model}.*\.(pml|inc)$", name))
        for model in ("slots", "join", "bits")
    }
    missing = [c.name for c in MUTANTS if not re.search(rf"\b{c.name}\b", models[c.model])]
    assert missing == []


@pytest.mark.parametrize("model", ["slots", "join", "bits"])
def test_each_model_has_mutants_enough(model: str) -> None:
    assert sum(case.model == model for case in MUTANTS) >= 8


SOUND = """
State-vector 104 byte, depth reached 163, errors: 0
  1473614 states, stored
  255.637	total actual memory usage
pan: elapsed time 0.89 seconds
"""


def test_a_whole_search_counts() -> None:
    outcome = read_report(CHECKED[0], SOUND)
    assert outcome == Outcome("", 0, 1473614, 163, 256, 0.89)


@pytest.mark.parametrize(
    "mark",
    [
        "error: max search depth too small",
        "Warning: Search not completed",
        "pan: reached -DMEMLIM bound",
    ],
)
def test_a_search_cut_short_does_not_count(mark: str) -> None:
    with pytest.raises(SearchFailed):
        read_report(CHECKED[0], f"{mark}\n{SOUND}")


def test_an_error_without_its_place_does_not_count() -> None:
    with pytest.raises(SearchFailed):
        read_report(MUTANTS[0], SOUND.replace("errors: 0", "errors: 1"))
