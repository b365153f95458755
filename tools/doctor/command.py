"""``kvshm doctor``: its command line."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from kvshm._ground.rundir import choose_run_directory
from kvshm.config import Config

from ..options import add_selection
from . import bundle, engines, environments, machine
from .facts import Facts
from .findings import Check, Finding, Result

HELP = "check this machine and its engines, with a remedy for what is wrong"
CHECKS: tuple[Check, ...] = (*machine.CHECKS, *environments.CHECKS, *engines.CHECKS)
EXIT_PROBLEM = 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add which engines are meant, and the file for a bug report."""
    parser.description = (
        "Check the machine, the environments of vLLM's processes, the engines of the run directory "
        "and their coordinator. Reads only. Run it as the engines' user, where they run."
    )
    parser.epilog = (
        "exit status: 0 no problem (warnings are none); 1 a problem; 2 wrong command line or "
        "setting, or the file of --bundle exists"
    )
    add_selection(parser, engine=False)
    parser.add_argument(
        "--bundle",
        metavar="FILE",
        type=Path,
        help="write what was found, status and dump to a new .tar.gz for a bug report, without "
        "block hashes, user names, host names and command lines",
    )


def run(asked: argparse.Namespace) -> int:
    """Carry out all checks, print a line for each finding; return the exit status."""
    facts = _facts(asked)
    findings = [finding for check in CHECKS for finding in check.findings(facts)]
    if asked.bundle is not None:
        bundle.write(asked.bundle, facts, [dataclasses.asdict(finding) for finding in findings])
    if asked.json:
        print(json.dumps([dataclasses.asdict(finding) for finding in findings], indent=2))
    else:
        for line in _lines(findings):
            print(line)
    return EXIT_PROBLEM if any(f.result is Result.PROBLEM for f in findings) else 0


def _facts(asked: argparse.Namespace) -> Facts:
    """Where to look.  That the run directory cannot be used is a finding, no error."""
    options = {"--namespace": asked.namespace, "--run-dir": asked.run_dir}
    config = Config.of_place(os.environ, options)
    namespace = config.namespace if "KVSHM_NAMESPACE" in config.given else None
    return Facts(choose_run_directory(config.run_dir, os.environ), namespace, os.environ)


def _lines(findings: Sequence[Finding]) -> Iterator[str]:
    widths = max(len(f.check) for f in findings), max(len(f.result) for f in findings)
    for finding in findings:
        yield f"{finding.result:{widths[1]}}  {finding.check:{widths[0]}}  {finding.text}"
        if finding.remedy:
            yield f"{'':{widths[1]}}  {'':{widths[0]}}  -> {finding.remedy}"
