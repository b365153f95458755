"""What the ranks of one mixture of experts tell each other, if they are ranks of several engines.

With data parallelism vLLM divides the experts over all ranks of all engines of an instance, so what
one rank computes depends on weights that others hold.  Each rank shows the digest of its share
(identity/experts.py) on a board, and hides it before its weights change; an engine shares while all
ranks show one, and begins another epoch if one has changed.  Nobody waits for anybody: ranks
describe their weights at different times, in different steps.

The board lies in memory of this machine, where a change is seen at once.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed import distributed_c10d

from kvshm._base.fingerprint import EXPERTS
from kvshm.errors import TransportError
from kvshm.halves import RankBoard

from .identity.experts import SHARE_BYTES, rest_of, with_experts

SECONDS = 60.0
"""How long an engine waits for the others' digests before it says so; it goes on looking."""
_NAME = "kvshm board"


class OwnShare:
    """A rank's entry on the board, and what it sees of the others'.  Any thread."""

    def __init__(self, board: RankBoard, rank: int) -> None:
        self._board, self._rank = board, rank
        self._cleared = board.times_cleared()

    @classmethod
    def of_this_rank(cls, run_dir: Path, namespace: str, parallel_config: Any) -> OwnShare | None:
        """Return the entry of the calling worker's rank; None if no other engine holds experts of
        its model.  Does not wait for the other ranks.  Raises TransportError."""
        if parallel_config.data_parallel_size == 1:  # as vLLM has it for models without experts
            return None
        # vLLM has connected all ranks of all engines; the first that asks chooses the name.
        try:
            store = distributed_c10d._get_default_store()
            name = store.compare_set(_NAME, "", secrets.token_hex(8)).decode()
            ranks = torch.distributed.get_world_size()
        except (ValueError, RuntimeError) as exc:  # whatever torch says
            raise TransportError(f"the instance's other ranks cannot be found: {exc}") from exc
        board = RankBoard.named(run_dir, namespace, name, ranks)
        return cls(board, torch.distributed.get_rank())

    @property
    def where(self) -> tuple[str, int]:
        """The board's path, and for how many ranks it is."""
        return str(self._board.path), self._board.ranks

    def close(self) -> None:
        """Leave the digest there: the weights change no more."""
        self._board.close()

    def begin(self) -> None:
        """Before the own weights are digested: from now on changes of the others' count."""
        self._cleared = self._board.times_cleared()

    def show(self, fields: Mapping[str, str]) -> None:
        """Show the digests of what this rank holds, its fields of the fingerprint."""
        share = bytes.fromhex(fields[EXPERTS])
        self._board.show(self._rank, share + rest_of(fields))

    def hide(self) -> None:
        """The weights of this rank are about to change, or may have changed."""
        self._board.clear(self._rank)

    def changed(self) -> str:
        """Return which rank's experts have changed since ``begin``; empty: none."""
        pairs = enumerate(zip(self._board.times_cleared(), self._cleared, strict=True))
        others = (rank for rank, (now, before) in pairs if now != before and rank != self._rank)
        return next((f"the experts of rank {rank} of this instance" for rank in others), "")


class AllShares:
    """The experts of all ranks, as an engine's scheduler sees them: one epoch's."""

    def __init__(
        self,
        board: RankBoard,
        fields: Callable[[], dict[str, str] | None],
        own: Collection[bytes],
        missing: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``fields`` returns those of the fingerprint, with the own experts only; None while they
        are not known.  ``own``: what ``rest_of`` returns for each own rank.  ``missing`` is
        called once if ranks show nothing for SECONDS."""
        self._board, self._fields, self._missing, self._clock = board, fields, missing, clock
        self._own = own
        self._since: float | None = clock()
        self._entries: bytes | None = None  # what the fields were made of

    def fields(self) -> dict[str, str] | None:
        """Return the fingerprint's fields; None while some rank shows no digest.  Does not
        block."""
        entries = self._board.look()
        shown = self._board.digests(entries)
        shares = [share for share in shown if share is not None]
        if len(shares) < len(shown):
            self._still_missing([rank for rank, share in enumerate(shown) if share is None])
            return None
        if (fields := self._fields()) is None:
            return None
        self._entries = entries
        # Other ranks of a known layer of experts hold, besides their experts, what the own have.
        # One that does not may hold experts of another kind of layer: which rank does so counts.
        rests = [share[SHARE_BYTES:] for share in shares]
        unknown = [i.to_bytes(4) + rest for i, rest in enumerate(rests) if rest not in self._own]
        return with_experts(fields, [share[:SHARE_BYTES] for share in shares], unknown)

    def changed(self) -> bool:
        """Whether a rank has changed or hidden its digest since the fields were made."""
        return self._entries is not None and self._board.look() != self._entries

    def _still_missing(self, silent: list[int]) -> None:
        if self._since is None or self._clock() - self._since < SECONDS:
            return
        self._since = None
        self._missing(
            f"the experts of rank {', '.join(map(str, silent))} of this instance are not known: "
            "each of its ranks must run kvshm in this namespace on this machine; after a change "
            "of its weights a rank tells of them with its first request"
        )
