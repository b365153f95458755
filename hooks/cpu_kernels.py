"""What chooses the CPU kernels of torch besides the CPU itself."""

from __future__ import annotations

import os
from collections.abc import Mapping

import torch

_LIBRARIES = ("DNNL_", "MKL_", "ONEDNN_")
"""How the variables begin that the libraries beneath torch read: an instruction set, a number
format, a reproducible order of sums.  All count, because new versions know new ones."""


def cpu_kernels(environment: Mapping[str, str] = os.environ) -> str:
    """Return the instruction set that torch uses, and the settings of its libraries."""
    told = {name: value for name, value in environment.items() if name.startswith(_LIBRARIES)}
    settings = [f"{name}={value}" for name, value in sorted(told.items())]
    return " ".join([torch.backends.cpu.get_cpu_capability(), *settings])
