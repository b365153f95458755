"""What is shipped: a source archive, the wheel built from it, and that wheel installed alone."""

from __future__ import annotations

import configparser
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
COMPONENTS = ("coordinator", "transport", "hooks", "tools")
NOT_SOURCE = shutil.ignore_patterns(".*", "build", "dist", "*.egg-info", "*.so", "__pycache__")
UNIT_TESTS = ("chains", "config", "counters", "fds", "native_index", "segment", "slots")
TEST_REQUIREMENTS = ("hypothesis>=6.100", "msgpack>=1.1", "pytest>=8.3", "pytest-timeout>=2.3")

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(300)]


def run(*command: str | Path, cwd: Path) -> str:
    """Run a command outside of the tree and return what it prints; its errors fail the test."""
    environ = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "KVSHM"))}
    done = subprocess.run(command, cwd=cwd, env=environ, capture_output=True, text=True)
    assert done.returncode == 0, f"{command} ended with {done.returncode}:\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("packaging")


@pytest.fixture(scope="module")
def wheel(work: Path) -> Path:
    """The wheel of the source archive of a clean copy of this tree."""
    tree = work / "tree"
    shutil.copytree(ROOT, tree, symlinks=True, ignore=NOT_SOURCE)
    build = "import sys, setuptools.build_meta as backend; backend.build_sdist(sys.argv[1])"
    run(sys.executable, "-c", build, work, cwd=tree)
    with tarfile.open(next(work.glob("kvshm-*.tar.gz"))) as archive:
        archive.extractall(work / "source", filter="data")
    source = next((work / "source").iterdir())
    pip_wheel = ("-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-w", work)
    run(sys.executable, *pip_wheel, source, cwd=work)
    return next(work.glob("kvshm-*.whl"))


@pytest.fixture(scope="module")
def names(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


@pytest.fixture(scope="module")
def python(wheel: Path, work: Path) -> Path:
    """The interpreter of an environment that holds the wheel and its base requirements."""
    run(sys.executable, "-m", "venv", work / "venv", cwd=work)
    python = work / "venv/bin/python"
    run(python, "-m", "pip", "install", "--quiet", wheel, cwd=work)
    return python


def entry_points(wheel: Path) -> Iterator[str]:
    """Yield the module of every entry point the wheel declares."""
    with zipfile.ZipFile(wheel) as archive:
        path = next(n for n in archive.namelist() if n.endswith("/entry_points.txt"))
        parser = configparser.ConfigParser()
        parser.read_string(archive.read(path).decode())
    for section in parser.sections():
        yield from (value.split(":")[0] for value in parser[section].values())


@pytest.mark.parametrize("name", COMPONENTS)
def test_link_shows_component_to_type_checkers(name: str) -> None:
    assert (ROOT / "kvshm" / name).readlink() == Path("..", name)


def test_wheel_fits_every_python_from_311_on(wheel: Path) -> None:
    assert "-cp311-abi3-linux_" in wheel.name


def test_wheel_installs_one_name(names: set[str]) -> None:
    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"kvshm"}
    assert len(tops) == 2


def test_wheel_holds_every_module_and_no_c_source(names: set[str]) -> None:
    expected = {f"kvshm/{path.name}" for path in (ROOT / "kvshm").glob("*.py")}
    for component in COMPONENTS:
        expected |= {f"kvshm/{component}/{path.name}" for path in (ROOT / component).glob("*.py")}
    assert {name for name in names if name.endswith(".py")} == expected
    assert {"kvshm/py.typed", "kvshm/_native.abi3.so", "kvshm/_native.pyi"} <= names
    assert not [name for name in names if name.endswith((".c", ".h"))]


def test_entry_points_lead_to_modules(wheel: Path, names: set[str]) -> None:
    modules = set(entry_points(wheel))
    assert {m.replace(".", "/") + ".py" for m in modules} <= names
    assert "kvshm.hooks.plugin" in modules


def test_wheel_works_with_its_base_requirements_alone(python: Path, work: Path) -> None:
    found = "import importlib.util as u; print([n for n in ('torch', 'vllm') if u.find_spec(n)])"
    assert run(python, "-c", found, cwd=work).strip() == "[]"
    version = run(python.with_name("kvshm-coordinator"), "--version", cwd=work).split()[-1]
    assert run(python, "-c", "import kvshm; print(kvshm.__version__)", cwd=work).strip() == version


def test_wheel_alone_runs_the_coordinator_and_the_tools(python: Path, work: Path) -> None:
    run_dir = Path(tempfile.mkdtemp(prefix="kv-"))
    place = ("--namespace", run_dir.name.lower())
    coordinator = subprocess.Popen(
        [python.with_name("kvshm-coordinator"), "--run-dir", run_dir, *place],
        stderr=subprocess.PIPE, text=True, cwd=work,
    )  # fmt: skip
    try:
        assert coordinator.stderr is not None
        assert any("event=serving" in line for line in coordinator.stderr)
        dump = json.loads(run(python, "-m", "kvshm.tools.dump_index", "--json", *place, cwd=work))
        (space,) = dump["namespaces"]
        assert space["lease_table"]["coordinator"] == {"pid": coordinator.pid, "alive": True}
    finally:
        coordinator.terminate()
        coordinator.communicate()
        shutil.rmtree(run_dir)
    assert coordinator.returncode == 0


def test_wheel_changes_nothing_that_is_installed(python: Path, wheel: Path, work: Path) -> None:
    """Beside packages that are there, vLLM's among them, it adds itself and nothing else."""
    freeze = (python, "-m", "pip", "freeze", "--exclude", "kvshm")
    run(python, "-m", "pip", "uninstall", "--quiet", "--yes", "kvshm", cwd=work)
    before = run(*freeze, cwd=work)
    assert "pyzmq==" in before
    # Without an index: nothing could be fetched, nothing needs to be.
    run(python, "-m", "pip", "install", "--quiet", "--no-index", wheel, cwd=work)
    assert run(*freeze, cwd=work) == before


def test_unit_tests_pass_with_the_wheel_and_without_the_tree(python: Path, work: Path) -> None:
    run(python, "-m", "pip", "install", "--quiet", *TEST_REQUIREMENTS, cwd=work)
    place = work / "elsewhere"
    shutil.copytree(ROOT / "tests/unit", place / "tests/unit", ignore=NOT_SOURCE)
    shutil.copy(ROOT / "pyproject.toml", place)
    where = "import kvshm._native as module; print(module.__file__)"
    assert Path(run(python, "-c", where, cwd=place).strip()).is_relative_to(work / "venv")
    files = [f"tests/unit/test_{name}.py" for name in UNIT_TESTS]
    assert " passed" in run(python, "-m", "pytest", "-q", *files, cwd=place)
