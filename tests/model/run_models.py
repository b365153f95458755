"""Search all cases and print what was found; ``make model`` and ``make model-full``.

Usage: python -m tests.model.run_models [--full] [--jobs N] [--only TEXT] [--write PAGE]

Ends with a line MODEL CHECKED or MODEL NOT CHECKED; the exit status is 0 only for the first,
and for a machine without spin.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from .cases import CHECKED, FULL, Case
from .mutants import MUTANTS
from .search import Outcome, SearchFailed, search, spin_is_missing
from .tables import cost_row, mutant_row, write_tables

NOT_CHECKED = "MODEL NOT CHECKED"


def main() -> int:
    parser = argparse.ArgumentParser(description="Search the models of kvshm's protocols.")
    parser.add_argument("--full", action="store_true", help="the larger configurations")
    parser.add_argument("--jobs", type=int, default=2, help="searches at a time")
    parser.add_argument("--only", default="", help="only cases whose name contains this")
    parser.add_argument("--write", type=Path, help="put the results into this page")
    arguments = parser.parse_args()
    if spin_is_missing():
        print(f"{NOT_CHECKED}: spin is not installed")
        return 0
    chosen = [*FULL] if arguments.full else [*CHECKED, *MUTANTS]
    chosen = [case for case in chosen if arguments.only in case.name]
    results, failed = search_all(chosen, arguments.jobs, lambda line: print(line, flush=True))
    if arguments.write is not None and not failed:
        write_tables(arguments.write, results)
    if failed:
        print(f"{NOT_CHECKED}: {failed} of {len(chosen)} searches did not end as they should")
        return 1
    print(f"MODEL CHECKED: {len(chosen)} searches")
    return 0


def search_all(
    cases: Iterable[Case], jobs: int, say: Callable[[str], None]
) -> tuple[dict[Case, Outcome], int]:
    """Search all cases, ``jobs`` at a time; returns the outcomes and how many are wrong."""
    results: dict[Case, Outcome] = {}
    failed = 0
    with ThreadPoolExecutor(jobs) as pool:
        for case, outcome in pool.map(_attempt, cases):
            if isinstance(outcome, SearchFailed):
                failed += 1
                say(f"FAILED {case.name}: {outcome}")
                continue
            results[case] = outcome
            wrong = outcome.violated != case.violates
            failed += wrong
            say(("WRONG " if wrong else "") + describe(case, outcome))
    return results, failed


def _attempt(case: Case) -> tuple[Case, Outcome | SearchFailed]:
    try:
        return case, search(case)
    except SearchFailed as exc:
        return case, exc


def describe(case: Case, outcome: Outcome) -> str:
    if outcome.violated != case.violates:
        return f"{case.name}: {outcome}, expected {case.violates or 'nothing'}"
    return mutant_row(case, outcome) if case.violates else cost_row(case, outcome)


if __name__ == "__main__":
    sys.exit(main())
