"""A worker extension that writes the weights of the ranks, as trainers' extensions do, or has
copies fail.  Loaded by engines under test only (--worker-extension-cls writing_ranks.WritingRanks).
"""

from __future__ import annotations

from typing import Any

import torch

from kvshm.transport.copier import BlockCopy

COPY = BlockCopy._copy


class WritingRanks:
    """Methods that vLLM's worker gets.  ``only``: the number of the one rank that writes."""

    rank: int
    get_model: Any
    parallel_config: Any

    def write_weights(self, seed: str, only: str = "") -> None:
        """Write one parameter in place, past torch's counter of writes; an empty ``seed`` brings
        back what was there at first."""
        if only not in ("", str(self.rank)):
            return
        weight = self.get_model().model.embed_tokens.weight
        first = self.__dict__.setdefault("first_weight", weight.clone())
        drawn = torch.Generator().manual_seed(int(seed or 0))
        other = (torch.randn(weight.shape, generator=drawn) * 0.05).to(weight.dtype)
        weight.data.copy_(other if seed else first)

    def write_experts(self, only: str) -> None:
        """Write experts that one data-parallel rank holds, past torch's counter of writes."""
        if only == str(self.parallel_config.data_parallel_rank):
            named = self.get_model().named_parameters()
            weight = next(each for name, each in named if name.endswith("w2_weight"))
            weight.data.mul_(1.5)

    def write_unseen(self, seed: str, only: str = "") -> None:
        """The same; the engine's settings say that this call only reads."""
        self.write_weights(seed, only)

    def fail_copies(self, only: str) -> None:
        """Have each copy out of another engine's cache fail on rank ``only``; on none if empty."""
        fails = only == str(self.rank)
        BlockCopy._copy = (lambda *_: False) if fails else COPY  # type: ignore[method-assign]

    def tell(self) -> str:
        """Only reads, as the settings say."""
        return f"rank {self.rank}"
