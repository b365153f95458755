"""Launching the copy kernel through the driver, on any stream, for the price of one call.

triton compiles the kernel and is then left out: its own launcher works out at every call how the
kernel might be specialised for the arguments, and launches on torch's current stream only.
"""

from __future__ import annotations

import ctypes
import threading
from typing import Any

from cuda.bindings import driver as cu

from .calls import call, entry_point
from .driver import CudaError, RegionTable

# What triton appends to a kernel's parameters: pointers to scratch memories, which this kernel
# does not use.  There were two in every version so far; the driver reads no more than there are.
_SCRATCHES = 4
_CUDA_12 = 12000
_EntryPoint = ctypes.CFUNCTYPE(
    ctypes.c_int,
    ctypes.c_void_p,  # function
    *[ctypes.c_uint] * 7,  # grid, block, shared memory
    ctypes.c_void_p,  # stream
    ctypes.c_void_p,  # addresses of the parameters
    ctypes.c_void_p,
)


class _Parameters(ctypes.Structure):
    """The kernel's parameters in their order."""

    _fields_ = (
        ("table", ctypes.c_uint64),
        ("ids", ctypes.c_uint64),
        ("stop", ctypes.c_uint64),
        ("pairs", ctypes.c_int32),
        ("regions", ctypes.c_int32),
        ("chunks", ctypes.c_int32),
        *((f"scratch_{i}", ctypes.c_uint64) for i in range(_SCRATCHES)),
    )


class Launcher:
    """The copy kernel in one context, compiled for its device.  Any thread that has made the
    context current."""

    def __init__(self, device: Any) -> None:
        self._device = device
        self._lock = threading.Lock()
        self._functions: dict[int, int] = {}
        self._modules: list[Any] = []
        self._parameters = _Parameters()
        begin = ctypes.addressof(self._parameters)
        names = [name for name, *_ in _Parameters._fields_]
        offsets = [getattr(_Parameters, name).offset for name in names]
        self._addresses = (ctypes.c_void_p * len(offsets))(*(begin + o for o in offsets))
        self._entry: Any = None

    def prepare(self, word: int) -> None:
        """Compile the kernel for a width of access and load it, if that was not done yet.
        Blocks, for a second where triton has not compiled it before.  Raises CudaError."""
        with self._lock:
            if word not in self._functions:
                self._functions[word] = self._load(word)

    def _load(self, word: int) -> int:
        from .kernel import WARPS, compile_for

        if self._entry is None:
            self._entry = _EntryPoint(entry_point("cuLaunchKernel", _CUDA_12))
        compiled = compile_for(self._capability(), word)
        self._threads = 32 * WARPS
        module = call(cu.cuModuleLoadData, compiled.asm["cubin"])
        self._modules.append((module, compiled))
        return int(call(cu.cuModuleGetFunction, module, compiled.metadata.name.encode()))

    def _capability(self) -> int:
        known = cu.CUdevice_attribute
        major = known.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR
        minor = known.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR
        numbers = [int(call(cu.cuDeviceGetAttribute, n, self._device)) for n in (major, minor)]
        return numbers[0] * 10 + numbers[1]

    def launch(
        self, table: RegionTable, ids: int, stop: int, pairs: int, stream: int, programs: int
    ) -> None:
        """Enqueue a copy.  Does not block once ``prepare(table.word)`` has run.  Raises
        CudaError."""
        word = table.word
        if word not in self._functions:
            self.prepare(word)
        with self._lock:  # the driver takes the parameters over before it returns
            parameters = self._parameters
            parameters.table, parameters.ids, parameters.stop = table.address, ids, stop
            parameters.pairs, parameters.regions = pairs, len(table.rows)
            parameters.chunks = table.chunks
            grid = min(programs, pairs * len(table.rows) * table.chunks)
            code = self._entry(
                self._functions[word], grid, 1, 1, self._threads, 1, 1, 0, stream,
                self._addresses, None,
            )  # fmt: skip
        if code:
            raise CudaError("cuLaunchKernel", cu.CUresult(code).name)
