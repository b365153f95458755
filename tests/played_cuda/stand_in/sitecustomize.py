"""torch's CUDA functions on the CPU, over the played libcuda: for `make rehearse-gpu` only.

Python imports this module at its start if this folder is in PYTHONPATH, in child processes too.
The first import of torch then replaces the functions that the GPU scripts call.  Tensors "on the
GPU" are CPU tensors; those that may be shared lie in memory of the played driver, so that the
transport exports, opens and copies them by the real calls.

Not played: how fast anything is, work that runs beside other work, memory that is in use or
free (``mem_get_info`` always says the same), caching allocator and its settings, CUDA graphs.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.machinery
import os
import sys
import time
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

GPUS = int(os.environ.get("PLAYED_GPUS", "1"))
FREE, TOTAL = 4 << 30, 8 << 30
SHARED = ("empty", "zeros")
"""Factories whose tensors are memory of the driver: caches are made by them."""
OTHERS = ("randn", "randint", "tensor", "ones", "arange", "full")


class _AfterTorch:
    def find_spec(self, name: str, path: Sequence[str] | None, target: object = None) -> Any:
        if name != "torch":
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                load(module)
                play(module)

            spec.loader.exec_module = exec_module
        return spec


def play(torch: Any) -> None:
    for name in SHARED:
        setattr(torch, name, _in_driver(torch, getattr(torch, name)))
    for name in OTHERS:
        setattr(torch, name, _on_cpu(getattr(torch, name)))
    made = torch.empty
    torch.empty_like = lambda like: made(*like.shape, dtype=like.dtype, device="cuda")
    torch.as_tensor = _foreign(torch, torch.as_tensor)
    torch.Tensor.to = _to(torch.Tensor.to)
    for name, value in vars(_Cuda).items():
        if not name.startswith("_"):
            setattr(torch.cuda, name, getattr(_Cuda, name) if callable(value) else value)


class _Stream:
    cuda_stream = 0

    def __init__(self, **_: object) -> None: ...

    def synchronize(self) -> None: ...

    def wait_stream(self, _: object) -> None: ...

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...


class _Event:
    """Everything has been done when it is recorded."""

    def __init__(self, **_: object) -> None:
        self.at = 0.0

    def record(self, *_: object) -> None:
        self.at = time.perf_counter()

    def query(self) -> bool:
        return True

    def synchronize(self) -> None: ...

    def elapsed_time(self, later: _Event) -> float:
        return (later.at - self.at) * 1e3


class _Cuda:
    """What replaces functions of torch.cuda."""

    Event, Stream = _Event, _Stream
    is_available = staticmethod(lambda: True)
    is_initialized = staticmethod(lambda: True)
    device_count = staticmethod(lambda: GPUS)
    current_device = staticmethod(lambda: 0)
    set_device = staticmethod(lambda device: None)
    synchronize = staticmethod(lambda device=None: None)
    empty_cache = staticmethod(lambda: None)
    mem_get_info = staticmethod(lambda device=None: (FREE, TOTAL))
    get_device_name = staticmethod(lambda device=None: "a played GPU")
    current_stream = staticmethod(lambda device=None: _Stream())
    stream = staticmethod(lambda stream: _Stream())


def _is_gpu(device: object) -> bool:
    return str(device).startswith("cuda")


def _on_cpu(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def played(*args: Any, **options: Any) -> Any:
        if _is_gpu(options.get("device")):
            del options["device"]
        return function(*args, **options)

    return played


def _in_driver(torch: Any, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def played(*size: Any, **options: Any) -> Any:
        if not _is_gpu(options.get("device")):
            return function(*size, **options)
        shape = size[0] if len(size) == 1 and not isinstance(size[0], int) else size
        dtype = options.get("dtype") or torch.float32
        elements = 1
        for length in shape:
            elements *= length
        nbytes = elements * dtype.itemsize
        return _tensor_at(torch, _allocate(nbytes), nbytes).view(dtype).view(*shape)

    return played


def _foreign(torch: Any, function: Callable[..., Any]) -> Callable[..., Any]:
    def played(data: Any, **options: Any) -> Any:
        said = getattr(data, "__cuda_array_interface__", None)
        if said is None:
            return _on_cpu(function)(data, **options)
        return _tensor_at(torch, said["data"][0], said["shape"][0])

    return played


def _to(function: Callable[..., Any]) -> Callable[..., Any]:
    def played(tensor: Any, *args: Any, **options: Any) -> Any:
        kept = [argument for argument in args if not _is_gpu(argument)]
        if _is_gpu(options.get("device")):
            del options["device"]
        return function(tensor, *kept, **options) if kept or options else tensor

    return played


def _tensor_at(torch: Any, address: int, nbytes: int) -> Any:
    return torch.frombuffer((ctypes.c_char * nbytes).from_address(address), dtype=torch.uint8)


def _allocate(nbytes: int) -> int:
    """Memory of the played driver, never freed: its library has no cuMemFree."""
    from cuda.bindings import driver as cu

    cu.cuCtxPushCurrent(_context())
    code, address = cu.cuMemAlloc(max(1, nbytes))
    cu.cuCtxPopCurrent()
    if code:
        raise RuntimeError(f"played cuMemAlloc: {code}")
    return int(address)


@functools.cache
def _context() -> Any:
    from cuda.bindings import driver as cu

    cu.cuInit(0)
    return cu.cuDevicePrimaryCtxRetain(0)[1]


sys.meta_path.insert(0, _AfterTorch())  # type: ignore[arg-type]  # a finder needs no base class
