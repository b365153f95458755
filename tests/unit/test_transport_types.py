"""mypy checks transports, kvshm's and those of other packages, against ``kvshm.interfaces``."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import other_package

ROOT = Path(__file__).parents[2]
OWN = """\
from kvshm.interfaces import (
    SupportsAdopt, SupportsAfter, SupportsAllocate, SupportsFence, SupportsLaunchedWork,
    SupportsPath, SupportsSettings, SupportsThreads, SupportsWhenEnded, SupportsWithdraw, Transport,
    TransportClass,
)
from kvshm.transport.cuda.attachment import CudaAttachment
from kvshm.transport.cuda.copy_stream import CudaCopy
from kvshm.transport.cuda.transport import CudaIpcTransport
from kvshm.transport.loopback import LoopbackAttachment, LoopbackTransport
from kvshm.transport.posix_shm import PosixAttachment, PosixShmTransport

classes: list[TransportClass] = [CudaIpcTransport, PosixShmTransport]
allocates: SupportsAllocate = PosixShmTransport
adopts: SupportsAdopt = CudaIpcTransport
takes_settings: SupportsSettings = CudaIpcTransport

def offered(
    cuda: CudaIpcTransport, posix: PosixShmTransport, loopback: LoopbackTransport,
    copy: CudaCopy, opened: CudaAttachment, mapped: PosixAttachment, kept: LoopbackAttachment,
) -> None:
    transports: list[Transport] = [cuda, posix, loopback]
    fences: SupportsFence = cuda
    notes: SupportsLaunchedWork = cuda
    after: SupportsAfter = opened
    withdraws: list[SupportsWithdraw] = [cuda, posix]
    enters: SupportsThreads = cuda
    ends: SupportsWhenEnded = copy
    paths: list[SupportsPath] = [opened, mapped, kept]
"""
OTHER = """\
from kvshm.interfaces import SupportsAllocate, Transport, TransportClass
from {module} import ProcTransport

chosen: TransportClass = ProcTransport
allocates: SupportsAllocate = ProcTransport

def use(made: ProcTransport) -> None:
    shared: Transport = made
"""
MISTAKES = {
    "checksums_are_text": ("Sequence[int]) -> list[int]:", "Sequence[int]) -> list[str]:"),
    "copies_cannot_be_cancelled": ("    def cancel(self)", "    def stop(self)"),
    "devices_are_no_tuple": ('devices = ("cpu",)', 'devices = "cpu"'),
    "memory_is_allocated_by_name": (
        "allocate = staticmethod(ProcMemory)",
        "@staticmethod\n    def allocate(name: str) -> None: ...",
    ),
    "the_rank_has_another_name": ("        rank: int,", "        ordinal: int,"),
    "nothing_is_exported": ("    def export(", "    def describe("),
}


@pytest.fixture(scope="module")
def mypy(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What mypy says of all programs, in one run."""
    folder = tmp_path_factory.mktemp("typed")
    source = other_package.SOURCE.read_text()
    (folder / "own.py").write_text(OWN)
    modules = {"right": source}
    for name, (text, wrong) in MISTAKES.items():
        assert text in source
        modules[name] = source.replace(text, wrong)
    for name, text in modules.items():
        (folder / f"{name}.py").write_text(text)
        (folder / f"use_{name}.py").write_text(OTHER.format(module=name))
    options = ["--config-file", ROOT / "pyproject.toml", "--follow-imports=silent"]
    programs = ["own.py", *(f"use_{name}.py" for name in modules)]
    done = subprocess.run(
        [sys.executable, "-m", "mypy", *options, "--cache-dir", folder / "cache", *programs],
        cwd=folder,
        env={**os.environ, "MYPYPATH": f"{ROOT}:{folder}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert not done.stderr
    return done.stdout


def test_the_transports_of_kvshm_offer_what_the_interface_says(mypy: str) -> None:
    assert "own.py" not in mypy, mypy


def test_the_transport_of_another_package_is_right(mypy: str) -> None:
    assert "use_right.py" not in mypy, mypy


@pytest.mark.parametrize("name", MISTAKES)
def test_a_wrong_transport_is_found(mypy: str, name: str) -> None:
    assert f"use_{name}.py" in mypy, mypy
