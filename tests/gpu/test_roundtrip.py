"""The first question on a new machine: do 4 KiB get from one process to another at all?"""

from __future__ import annotations

import json
from importlib.metadata import PackageNotFoundError, version

import pytest
from gpu_peer import PeerError

from .conftest import Start

PACKAGES = ("torch", "triton", "cuda-bindings", "kvshm")


def test_what_the_machine_is(capsys: pytest.CaptureFixture) -> None:
    import torch
    from cuda.bindings import driver as cu
    from gpu_allocators import fabric_is_said

    found: dict[str, object] = {"benchmark": "gpu versions"}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "no metadata"
    found["gpus"] = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    found |= {"driver": cu.cuDriverGetVersion()[1], "runtime": torch.version.cuda}
    found["fabric_supported"] = fabric_is_said(0)
    with capsys.disabled():
        print(f"\n{json.dumps(found)}")
    assert found["gpus"]


@pytest.mark.parametrize("kind", ["caching", "fd", "cumem", "fabric"])
def test_4_kib_go_round_between_two_processes(
    start: Start, kind: str, capsys: pytest.CaptureFixture
) -> None:
    there, back = start(), start()
    try:
        there.call("make", seed=1, layers=1, blocks=8, block_bytes=4096, kind=kind)
    except PeerError as exc:
        if kind == "caching":
            raise
        pytest.skip(f"no memory of kind {kind} here: {exc}")
    back.call("make", seed=2, layers=1, blocks=8, block_bytes=4096)
    found = back.call("attach", descriptor=there.call("export", epoch=11))
    assert back.call("copy", source=[3], target=[5]) == "done"
    wrong = back.call("wrong", own=2, peer=1, peer_blocks=8, source=[3], target=[5])
    milliseconds = round(found["seconds"] * 1e3, 1)
    seen = {"kind": kind, "attach_ms": milliseconds, "route": found["route"], "wrong": wrong}
    with capsys.disabled():
        print(f"\n{json.dumps({'benchmark': 'gpu round trip', **seen})}")
    assert wrong == 0
