"""Sleep and wake: nothing touches memory that sleeps, in any order in which vLLM wakes it up, and
an engine shares before and after."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("vllm")

from .sleeping_cases import CASES

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def ended(model: Path, request: pytest.FixtureRequest) -> dict[str, tuple[str, str]]:
    """What each case has written, and how it has ended: an exit status, or the signal that ended
    it."""
    asked = [i.callspec.params["case"] for i in request.session.items if hasattr(i, "callspec")
             and "case" in i.callspec.params and i.path == request.path]  # fmt: skip
    paths = [str(ROOT / "examples"), str(ROOT), os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(
        [sys.executable, "-m", "tests.vllm.sleeping_cases", str(model), *asked],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    found = re.finditer(r"(.*?)^case ([^\n]+): (\w+)$", done.stdout, re.MULTILINE | re.DOTALL)
    return {case: (said, how) for said, case, how in map(re.Match.groups, found)}


RARE = {case for case in CASES if "level 2, imports" in case or "no reset" in case} - {
    "all, level 1, imports, no reset"
}
"""Other orders of what one case shows already."""


@pytest.mark.multiprocess
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "case", [pytest.param(c, marks=pytest.mark.long) if c in RARE else c for c in CASES]
)
def test_an_engine_sleeps_and_shares_again(case: str, ended: dict[str, tuple[str, str]]) -> None:
    said, how = ended.get(case, ("", "not at all"))
    assert how == "0", said[-8000:]
