"""Which side must upgrade when an engine and the coordinator have different versions.  Pure."""

from __future__ import annotations

from kvshm.errors import VersionMismatch
from kvshm.version import __version__

from .actions import Refusal


def who_upgrades(what: str, mismatch: VersionMismatch, engine_version: str) -> Refusal:
    """Refuse an engine whose ``what`` ("protocol", "layout") differs from the coordinator's."""
    theirs = f"{what} {mismatch.theirs} (kvshm {engine_version or 'unknown'})"
    ours = f"{what} {mismatch.ours} (kvshm {__version__})"
    if mismatch.theirs < mismatch.ours:
        remedy = f"upgrade kvshm in the engine's environment to {__version__}, restart the engine"
    else:
        newer = engine_version or "the engine's version"
        remedy = f"upgrade kvshm in the coordinator's environment to {newer}, restart it"
    return Refusal(f"the engine has {theirs}, the coordinator {ours}", remedy)
