"""The tables of docs/model-checking.md: written from results, and compared with them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from .cases import CHECKED, FULL, PROPERTIES, Case
from .mutants import MUTANTS
from .search import Outcome

HEADS = {
    "properties": ("Property", "In words"),
    "checked": ("Search", "Model", "What", "Sizes", "States", "Depth"),
    "full": ("Search", "Model", "What", "Sizes", "States", "Depth", "MB", "Seconds"),
    "mutants": ("Mutant", "Model", "What is wrong", "Caught by", "Steps", "States"),
}


def found_row(case: Case, outcome: Outcome) -> str:
    kind = f"{case.about} (circles)" if case.loops else case.about
    model = " ".join((case.model, case.config)).strip()
    return _row(case.name, model, kind, case.settings, f"{outcome.states:,}", outcome.depth)


def cost_row(case: Case, outcome: Outcome) -> str:
    """The same, with what it cost here."""
    return f"{found_row(case, outcome)} {outcome.memory_mb:,} | {outcome.seconds:.0f} |"


def mutant_row(case: Case, outcome: Outcome) -> str:
    """How a mutant was caught: the same on every machine."""
    model = " ".join((case.model, case.config, case.settings)).strip()
    return _row(
        f"`{case.name}`", model, case.about, outcome.violated, outcome.steps, f"{outcome.states:,}"
    )


def _row(*cells: object) -> str:
    return "| " + " | ".join(str(cell) for cell in cells) + " |"


def write_tables(page: Path, results: Mapping[Case, Outcome]) -> None:
    """Replace the tables of the page for which all results are at hand."""
    text = page.read_text()
    text = _replace(text, "properties", [_row(f"`{n}`", s) for n, s in PROPERTIES.items()])
    for name, cases, row in (
        ("checked", CHECKED, found_row),
        ("full", FULL, cost_row),
        ("mutants", MUTANTS, mutant_row),
    ):
        if all(case in results for case in cases):
            text = _replace(text, name, [row(case, results[case]) for case in cases])
    page.write_text(text)


def _replace(text: str, name: str, rows: list[str]) -> str:
    begin, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->\n"
    before, rest = text.split(begin)
    _, after = rest.split(end)
    head = HEADS[name]
    table = "\n".join([_row(*head), "|" + " --- |" * len(head), *rows, ""])
    return before + begin + table + end + after
