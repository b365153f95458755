"""A stamp stands for a search of exactly these files, and for no search that went wrong."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from . import search as searching
from . import stamps
from .cases import CHECKED, Case
from .mutants import MUTANTS
from .search import Outcome, SearchFailed, search
from .stamps import content_of, files_of, searched
from .test_models import needs_spin

SMALL = next(case for case in MUTANTS if case.model == "bits")


class Counting:
    def __init__(self) -> None:
        self.made = 0

    def __call__(self, case: Case) -> Outcome:
        self.made += 1
        return search(case)


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    copy = tmp_path / "models"
    shutil.copytree(searching.MODELS, copy, ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    monkeypatch.setattr(searching, "MODELS", copy)
    return copy


@needs_spin
def test_a_search_is_made_again_when_a_byte_of_its_model_has_changed(
    models: Path, tmp_path: Path
) -> None:
    counting, folder = Counting(), tmp_path / "stamps"
    first = searched(SMALL, folder, counting)
    again = searched(SMALL, folder, counting)
    assert (counting.made, first.earlier, again.earlier) == (1, False, True)
    assert again.outcome == first.outcome
    model = models / f"{SMALL.model}.pml"
    model.write_text(model.read_text() + "\n")
    changed = searched(SMALL, folder, counting)
    assert (counting.made, changed.earlier) == (2, False)
    assert changed.outcome.states == first.outcome.states
    assert searched(SMALL, folder, counting).earlier


@needs_spin
def test_a_search_that_did_not_end_as_it_should_leaves_no_stamp(
    models: Path, tmp_path: Path
) -> None:
    counting, folder = Counting(), tmp_path / "stamps"
    expected_otherwise = replace(SMALL, violates="runs_for_ever")
    for _ in range(2):
        assert searched(expected_otherwise, folder, counting).outcome.violated == SMALL.violates
    (models / f"{SMALL.model}.pml").write_text("no model")
    for _ in range(2):
        with pytest.raises(SearchFailed):
            searched(SMALL, folder, counting)
    assert counting.made == 4
    assert not folder.exists()


@pytest.mark.parametrize("case", [CHECKED[0], SMALL], ids=lambda case: case.name)
def test_every_file_of_a_model_counts_and_no_other(models: Path, case: Case) -> None:
    content, files = content_of(case), files_of(models / f"{case.model}.pml")
    named = {path for path in models.iterdir() if path.name.startswith(case.model)}
    assert set(files) == named
    for path in sorted(models.iterdir()):
        text = path.read_text()
        path.write_text(text.replace(" ", "  ", 1))
        assert (content_of(case) != content) == (path in files), path.name
        path.write_text(text)
    assert content_of(case) == content


def test_each_search_has_a_content_of_its_own_that_tools_are_part_of(
    models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    contents = {case: content_of(case) for case in (*CHECKED, *MUTANTS)}
    assert len(set(contents.values())) == len(contents)
    monkeypatch.setattr(stamps, "version", lambda *command: b"another " + command[0].encode())
    assert not {content_of(case) for case in contents} & set(contents.values())
