"""``kvshm doctor``: one line per check, with what to do; a file for a bug report."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from pathlib import Path

from kvshm._base.rundir import choose_run_directory
from kvshm.config import Config

from ..options import add_selection
from ..output import clean, note, show
from .bundle import write_bundle
from .checks import Result, run_checks
from .evidence import gather
from .registry import CHECKS
from .report import BAD, Findings, as_json

HELP = "check the node: what is wrong, and what to do about it"
EXIT_WELL, EXIT_PROBLEMS = range(2)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add which engines are meant, and where to write a bundle."""
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
    """Check, print, write the bundle; return the exit status."""
    config = Config.of_place(
        os.environ, {"--namespace": asked.namespace, "--run-dir": asked.run_dir}
    )
    run_dir = choose_run_directory(config.run_dir, os.environ)
    namespace = config.namespace if "KVSHM_NAMESPACE" in config.given else None
    evidence = gather(run_dir, namespace)
    findings = run_checks(CHECKS, evidence)
    show(as_json(findings), lambda: _lines(findings), as_json=asked.json)
    if asked.bundle is not None:
        write_bundle(asked.bundle, evidence, findings)
        note(f"wrote {asked.bundle}; read it before you send it")
    found = {finding.result for _, finding in findings}
    return EXIT_PROBLEMS if Result.PROBLEM in found else EXIT_WELL


def _lines(findings: Findings) -> Iterator[str]:
    width = max(len(check.name) for check, _ in findings)
    for check, found in findings:
        text = clean(found.text)
        yield f"{found.result.value:14}  {check.name:{width}}  {text}"
        if found.result in BAD:
            yield f"{'':14}  {'':{width}}  remedy: {check.remedy}"
