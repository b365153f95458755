"""The steps of the GPU suite: what each runs, and how long it may take.

The limits of a part, with that of nvidia-smi, add up to eight minutes at most, on 16 cores with one
H100 or H200.  Needs only the standard library.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

PART_LIMIT_S = 480
CARD_LIMIT_S = 5
"""For nvidia-smi, which is asked for the card once, before the first step."""
TEST_LIMIT_S = 75
"""So that one test that hangs costs its own time, and not that of the others of its step."""


class Step(NamedTuple):
    """One program.  ``command``: the arguments for Python; ``limit``: seconds."""

    name: str
    limit: float
    command: tuple[str, ...]


READY = Step("ready", 30, ("benchmarks/gpu_ready.py",))
"""Comes first in every part; without it nothing else can run."""


def _tests(name: str, limit: float, *arguments: str) -> Step:
    """Tests by pytest.  Warnings are no errors here, and no plugin but the timeout is loaded: they
    are those of a Python that we did not choose."""
    options = ("-p", "no:cacheprovider", "-p", "pytest_timeout", "-q", "-rs", "-W", "default")
    patience = ("--timeout", str(TEST_LIMIT_S))
    return Step(name, limit, ("-m", "pytest", *options, *patience, *arguments))


def _program(name: str, limit: float, *command: str) -> Step:
    return Step(name, limit, command)


PARTS: dict[str, tuple[Step, ...]] = {
    "a": (
        _tests("roundtrip", 70, "tests/gpu/test_roundtrip.py"),
        _tests(
            "driver", 80, "tests/unit/test_cuda_driver.py", "tests/unit/test_cuda_kernel.py",
            # The kernel itself runs here, and triton's interpreter not with every numpy.
            "-k", "not played and not interpreted",
        ),
        _tests("conformance", 135, "tests/conformance", "-k", "cuda and not played and not host"),
        _tests("bytes", 160, "tests/gpu/test_bytes.py"),
    ),
    "b": (
        _tests("death", 190, "tests/gpu/test_death.py"),
        _program("demo", 40, "examples/two_gpu_demo.py"),
        _program("prefix-demo", 50, "examples/gpu_prefix_demo.py"),
        _program("import-times", 95, "benchmarks/bench_gpu_import.py"),
        _program("stalls", 70, "benchmarks/bench_gpu_stalls.py"),
    ),
    "c": (
        _program("copy-rates", 240, "benchmarks/bench_gpu_rates.py"),
        _program("copy-ways", 205, "benchmarks/bench_gpu_copy.py"),
    ),
    "d": (
        _program("namespaces", 215, "benchmarks/gpu_namespaces.py"),
        _tests("peers", 30, "tests/gpu/test_peers.py"),
        _tests("sanitizer", 140, "tests/gpu/test_sanitizer.py"),
        _program("mps", 60, "benchmarks/gpu_mps.py"),  # last: it may end other processes' work
    ),
    "e": (
        _tests("host", 90, "tests/conformance", "-k", "host and not played"),
        _tests("keeper", 90, "tests/gpu/test_keeper.py"),
    ),
}  # fmt: skip


def chosen(names: Sequence[str]) -> list[tuple[str, tuple[Step, ...]]]:
    """The parts of these names; names of steps make one more part together.  Raises KeyError."""
    every = {step.name: step for steps in PARTS.values() for step in steps}
    single = tuple(every[name] for name in names if name not in PARTS)
    parts = [(name, PARTS[name]) for name in names if name in PARTS]
    called = single[0].name if len(single) == 1 else "steps"
    return [*parts, (called, single)] if single else parts
