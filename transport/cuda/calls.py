"""Calls of the driver: through cuda-bindings, which return (code, values...), and one call through
the driver's own entry point, since the bindings offer it only for lists of objects."""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from cuda.bindings import driver as cu

from .driver import CudaError

_BATCH = "cuMemcpyBatchAsync"
_CUDA_12_8 = 12080
"""The version of CUDA whose signature of the call is wanted, from newer drivers too."""
_BatchEntry = ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_size_t] * 9)


def call(function: Any, *arguments: Any) -> Any:
    """Call the driver; return its value, or a tuple if it has not exactly one.  Raises
    CudaError."""
    try:
        code, *values = function(*arguments)
    except RuntimeError as exc:  # from the bindings: the installed driver is too old for the call
        raise CudaError(function.__name__, str(exc)) from exc
    if code != cu.CUresult.CUDA_SUCCESS:
        raise CudaError(function.__name__, code.name)
    return values[0] if len(values) == 1 else tuple(values)


def copy_batch(
    sources: torch.Tensor, targets: torch.Tensor, sizes: torch.Tensor, stream: int
) -> None:
    """Enqueue copies for the copy engines, given as int64 tensors on the host.  Raises
    CudaError."""
    try:
        address, *_ = call(cu.cuGetProcAddress, _BATCH.encode(), _CUDA_12_8, 0)
        attributes = cu.CUmemcpyAttributes_v1()
    except CudaError as exc:
        raise CudaError(_BATCH, f"not in this driver ({exc.code})") from exc
    except AttributeError as exc:
        raise CudaError(_BATCH, "not in cuda-bindings older than 12.8") from exc
    entry = _BatchEntry(int(address))
    attributes.srcAccessOrder = cu.CUmemcpySrcAccessOrder.CU_MEMCPY_SRC_ACCESS_ORDER_STREAM
    first, failed = ctypes.c_size_t(0), ctypes.c_size_t(0)  # the only attribute's first copy
    code = entry(
        targets.data_ptr(),
        sources.data_ptr(),
        sizes.data_ptr(),
        sizes.numel(),
        int(attributes.getPtr()),
        ctypes.addressof(first),
        1,
        ctypes.addressof(failed),
        stream,  # not ``failed`` in CUDA 13's signature
    )
    if code:
        raise CudaError(_BATCH, cu.CUresult(code).name)
