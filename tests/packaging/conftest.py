"""What is shipped, built once: a source archive of a clean copy of this tree, its wheel."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NOT_SOURCE = shutil.ignore_patterns(".*", "build", "dist", "*.egg-info", "*.so", "__pycache__")

PYTHONS = os.environ.get("PYTHONS", "").split() or [sys.executable]

Run = Callable[..., str]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent == Path(__file__).parent:
            item.add_marker(pytest.mark.multiprocess)
            item.add_marker(pytest.mark.long)
            item.add_marker(pytest.mark.timeout(1200))


@pytest.fixture(scope="session")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("packaging")


@pytest.fixture(scope="session")
def run(work: Path) -> Run:
    """Run a command outside of the tree and return what it prints; its errors fail the test."""

    def run(*command: str | Path, cwd: Path = work, **environ: str) -> str:
        clean = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "KVSHM"))}
        done = subprocess.run(command, cwd=cwd, env=clean | environ, capture_output=True, text=True)
        said = done.stdout + done.stderr
        assert done.returncode == 0, f"{command} ended with {done.returncode}:\n{said}"
        return done.stdout

    return run


@pytest.fixture(scope="session")
def wheel(work: Path, run: Run) -> Path:
    if released := os.environ.get("KVSHM_RELEASED_WHEEL"):  # that is what release-check asks about
        return Path(released)
    tree = work / "tree"
    shutil.copytree(ROOT, tree, symlinks=True, ignore=NOT_SOURCE)
    build = "import sys, setuptools.build_meta as backend; backend.build_sdist(sys.argv[1])"
    run(sys.executable, "-c", build, work, cwd=tree)
    with tarfile.open(next(work.glob("kvshm-*.tar.gz"))) as archive:
        archive.extractall(work / "source", filter="data")
    source = next((work / "source").iterdir())
    pip_wheel = ("-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-w", work)
    run(sys.executable, *pip_wheel, source)
    return next(work.glob("kvshm-*.whl"))


@pytest.fixture(scope="session", params=PYTHONS, ids=lambda path: Path(path).name)
def python(work: Path, run: Run, wheel: Path, request: pytest.FixtureRequest) -> Path:
    venv = work / f"venv-{PYTHONS.index(request.param)}"
    run(request.param, "-m", "venv", venv)
    python = venv / "bin/python"
    install = ("-m", "pip", "install", "--quiet", "--only-binary=:all:")
    run(python, *install, wheel, CC="false", CXX="false")
    return python


@pytest.fixture(scope="session")
def elsewhere(work: Path) -> Path:
    """A folder that holds the tests and what they read, and none of the code they test."""
    place = work / "elsewhere"
    for folder in ("tests", "examples", "docs", "kvshm/native"):  # tests/core compile the last
        shutil.copytree(ROOT / folder, place / folder, ignore=NOT_SOURCE)
    for page in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / page, place)
    return place
