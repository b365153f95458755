"""What the tests reach of the product: lines and branches of its Python and of its C.

Usage: WORKERS=4 python -m tests.measure_coverage "which tests, an expression for pytest's -m"

``make coverage`` does that with what ``make test`` runs.  Every process that tests start counts,
unless it is killed before it can write down where it was.  The native module is built a second
time, with counters, below build/coverage; what is installed stays as it is.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
ROOM = ROOT / "build" / "coverage"
NATIVE = ROOT / "kvshm" / "native"
PACKAGES = ("kvshm", "coordinator", "transport", "hooks", "tools")
WORST = 8
COUNTED = ("-O0", "-g", "-fPIC", "--coverage", "-fprofile-update=atomic", "-fprofile-abs-path")
SETTINGS = """
[run]
branch = true
parallel = true
sigterm = true
patch = subprocess, _exit
data_file = {room}/python
source = {sources}
disable_warnings = no-data-collected, module-not-imported, module-not-measured
[report]
exclude_also =
    if TYPE_CHECKING:
    : \\.\\.\\.$
"""
FOUND_FIRST = """
import importlib.util
import sys

class Counted:
    def find_spec(self, name, path=None, target=None):
        if name == "kvshm._native":
            return importlib.util.spec_from_file_location(name, {module!r})

sys.meta_path.insert(0, Counted())
"""
"""As sitecustomize.py: has every process load the module with counters."""


class Reached(NamedTuple):
    """Of one file: how much there is, and how much of it was reached."""

    name: str
    there: int
    reached: int

    @property
    def percent(self) -> float:
        return 100 * self.reached / self.there if self.there else 100.0

    def __str__(self) -> str:
        return (
            f"{self.percent:5.1f} %  {self.there - self.reached:5} of {self.there:5}  {self.name}"
        )


def total(name: str, files: Iterable[Reached]) -> Reached:
    listed = list(files)
    return Reached(name, sum(f.there for f in listed), sum(f.reached for f in listed))


def build_native() -> None:
    """Build the native module with counters.  The folder of its sources is linked beside it,
    where tests look for it."""
    (extension,) = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"][
        "ext-modules"
    ]
    (ROOM / NATIVE.name).symlink_to(NATIVE)
    compiler = [os.environ.get("CC", "cc"), *extension["extra-compile-args"], *COUNTED]
    include = f"-I{sysconfig.get_paths()['include']}"
    objects = []
    for source in extension["sources"]:
        objects.append(f"{Path(source).stem}.o")
        subprocess.run(
            [*compiler, include, "-c", ROOT / source, "-o", objects[-1]], cwd=ROOM, check=True
        )
    module = ROOM / "_native.abi3.so"
    subprocess.run([*compiler, "-shared", *objects, "-o", module], cwd=ROOM, check=True)
    (ROOM / "sitecustomize.py").write_text(FOUND_FIRST.format(module=str(module)))


def run_tests(which: str, workers: str) -> int:
    """Run the tests as ``make test`` does, with counters.  Returns pytest's first failure."""
    sources = ", ".join(str(ROOT / name) for name in PACKAGES)
    settings = ROOM / "settings"
    settings.write_text(SETTINGS.format(room=ROOM, sources=sources))
    paths = [str(ROOM), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    statuses = []
    for run in ((f"{which} and not alone", "-n", workers), (f"{which} and alone",)):
        pytest = [sys.executable, "-m", "coverage", "run", f"--rcfile={settings}", "-m", "pytest"]
        done = subprocess.run(
            [*pytest, "-m", *run, "tests"], cwd=ROOT, env=environment, check=False
        )
        statuses.append(done.returncode)
    return next(filter(None, statuses), 0)


def coverage(*arguments: str) -> None:
    command = [sys.executable, "-m", "coverage", *arguments, f"--rcfile={ROOM / 'settings'}"]
    subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)


def python_files() -> list[Reached]:
    coverage("combine")
    coverage("json", "-o", str(ROOM / "report.json"))
    found = json.loads((ROOM / "report.json").read_text())["files"]
    return [
        Reached(
            name,
            of["summary"]["num_statements"] + of["summary"]["num_branches"],
            of["summary"]["covered_lines"] + of["summary"]["covered_branches"],
        )
        for name, of in sorted(found.items())
    ]


def c_files() -> list[Reached]:
    notes = sorted(path.name for path in ROOM.glob("*.gcda"))
    command = ["gcov", "--json-format", "--stdout", "--branch-probabilities", *notes]
    said = subprocess.run(command, cwd=ROOM, check=True, capture_output=True, text=True).stdout
    files: dict[str, list[dict[str, Any]]] = {}
    for report in map(json.loads, said.splitlines()):
        for file in report["files"]:
            path = Path(file["file"])
            if path.suffix == ".c" and path.is_relative_to(NATIVE):
                files.setdefault(str(path.relative_to(ROOT)), []).extend(file["lines"])
    return [
        Reached(
            name,
            sum(1 + len(line["branches"]) for line in lines),
            sum(
                (line["count"] > 0) + sum(branch["count"] > 0 for branch in line["branches"])
                for line in lines
            ),
        )
        for name, lines in sorted(files.items())
    ]


def main() -> int:
    shutil.rmtree(ROOM, ignore_errors=True)
    ROOM.mkdir(parents=True)
    build_native()
    status = run_tests(sys.argv[1], os.environ["WORKERS"])
    for what, files in (("Python", python_files()), ("C", c_files())):
        print(f"\n{total(what, files)}, lines and branches not reached\nworst files:")
        for file in sorted(files, key=lambda file: file.percent)[:WORST]:
            print(f"  {file}")
    return status


if __name__ == "__main__":
    sys.exit(main())
