"""What engine tests read off an engine from outside, shown without an engine."""

from __future__ import annotations

import subprocess
import sys

import pytest

from kvshm import _native

from .engines import has_loaded, lines_naming_kvshm

PREFIX = "(EngineCore pid=7) INFO 11-22 23:25:01 [core.py:9] "
WARNING = ".venv/lib/python3.11/site-packages/torch/x.py:7: UserWarning: old"


def test_a_path_that_holds_the_word_is_no_line_of_kvshm(subtests: pytest.Subtests) -> None:
    for line in [
        f"/home/me/kvshm/{WARNING}",
        f"/home/me/my-kvshm-2/{WARNING}",
        f"kvshm/{WARNING}",
        f"{PREFIX}Initializing an engine (v0.32.0) with config: model='/tmp/kvshm/model', seed=0",
        '  File "/srv/kvshm.old/hooks.py", line 3, in <module>',
    ]:
        with subtests.test(line=line):
            assert lines_naming_kvshm(f"{PREFIX}ready\n{line}\n") == []


@pytest.mark.parametrize(
    "line",
    [
        f"{PREFIX}the coordinator serves kvshm at /run/kvshm",
        f"{PREFIX}KVSHM_NAMSPACE is not a setting of kvshm and does nothing",
        "ModuleNotFoundError: No module named 'kvshm.hooks'",
        f"{PREFIX}no coordinator: start one: kvshm-coordinator --run-dir /tmp/x",
    ],
)
def test_a_line_that_names_kvshm_is_found(line: str) -> None:
    assert lines_naming_kvshm(f"{PREFIX}ready\n{line}\n") == [line]


@pytest.mark.parametrize("module", ["kvshm._native", "kvshm.hooks.vllm.plugin", "json"])
def test_a_process_that_has_loaded_kvshm_is_distinguished_from_one_that_has_not(
    module: str,
) -> None:
    """The plugin's module alone, which vLLM imports in any case, loads nothing of kvshm."""
    program = f"import {module}; print(flush=True); input()"
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdout.readline()
        assert has_loaded(process.pid, _native.__file__) == (module == "kvshm._native")
        process.stdin.write(b"\n")
