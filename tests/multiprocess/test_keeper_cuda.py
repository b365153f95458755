"""A keeper of engines whose caches lie in memory of a played GPU: the real cuda-bindings, ending in
a library that plays CUDA in host memory (tests/played_cuda)."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from gpu_memory import no_gpu

from ..gpu.keepers import (
    engine,
    engines_import_from_a_keepers_files,
    engines_import_when_all_have_ended,
)
from ..played_cuda import library
from .joined import served
from .keepers import Keeper

pytestmark = [
    pytest.mark.multiprocess,
    pytest.mark.skipif(no_gpu() is None, reason="tests/gpu has it on the GPU that is here"),
]


@pytest.fixture
def played(played_cuda: Path) -> dict[str, str]:
    stand_in = Path(library.__file__).with_name("stand_in")
    path = os.pathsep.join(filter(None, (str(stand_in), os.environ.get("PYTHONPATH"))))
    return {"LD_LIBRARY_PATH": str(played_cuda.parent), "PYTHONPATH": path}


def test_engines_import_from_a_keeper_when_all_have_ended(
    played: dict[str, str], run_dir: Path
) -> None:
    engines_import_when_all_have_ended(str(run_dir), **played)


def test_engines_import_what_a_keeper_has_read_from_files(
    played: dict[str, str], run_dir: Path, tmp_path: Path
) -> None:
    engines_import_from_a_keepers_files(str(run_dir), str(tmp_path), **played)


def test_a_keeper_without_a_gpu_says_which_engines_it_leaves_out(played: dict[str, str]) -> None:
    with served() as place:
        keeper = Keeper(place)
        with engine(str(place.run_dir), "first", place.namespace, **played):
            said = keeper.process.wait_out(lambda line: "engine first" in line)
        assert said.startswith("keeping nothing of engine first: ")
        assert "there is no usable GPU" in said
