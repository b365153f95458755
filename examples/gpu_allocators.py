"""GPU memory of other allocators than torch's, for torch to look at.

One is like vLLM's cumem (sleep mode, ``--enable-cumem-allocator``), which serves torch's segments:
one segment is one allocation, on CUDA one physical chunk in one reserved range.  Its handle type is
FABRIC where the device says that it supports fabric handles, and a POSIX descriptor if creating
such a chunk then fails.  Where the device says no, vLLM asks for no handle type, and the memory
cannot be shared.
"""

from __future__ import annotations

from typing import Any

from kvshm.transport.cuda.driver import CudaError


def fabric_is_said(ordinal: int) -> bool | None:
    """Whether the device says that it supports fabric handles; None if the driver does not know
    that question."""
    from cuda.bindings import driver as cu

    attribute = cu.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED
    code, said = cu.cuDeviceGetAttribute(attribute, ordinal)
    return bool(said) if code == cu.CUresult.CUDA_SUCCESS else None


def cumem_allocate(driver: Any, nbytes: int) -> int:
    """Allocate as vLLM would; the address.  Raises CudaError, also where vLLM's allocation would
    have no handle."""
    said = fabric_is_said(driver.ordinal)
    if said is False:
        raise CudaError("cuMemCreate", "no fabric handles here, so vLLM's cumem asks for none")
    try:
        return int(driver.vmm_allocate(nbytes, fabric=True)[0])
    except CudaError:
        return int(driver.vmm_allocate(nbytes, fabric=False)[0])


class ForeignMemory:
    """Memory at an address, of which torch makes a tensor without owning it."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (nbytes,), "typestr": "|u1", "data": (address, False), "version": 3,
        }  # fmt: skip
