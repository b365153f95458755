"""Checks of GPUs, as nvidia-smi shows them."""

from __future__ import annotations

from .checks import Finding, judged, not_applicable, warning
from .evidence import Evidence
from .place import using_this

PIPES = "CUDA_MPS_PIPE_DIRECTORY"
NO_GPU = "no GPU that nvidia-smi shows"


def _rows(seen: Evidence) -> list[list[str]]:
    """Index, name, MIG mode and compute mode of each GPU."""
    return [[cell.strip() for cell in row.split(",")] for row in (seen.gpus or "").splitlines()]


def mig(seen: Evidence) -> Finding:
    if seen.gpus is None:
        return not_applicable(NO_GPU)
    divided = [f"GPU {row[0]} is divided (MIG)" for row in _rows(seen) if row[2] == "Enabled"]
    why = [f"{'; '.join(divided)}: its instances cannot reach each other's memory"]
    return judged(why if divided else [], "no GPU is divided", warning)


def mps(seen: Evidence) -> Finding:
    if seen.gpus is None:
        return not_applicable(NO_GPU)
    places = {process.pid: process.environ.get(PIPES, "") for process in using_this(seen)}
    if len(set(places.values())) > 1:
        each = (f"process {pid}: {place or 'unset'}" for pid, place in places.items())
        return warning(f"{PIPES} differs: {'; '.join(each)}")
    exclusive = (
        f"GPU {row[0]} admits one process (compute mode {row[3]})"
        for row in _rows(seen)
        if row[3] not in {"Default", "[N/A]"}
    )
    return judged(exclusive, "all engines use the same MPS daemon, or none", warning)
