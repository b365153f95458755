"""The first question on a new machine: do 4 KiB get from one process to another at all?"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

import pytest

from .conftest import Start


def test_4_kib_go_round_between_two_processes(start: Start, capsys: pytest.CaptureFixture) -> None:
    import torch
    from cuda.bindings import driver as cu

    with capsys.disabled():
        print(
            f"\nGPUs: {[torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]}"
        )
        print(f"driver: {cu.cuDriverGetVersion()[1]}, torch's runtime: {torch.version.cuda}")
        for package in ("torch", "triton", "cuda-bindings", "kvshm"):
            try:
                print(f"{package} {version(package)}")
            except PackageNotFoundError:
                print(f"{package} has no metadata")
    there, back = start(), start()
    there.call("make", seed=1, layers=1, blocks=8, block_bytes=4096)
    back.call("make", seed=2, layers=1, blocks=8, block_bytes=4096)
    found = back.call("attach", descriptor=there.call("export", epoch=11))
    assert back.call("copy", source=[3], target=[5]) == "done"
    wrong = back.call("wrong", own=2, peer=1, peer_blocks=8, source=[3], target=[5])
    with capsys.disabled():
        milliseconds = found["seconds"] * 1e3
        print(f"attached in {milliseconds:.1f} ms by {found['route']}; {wrong} wrong bytes")
    assert wrong == 0
