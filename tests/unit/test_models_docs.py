"""The page on models names tests that exist, and its table is the generated one."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import model_table
import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/models.md").read_text()
FAMILIES = (ROOT / "tests/vllm/families.py").read_text()
DRAFTERS = (ROOT / "tests/vllm/drafters.py").read_text()
NAMED = sorted(set(re.findall(r"`(tests/[\w/]+\.py)::(\w+)(?:\[([\w-]+)\])?`", PAGE)))
PLANS = model_table.read()
PLANNED = [plan for of in PLANS.values() for plan in of.values() if plan.unplanned is None]


def test_the_tests_that_the_page_names_exist() -> None:
    assert NAMED
    for file, test, family in NAMED:
        assert re.search(rf"^def {test}\(", (ROOT / file).read_text(), re.MULTILINE), test
        if file.endswith("test_drafters.py"):  # family-method
            family, _, method = family.partition("-")
            assert f'"{method}"' in DRAFTERS
        assert not family or f'Family("{family}"' in FAMILIES


def test_the_table_is_the_generated_one() -> None:
    assert runpy.run_path(str(ROOT / "docs/generate.py"))["models"](PAGE) == PAGE, "make docs"


def test_most_decoders_of_each_tested_version_are_planned() -> None:
    tested = set(re.findall(r"^VLLMS := (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert [set(versions.split()) for versions in tested] == [PLANS.keys()]
    for of in PLANS.values():
        assert sum(plan.unplanned is None for plan in of.values()) >= 140


def test_whatever_is_shared_was_shown() -> None:
    unshown = [
        plan.architecture for plan in PLANNED if model_table.proof(plan).startswith("nothing")
    ]
    assert unshown == []


def test_what_is_refused_has_one_sentence() -> None:
    refused = {plan.refusal for plan in PLANNED if plan.refusal}
    assert refused
    for reason in refused:
        assert len(reason) < 160
        assert not re.search(r"[\n(]\w+=|\. ", reason)


@pytest.mark.parametrize(
    ("group", "kinds"),
    [
        ("3 x window of 128 latents, 64 tokens", {"window latents"}),
        ("1 x latents of 128 tokens each and latents of 4 tokens each, 256 tokens", {"latents"}),
        ("1 x keys of an indexer and latents, 128 tokens", {"keys of an indexer", "latents"}),
        ("2 x state (mamba2), 1152 tokens", {"state (mamba2)"}),
        ("1 x chunks of 8192, 128 tokens", {"chunks"}),
    ],
)
def test_kinds_have_no_numbers(group: str, kinds: set[str]) -> None:
    assert model_table.kinds(group) == kinds


def test_one_row_per_plan_and_versions_where_they_differ() -> None:
    plan = model_table.Plan("AForCausalLM", ("1 x latents, 8 tokens",), "always", "why")
    other = model_table.Plan("B", plan.groups, "always", "why")
    rows = model_table.table({"1": {"A": plan, "B": other}, "2": {"A": plan}})
    assert rows == [("1 x latents, 8 tokens", "A, B (1)", "always", "no: why", "")]
