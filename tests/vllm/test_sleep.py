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

from .sleeping_engines import CASES

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def ended(model: Path) -> tuple[dict[str, str], str]:
    """How each case has ended: an exit status or the signal that ended it; and what was written."""
    paths = [str(ROOT / "examples"), str(ROOT), os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(
        [sys.executable, "-m", "tests.vllm.sleeping_engines", str(model)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    return dict(re.findall(r"^case (.+): (\w+)$", done.stdout, re.MULTILINE)), done.stdout


@pytest.mark.multiprocess
@pytest.mark.timeout(600)
@pytest.mark.parametrize("case", CASES)
def test_an_engine_sleeps_and_shares_again(case: str, ended: tuple[dict[str, str], str]) -> None:
    how, said = ended
    assert how.get(case) == "0", said[-8000:]
