"""The environment of the processes in which GPU tests and benchmarks have their caches."""

from __future__ import annotations

from pathlib import Path

import pytest
from gpu_peer import GpuPeer

PROGRAM = """
import os, sys
from gpu_peer import answer_calls

class Asked:
    def __init__(self, device):
        pass
    def variable(self, name):
        return os.environ.get(name)

answer_calls(Asked)
"""
NAME = "CUDA_DEVICE_MAX_CONNECTIONS"


@pytest.mark.multiprocess
@pytest.mark.parametrize(("given", "wanted"), [(None, "32"), ("8", "8")])
def test_a_stream_that_waits_has_a_queue_of_its_own(
    given: str | None, wanted: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the 8 hardware queues that CUDA gives by default, a stream that waits for a host's word
    may share one with a stream that the test synchronises with: then both wait for ever."""
    monkeypatch.delenv(NAME, raising=False)
    if given is not None:
        monkeypatch.setenv(NAME, given)
    root = Path(__file__).parents[2]
    monkeypatch.setenv("PYTHONPATH", f"{root}:{root / 'examples'}")
    program = tmp_path / "asked.py"
    program.write_text(PROGRAM)
    with GpuPeer(program=str(program)) as peer:
        assert peer.call("variable", name=NAME) == wanted
