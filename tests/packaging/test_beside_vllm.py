"""The wheel beside vLLM: it adds itself, changes no package, and vLLM finds it."""

from __future__ import annotations

import importlib.util
import os
import sys
import sysconfig
from pathlib import Path

import pytest

from .conftest import Run

PACKAGES = Path(sysconfig.get_paths()["purelib"])
CHEAP = ("test_refusals.py", "test_identity.py")

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None, reason="vllm is not installed"
)


def contents(packages: Path) -> dict[str, tuple[int, int]]:
    found = {}
    for folder, folders, files in os.walk(packages, followlinks=True):
        folders[:] = [name for name in folders if name != "__pycache__"]
        for name in files:
            stat = os.stat(path := os.path.join(folder, name))
            found[path] = (stat.st_size, stat.st_mtime_ns)
    return found


@pytest.fixture(scope="module")
def packages(work: Path) -> Path:
    packages = work / "packages"
    packages.mkdir()
    for path in PACKAGES.iterdir():
        if "kvshm" not in path.name:
            (packages / path.name).symlink_to(path)
    return packages


@pytest.fixture(scope="module")
def empty(work: Path, run: Run, packages: Path) -> Path:
    run(sys.executable, "-m", "venv", "--without-pip", work / "beside")
    python = work / "beside/bin/python"
    own = run(python, "-c", "import sysconfig; print(sysconfig.get_paths()['purelib'])").strip()
    Path(own, "packages.pth").write_text(f"{packages}\n")
    return python


def freeze(run: Run, python: Path) -> list[str]:
    return run(python, "-m", "pip", "freeze", "--all").splitlines()


@pytest.fixture(scope="module")
def beside(empty: Path, run: Run, packages: Path, wheel: Path) -> Path:
    """The same, with the wheel.  Without an index: nothing could be fetched, nothing is needed."""
    before, files = freeze(run, empty), contents(packages)
    assert any(line.startswith("torch==") for line in before)
    assert any(line.startswith("vllm") for line in before)
    run(empty, "-m", "pip", "install", "--quiet", "--no-index", wheel)
    after = freeze(run, empty)
    assert set(before) <= set(after)
    (added,) = set(after) - set(before)
    assert added.startswith("kvshm @ ")
    assert contents(packages) == files
    return empty


def test_it_adds_itself_and_changes_nothing_that_is_installed(beside: Path) -> None:
    assert (beside.parent / "kvshm-coordinator").exists()


@pytest.mark.parametrize(
    "names",
    [
        ("test_plugin.py",),
        pytest.param(CHEAP, marks=pytest.mark.nightly),  # as in the tree, but for what is imported
    ],
    ids=["plugin", "hooks"],
)
def test_vllm_finds_the_plugin_and_the_hooks_pass_their_tests_without_the_tree(
    beside: Path, run: Run, elsewhere: Path, names: tuple[str, ...]
) -> None:
    """In one process: importing vLLM takes longer than these tests."""
    files = [f"tests/vllm/{name}" for name in names]
    script = (
        "import sys, pytest\n"
        f"status = pytest.main(['-q', *{files}])\n"
        "from vllm.plugins import load_general_plugins\n"
        "load_general_plugins()\n"
        "print('plugin:', sys.modules['kvshm.hooks.vllm.plugin'].__file__)\n"
        "sys.exit(status)"
    )
    said = run(beside, "-c", script, cwd=elsewhere)
    plugin = next(line for line in said.splitlines() if line.startswith("plugin: "))
    assert Path(plugin.removeprefix("plugin: ")).is_relative_to(beside.parents[1])
    assert " passed" in said
