"""Check the C core itself under weak memory with GenMC, and that each order is needed.

Usage: python -m tests.model.run_weak_memory [path of genmc]

GenMC is no package of a system: this is run by hand when the core's atomics change, and
docs/model-checking.md holds the outcome.  Exit status 0 if all is as expected.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).parent
SLOTS = (HERE / "weak_memory.c",)
INDEX = ("-O1", HERE / "weak_index.c")
CORE = HERE.parents[1] / "kvshm" / "native"
MEMORY_MODELS = ("rc11", "imm")


class Check(NamedTuple):
    """One run of GenMC; ``needed``: removing this must break the scenario."""

    scenario: str
    about: str
    needed: str = ""


CHECKS = (
    Check("REUSE", "lease, copy, re-check against retract, force, new bytes, publish"),
    Check("REUSE BIT=-1", "the same without a lease bit"),
    Check("WAIT", "leased bytes against an exporter that waits: no data race"),
    Check("RANKS", "the same with two ranks, the last one releases"),
    Check("LIFE", "lease, copy, re-check against a life word zeroed before new bytes"),
    Check("SCAN", "a scan's seq-lock read against retract and publish"),
    Check("INDEX", "a lookup's seq-lock read of an entry that is retracted and published anew"),
    Check("INDEX SHIFTED", "the same of an entry that a removal shifts back"),
    Check("REUSE", "no fence before reuse", "DROPPED=memory_order_seq_cst"),
    Check("LIFE", "no fence after a life word", "DROPPED=memory_order_seq_cst"),
    Check("SCAN", "no fence before reuse", "DROPPED=memory_order_seq_cst"),
    Check("REUSE", "no fence in the re-check", "DROPPED=memory_order_acquire"),
    Check("LIFE", "no fence in the re-check", "DROPPED=memory_order_acquire"),
    Check("SCAN", "no fence in the scan", "DROPPED=memory_order_acquire"),
    Check(
        "REUSE", "publish, lease, retract, force with relaxed CAS", "DROPPED=memory_order_acq_rel"
    ),
    Check("WAIT", "lease, drain with relaxed CAS", "DROPPED=memory_order_acq_rel"),
    Check("RANKS", "tickets relaxed", "DROPPED=memory_order_acq_rel"),
    Check("WAIT", "release with a relaxed CAS", "DROPPED=memory_order_release"),
    Check("REUSE BIT=-1", "word loaded relaxed", "LOADS_RELAXED"),
    Check("SCAN", "word loaded relaxed", "LOADS_RELAXED"),
    Check("INDEX", "no fence after odd", "DROPPED=memory_order_release"),
    Check("INDEX", "no fence before the second look", "DROPPED=memory_order_acquire"),
    Check("INDEX", "sequence loaded relaxed", "LOADS_RELAXED"),
    Check("INDEX", "even stored relaxed", "STORES_RELAXED"),
    Check("INDEX SHIFTED", "no fence after odd", "DROPPED=memory_order_release"),
    Check("INDEX SHIFTED", "no fence before the second look", "DROPPED=memory_order_acquire"),
    Check("INDEX SHIFTED", "sequence loaded relaxed", "LOADS_RELAXED"),
    Check("INDEX SHIFTED", "even stored relaxed", "STORES_RELAXED"),
)


def run(genmc: str, check: Check, memory_model: str) -> str:
    """One run's result in words.  Raises ValueError if GenMC gave none."""
    defines = [f"-D{d}" for d in f"{check.scenario} {check.needed}".split()]
    limits = ["--disable-estimation", "--disable-warn-on-unfreed-memory", "-unroll=6"]
    source = INDEX if check.scenario.startswith("INDEX") else SLOTS
    command = [genmc, f"--{memory_model}", *limits, "--", "-w", f"-I{CORE}", *defines, *source]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    report = done.stdout + done.stderr
    executions = re.search(r"complete executions explored: (\d+)", report)
    if executions is None:
        raise ValueError(report[-2000:])
    error = re.search(r"Error: (.*)", report)
    if error is not None:
        return error[1].rstrip("!")
    if "blocked executions" in report:
        raise ValueError(f"the search was cut short: {report[-2000:]}")
    return f"holds in {executions[1]} executions"


def main() -> int:
    genmc = sys.argv[1] if len(sys.argv) > 1 else "genmc"
    wrong = 0
    for check in CHECKS:
        results = [run(genmc, check, memory_model) for memory_model in MEMORY_MODELS]
        # IMM orders what C11 leaves open: a find in one of the two is enough.
        held = [result.startswith("holds") for result in results]
        as_expected = not all(held) if check.needed else all(held)
        wrong += not as_expected
        scenario = f"`{check.scenario}`" + (f" `{check.needed}`" if check.needed else "")
        verdict = "" if as_expected else " WRONG"
        print(f"| {scenario} | {check.about} | {' | '.join(results)} |{verdict}")
    return wrong != 0


if __name__ == "__main__":
    sys.exit(main())
