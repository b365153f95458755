"""What the native code fetches ahead, the compiler leaves in: gcc 12 takes a function that does
nothing but fetch for one without effect, and leaves its calls out, without a word."""

from __future__ import annotations

import re
import subprocess
import sysconfig
import tomllib
from pathlib import Path

import pytest

from .test_sanitizers import CORE, compiler

PROJECT = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
(MODULE,) = PROJECT["tool"]["setuptools"]["ext-modules"]
SPELLED = re.compile(r"\b__builtin_prefetch\(")
MADE = re.compile(r"^\s+(?:prefetch|prfm)", re.M)  # x86, Arm

FETCHING = [path for path in sorted(CORE.glob("*.c")) if SPELLED.search(path.read_text())]


def assembly(source: Path) -> str:
    include = sysconfig.get_paths()["include"]
    command = [compiler(), *MODULE["extra-compile-args"], "-fPIC", f"-I{include}"]
    done = subprocess.run(
        [*command, "-S", "-o", "-", str(source)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_lookups_fetch_ahead() -> None:
    assert {"lookup.c", "py_index.c"} <= {path.name for path in FETCHING}


@pytest.mark.parametrize("source", FETCHING, ids=lambda path: path.name)
def test_no_prefetch_is_left_out(source: Path) -> None:
    spelled = len(SPELLED.findall(source.read_text()))
    assert len(MADE.findall(assembly(source))) >= spelled
