"""What a load adds to the traffic and the import times in the engine's own slot table."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from kvshm._base.copy_path import CopyPath, slowest
from kvshm._base.ids import BlockId
from kvshm._shm.statistics import IMPORT_TIMES

from .epoch_state import EpochState
from .load_plan import LoadOrder, LoadReport


def time_taken(reports: Sequence[LoadReport]) -> tuple[CopyPath, float] | None:
    """Return the slowest path of a load's copies, and the seconds of its slowest rank.  None if
    nothing was copied."""
    took = max((report.seconds for report in reports), default=0.0)
    used = {path for report in reports for path in report.paths if path is not None}
    return (slowest(used), took) if used and took else None


def record_traffic(
    epoch: EpochState, load: LoadOrder, reports: Sequence[LoadReport], bad: Collection[BlockId]
) -> None:
    """Add a load that all ranks have reported.  Its peers share a rank's time by bytes."""
    took = max((report.seconds for report in reports), default=0.0)
    if (taken := time_taken(reports)) is not None:
        epoch.table.histograms.observe(IMPORT_TIMES[taken[0]], round(taken[1] * 1e9))
    for place, piece in enumerate(load.pieces):
        own = piece.peer_epoch == epoch.table.epoch
        paths = [report.paths[place] for report in reports if len(report.paths) > place]
        copied = [path for path in paths if path is not None]
        nbytes = piece.block_bytes * len(piece.targets)
        epoch.table.traffic.add(
            epoch.peers.name_of(piece.peer_epoch),
            piece.peer_epoch,
            CopyPath.OWN if own else slowest(copied) if copied else None,
            loads=1,
            failed=any(target in bad for target in piece.targets),
            blocks=len(piece.targets) * len(copied),
            nbytes=nbytes * len(copied),
            seconds=took * nbytes / load.nbytes if copied else 0.0,
        )
