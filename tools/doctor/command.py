"""``kvshm doctor``: one line per check, with what to do; a file for a bug report."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

from ..options import add_selection, given_namespace, read_place
from ..output import aligned, clean, note, show
from .bundle import write_bundle
from .checks import BAD, Findings, Result, as_json, run_checks
from .evidence import gather
from .registry import CHECKS

HELP = "check the node: what is wrong, and what to do about it"
EXIT_WELL, EXIT_PROBLEMS = range(2)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Check the machine, the run directory and the engines in it; print one line per check, and "
        "what to do where something is wrong. Changes nothing, and needs no running engine. "
        "Of engines' environments it reads only those of its own user."
    )
    parser.epilog = (
        "exit status: 0 no problem (there may be warnings); 1 at least one problem; 2 wrong "
        "command line or setting"
    )
    add_selection(parser, engine=False)
    parser.add_argument(
        "--bundle",
        type=Path,
        metavar="FILE",
        help="write a tar.gz for a bug report: what was found, the reports of kvshm status and "
        "kvshm dump, versions, settings and limits; without block hashes, command lines, the names "
        "of users and of the machine. FILE must not be there yet",
    )


def run(asked: argparse.Namespace) -> int:
    config, run_dir = read_place(asked)
    evidence = gather(run_dir, given_namespace(config))
    findings = run_checks(CHECKS, evidence)
    show(as_json(findings), lambda: aligned(_rows(findings)), as_json=asked.json)
    if asked.bundle is not None:
        write_bundle(asked.bundle, evidence, findings)
        note(f"wrote {asked.bundle}; read it before you send it")
    found = {finding.result for _, finding in findings}
    return EXIT_PROBLEMS if Result.PROBLEM in found else EXIT_WELL


def _rows(findings: Findings) -> Iterator[tuple[str, str, str]]:
    for check, found in findings:
        yield f"{found.result.value:14}", check.name, clean(found.text)
        if found.result in BAD:
            yield "", "", f"remedy: {check.remedy}"
