"""What chooses the CPU kernels of torch besides the CPU itself."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from hashlib import sha256

import torch

_LIBRARIES = ("DNNL_", "MKL_", "ONEDNN_")
"""Prefixes of the variables that the libraries beneath torch read: instruction set, number format,
order of sums.  All count, because new versions know new ones."""
_LONGEST = 1000
_PLAIN = re.compile("[!-~]*")


def cpu_kernels(environment: Mapping[str, str] = os.environ) -> str:
    """Return the instruction set that torch uses, and the settings of its libraries, or a digest of
    them if they are long or have spaces."""
    read = {name: value for name, value in environment.items() if name.startswith(_LIBRARIES)}
    settings = [f"{name}={value}" for name, value in sorted(read.items())]
    if len(" ".join(settings)) > _LONGEST or not all(map(_PLAIN.fullmatch, settings)):
        settings = [f"settings {sha256(os.fsencode(chr(0).join(settings))).hexdigest()}"]
    return " ".join([torch.backends.cpu.get_cpu_capability(), *settings])
