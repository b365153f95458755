"""What chooses the CPU kernels of torch besides the CPU itself."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from hashlib import sha256

import torch

_LIBRARIES = ("DNNL_", "MKL_", "ONEDNN_")
"""How the variables begin that the libraries beneath torch read: an instruction set, a number
format, a reproducible order of sums.  All count, because new versions know new ones."""
_LONGEST = 1000
_PLAIN = re.compile("[!-~]*")
"""What has no space, and can be sent: a variable may hold any bytes."""


def cpu_kernels(environment: Mapping[str, str] = os.environ) -> str:
    """Return the instruction set that torch uses, and the settings of its libraries: a digest of
    them if they are long or could not be told apart."""
    told = {name: value for name, value in environment.items() if name.startswith(_LIBRARIES)}
    settings = [f"{name}={value}" for name, value in sorted(told.items())]
    if len(" ".join(settings)) > _LONGEST or not all(map(_PLAIN.fullmatch, settings)):
        settings = [f"settings {sha256(os.fsencode(chr(0).join(settings))).hexdigest()}"]
    return " ".join([torch.backends.cpu.get_cpu_capability(), *settings])
