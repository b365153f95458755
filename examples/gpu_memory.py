"""GPU memory as examples, benchmarks and GPU tests need it; torch is imported only when used."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

NEEDED = ("torch", "triton", "cuda.bindings")


def no_gpu() -> str | None:
    """Why GPU memory cannot be shared on this machine, or None."""
    for name in NEEDED:
        try:
            found = importlib.util.find_spec(name)
        except ModuleNotFoundError:
            found = None
        if found is None:
            return f"no GPU test can run: {name} is not installed"
    import torch

    if not torch.cuda.is_available():
        return "no GPU test can run: torch sees no CUDA device"
    return None


@contextmanager
def held(driver: Any, stream: Any) -> Iterator[None]:
    """Nothing that is put on ``stream`` inside runs before the end."""
    from cuda.bindings import driver as cu

    word = driver.host_allocate(4)
    word.view[:] = bytes(4)
    equal = int(cu.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_EQ)
    with driver.in_context():
        (code,) = cu.cuStreamWaitValue32(stream.handle, word.address, 1, equal)
    assert code == cu.CUresult.CUDA_SUCCESS, code
    try:
        yield
    finally:
        word.view[0] = 1
        driver.synchronize(stream)
        driver.host_free(word)


def gpu_count() -> int:
    """How many GPUs there are that memory can be shared on."""
    if no_gpu() is not None:
        return 0
    import torch

    return int(torch.cuda.device_count())
