"""Checks of GPUs, as nvidia-smi shows them."""

from __future__ import annotations

from .checks import Finding, judged, not_applicable, ok, warning
from .evidence import Evidence
from .place import using_this


def mig(seen: Evidence) -> Finding:
    if seen.gpus is None:
        return not_applicable("no GPU that nvidia-smi shows")
    on = [row.split(",")[0] for row in seen.gpus.splitlines() if row.split(",")[2].strip() ==
          "Enabled"]  # fmt: skip
    said = "; ".join(f"GPU {gpu} is divided (MIG)" for gpu in on)
    return (
        warning(f"{said}: its instances cannot reach each other's memory")
        if on
        else ok("no GPU is divided")
    )


def mps(seen: Evidence) -> Finding:
    if seen.gpus is None:
        return not_applicable("no GPU that nvidia-smi shows")
    name = "CUDA_MPS_PIPE_DIRECTORY"
    places = {process.environ.get(name, "") for process in using_this(seen)}
    if len(places) > 1:
        who = (f"process {p.pid}: {p.environ.get(name) or 'unset'}" for p in
               using_this(seen))  # fmt: skip
        return warning(f"{name} differs: {'; '.join(who)}")
    exclusive = (
        f"GPU {row.split(',')[0]} admits one process (compute mode {row.split(',')[3].strip()})"
        for row in seen.gpus.splitlines()
        if row.split(",")[3].strip() not in {"Default", "[N/A]"}
    )
    return judged(exclusive, "all engines use the same MPS daemon, or none", warning)
