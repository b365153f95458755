"""One search: spin writes a verifier, the C compiler builds it, its report is read.

A search counts only if it went through the whole state space: no hashing away of states
(bitstate), no depth or memory limit reached.  Mutants are searched breadth first, so that
the counterexample is a shortest one.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from .cases import Case

MODELS = Path(__file__).parent
MEMORY_MB = 2900
MAX_DEPTH = 1_000_000
CUT_SHORT = ("max search depth too small", "Search not completed", "reached -DMEMLIM", "hint:")


class SearchFailed(Exception):
    """The tools did not run, or the search was cut short."""


@dataclass(frozen=True)
class Outcome:
    violated: str
    steps: int
    states: int
    depth: int
    memory_mb: int
    seconds: float


def spin_is_missing() -> bool:
    """Whether nothing can be searched here."""
    return shutil.which("spin") is None


def search(case: Case) -> Outcome:
    """Search one case.  Blocks for seconds to minutes; raises SearchFailed."""
    with tempfile.TemporaryDirectory(prefix="kvshm-model-") as folder:
        reports = [_run(command, Path(folder)) for command in commands(case)]
        return read_report(case, reports[-1])


def commands(case: Case) -> list[list[str]]:
    """What is run, one after the other; the last one searches."""
    model = (MODELS / f"{case.model}.pml").as_posix()
    calm = ["-DLIVENESS"] if case.loops and case.model == "join" else []
    return [
        ["spin", "-a", *case.defines, *calm, model],
        ["cc", "-w", "-o", "pan", *_options(case), "pan.c"],
        ["./pan", *_flags(case), f"-m{MAX_DEPTH}"],
    ]


def _options(case: Case) -> list[str]:
    """Compiler options: how to search."""
    options = ["-DCOLLAPSE", f"-DMEMLIM={MEMORY_MB}"]
    if case.violates:
        return [*options, "-O0", "-DSAFETY", "-DBFS"]
    if not case.loops:
        return [*options, "-O1", "-DSAFETY"]
    return [*options, "-O1", *([] if case.model == "join" else ["-DNP"])]


def _flags(case: Case) -> list[str]:
    if not case.loops:
        return []
    return ["-a"] if case.model == "join" else ["-l"]


def _run(command: list[str], work: Path) -> str:
    done = subprocess.run(
        command, cwd=work, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    if done.returncode:
        raise SearchFailed(f"{' '.join(command)}: {done.stdout[-2000:]}")
    return done.stdout


def read_report(case: Case, report: str) -> Outcome:
    """Read the verifier's report.  Raises SearchFailed if the search proves nothing."""
    errors = _number(r"errors: (\d+)", report)
    cut = [mark for mark in CUT_SHORT if mark in report]
    if cut and not errors:
        raise SearchFailed(f"{case.name}: {cut[0]}: {report[-2000:]}")
    found = re.search(r"pan:1: (.*) \(at depth (\d+)\)", report)
    if bool(errors) != bool(found):
        raise SearchFailed(f"{case.name}: {report[-2000:]}")
    return Outcome(
        violated=_property(found[1]) if found else "",
        steps=int(found[2]) if found else 0,
        states=int(_number(r"(\d+) states, stored", report)),
        depth=int(_number(r"depth reached (\d+)", report)),
        memory_mb=round(_number(r"([\d.]+)\s+total actual memory", report)),
        seconds=_number(r"elapsed time ([\d.e+-]+) seconds", report),
    )


def _property(message: str) -> str:
    """The property that the verifier's message speaks of."""
    asserted = re.search(r"!\((\w+)\)", message)
    if asserted:
        return asserted[1]
    if "invalid end state" in message:
        return "waits_for_ever"
    if "cycle" in message:
        return "runs_for_ever"
    raise SearchFailed(f"unknown complaint: {message}")


def _number(pattern: str, report: str) -> float:
    found = re.search(pattern, report)
    if found is None:
        raise SearchFailed(f"no {pattern!r} in the report: {report[-2000:]}")
    return float(found[1])
