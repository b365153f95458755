"""The wheel with its base requirements alone: no torch, no vLLM, no compiler, no tree."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

from .conftest import Run

TEST_REQUIREMENTS = (
    "hypothesis>=6.100",
    "msgpack>=1.1",
    "pytest>=9.2",
    "pytest-timeout>=2.3",
    "pytest-xdist>=3.8",
)
OF_THE_EXTRAS = (
    "numpy>=1.24",
    "safetensors>=0.4.3",
    "prometheus-client>=0.20",
    "rich>=13.7",
    "shtab>=1.10",
)
FOLDERS = {
    "tests/unit": {
        "test_api_docs.py": "looks at the sources",
        "test_hooks_of_transformers.py": "looks at the sources",
        "test_command_pages.py": "looks at the tree: pages",
        "test_grafana.py": "looks at the tree: deploy/grafana",
        "test_dump_index.py": "runs tools/dump_index.py as a file",
        "test_docs_commands.py": "looks at the tree: pages and the files they name",
        "test_docs_map.py": "looks at the tree: the map of the pages, and the sizes of folders",
        "test_docs_programs.py": "looks at the tree: make, and what every page calls",
        "test_log_lines.py": "looks at the sources for the lines they log",
        "test_models_docs.py::test_most_decoders_of_each_tested_version_are_planned": "asks make",
        "test_scaling_docs.py": "looks at the tree: docs/scaling.md, and results of benchmarks",
        "test_sglang_facts.py": "looks at the tree: docs/sglang.md and docs/sglang-facts.toml",
        "test_vllm_facts.py": "looks at the tree: docs/vllm-facts.toml, and what it names",
        "test_syncpoints.py::test_both_languages_number_the_points_alike": "looks at a C header",
        "test_layout_docs.py": "compares a page and a C header with the layout",
        "test_log.py::test_every_logger_of_the_product_is_one_of_these": "looks at the sources",
        "test_roles.py": "asks mypy, which is not installed there",
        "test_transport_types.py": "asks mypy, which is not installed there",
        "test_up.py": "reads YAML, for which nothing is installed there",
        "test_pulses.py": "takes a minute, for the same C code built the same way",
        "test_fuzz_segments.py": "takes a minute, for the same C code built the same way",
        "test_index_model.py": "takes half a minute, for the same C code built the same way",
    },
    "tests/core": {},
    "tests/conformance": {},
}
"""What of each folder cannot run without the tree, or not in reasonable time, and why."""
PROCESSES = ("check", "in_process", "kv_files", "node", "posix_shm", "transports")
"""Of tests/multiprocess: a coordinator, engines, transports and commands, all from the wheel."""


@pytest.fixture(scope="module")
def tester(python: Path, run: Run) -> Path:
    """The same, with what the tests themselves need."""
    run(python, "-m", "pip", "install", "--quiet", *TEST_REQUIREMENTS, *OF_THE_EXTRAS)
    return python


def test_it_needs_neither_torch_nor_vllm(python: Path, run: Run) -> None:
    found = "import importlib.util as u; print([n for n in ('torch', 'vllm') if u.find_spec(n)])"
    assert run(python, "-c", found).strip() == "[]"
    version = run(python.with_name("kvshm-coordinator"), "--version").split()[-1]
    assert run(python, "-c", "import kvshm; print(kvshm.__version__)").strip() == version


def test_it_runs_the_coordinator_and_the_tools(python: Path, run: Run) -> None:
    run_dir = Path(tempfile.mkdtemp(prefix="kv-"))
    where = ("--run-dir", run_dir, "--namespace", run_dir.name.lower())
    coordinator = subprocess.Popen(
        [python.with_name("kvshm-coordinator"), *where],
        stderr=subprocess.PIPE,
        text=True,
        cwd="/",
    )
    try:
        assert coordinator.stderr is not None
        assert any("event=serving" in line for line in coordinator.stderr)
        dump = json.loads(run(python.with_name("kvshm"), "dump-index", "--json", *where))
        (space,) = dump["namespaces"]
        assert space["coordinator"]
    finally:
        coordinator.terminate()
        coordinator.communicate()
        shutil.rmtree(run_dir)
    assert coordinator.returncode == 0


@pytest.mark.nightly  # make test-pythons runs them on other versions of Python
@pytest.mark.parametrize("folder", FOLDERS)
def test_the_tests_pass_without_the_tree(
    tester: Path, run: Run, elsewhere: Path, folder: str
) -> None:
    left_out = []
    for name in FOLDERS[folder]:
        assert (elsewhere / folder / name.partition("::")[0]).exists()
        left_out.append(f"--{'deselect' if '::' in name else 'ignore'}={folder}/{name}")
    check_tests(tester, run, elsewhere, folder, *left_out)


@pytest.mark.nightly  # test_it_runs_the_coordinator_and_the_tools; the rest is that of the tree
def test_processes_pass_their_tests_without_the_tree(
    tester: Path, run: Run, elsewhere: Path
) -> None:
    files = (f"tests/multiprocess/test_{name}.py" for name in PROCESSES)
    check_tests(tester, run, elsewhere, *files)


def check_tests(tester: Path, run: Run, elsewhere: Path, *arguments: str) -> None:
    """Run tests with nothing of the tree on sys.path: coordinator and tools are the wheel's."""
    where = "import kvshm._native as module; print(module.__file__)"
    assert Path(run(tester, "-c", where, cwd=elsewhere).strip()).is_relative_to(tester.parents[1])
    said = run(tester, "-m", "pytest", "-q", "-n", "4", *arguments, cwd=elsewhere)
    passed = re.search(r"(\d+) passed", said)
    assert passed is not None, said
    assert int(passed[1]) >= 10, said
