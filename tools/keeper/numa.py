"""On which NUMA node the kernel takes this process's memory from now on."""

from __future__ import annotations

import ctypes
import os
import platform
from pathlib import Path

NODES = Path("/sys/devices/system/node")
_SET_MEMPOLICY = {"x86_64": 238, "aarch64": 237}
"""Numbers of the system call, which the C library has no function for."""
_BIND = 2


def bind_memory(node: int) -> None:
    """Take memory from this node only.  Raises OSError, whose ``strerror`` says why not."""
    if (number := _SET_MEMPOLICY.get(platform.machine())) is None:
        raise OSError(0, f"not known how on {platform.machine()}; use numactl --membind")
    if not (NODES / f"node{node}").exists():
        there = sorted(int(each.name[4:]) for each in NODES.glob("node[0-9]*"))
        raise OSError(
            0, f"there is no such node; there are: {', '.join(map(str, there)) or 'none'}"
        )
    bits = ctypes.sizeof(ctypes.c_ulong) * 8
    mask = (ctypes.c_ulong * (node // bits + 1))()
    mask[node // bits] = 1 << node % bits
    libc = ctypes.CDLL(None, use_errno=True)
    # The kernel reads one bit less than it is told.
    if libc.syscall(ctypes.c_long(number), _BIND, mask, ctypes.c_ulong(len(mask) * bits + 1)):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
