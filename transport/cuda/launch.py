"""Launches the copy kernel, which triton only compiles, on any stream by one call.

triton's launcher decides at every call how to specialise the kernel for the arguments, and
launches on torch's current stream only.
"""

from __future__ import annotations

import ctypes
import threading
from typing import Any

from cuda.bindings import driver as cu

from .calls import call
from .driver import CudaError, RegionTable

# triton appends pointers to scratch memories to a kernel's parameters; this kernel does not use
# them.  Every version so far has two; the driver reads no more than the kernel has.
_SCRATCHES = 4


class _Parameters(ctypes.Structure):
    """The kernel's parameters, in order."""

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
    """The copy kernel in one context, compiled for its device.  For any thread with that context
    as its current one."""

    def __init__(self, device: Any) -> None:
        self._device = device
        self._lock = threading.Lock()
        self._functions: dict[int, int] = {}
        self._modules: list[Any] = []
        self._parameters = _Parameters()
        first = ctypes.addressof(self._parameters)
        offsets = [getattr(_Parameters, name).offset for name, *_ in _Parameters._fields_]
        self._addresses = (ctypes.c_void_p * len(offsets))(*(first + o for o in offsets))
        self._pointer = ctypes.addressof(self._addresses)

    def prepare(self, word: int) -> None:
        """Compile the kernel for a width of access and load it, unless that was done before.
        Blocks: a second if triton has not cached the kernel.  Raises CudaError."""
        with self._lock:
            if word not in self._functions:
                self._functions[word] = self._load(word)

    def _load(self, word: int) -> int:
        try:
            from .kernel import WARPS, compile_for
        except Exception as exc:  # any, of triton's own start
            raise CudaError("triton", f"the copy kernel cannot be compiled: {exc}") from exc
        compiled = compile_for(self._capability(), word)
        self._threads = 32 * WARPS
        module = call(cu.cuModuleLoadData, compiled.asm["cubin"])
        self._modules.append((module, compiled))
        function = call(cu.cuModuleGetFunction, module, compiled.metadata.name.encode())
        # Asked for an attribute, the driver loads the function's code now, not at the first launch.
        registers = cu.CUfunction_attribute.CU_FUNC_ATTRIBUTE_NUM_REGS
        call(cu.cuFuncGetAttribute, registers, function)
        return int(function)

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
        if table.word not in self._functions:
            self.prepare(table.word)
        rows = len(table.rows)
        grid = min(programs, pairs * rows * table.chunks)
        with self._lock:  # the driver copies the parameters before it returns
            parameters = self._parameters
            parameters.table, parameters.ids, parameters.stop = table.address, ids, stop
            parameters.pairs, parameters.regions = pairs, rows
            parameters.chunks = table.chunks
            call(
                cu.cuLaunchKernel,
                self._functions[table.word],
                grid,
                1,
                1,
                self._threads,
                1,
                1,
                0,
                stream,
                self._pointer,
                0,
            )
