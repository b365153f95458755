"""Makes vLLM's CPU backend run a mixture of experts over several ranks: a plug-in for vLLM.

On CPUs vLLM 0.32 and 0.33 have no ``all_gatherv`` and ``reduce_scatterv``, by which data-parallel
ranks send tokens to each other's experts, and their kernel takes an expert's number in the model
for its place among the rank's own (``expert_map`` is ignored): with expert parallelism it reads
behind its weights, and the worker dies without a Python error.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

NAME = Path(__file__).stem
METADATA = f"Metadata-Version: 2.1\nName: {NAME}\nVersion: 1.0\n"


def activate() -> None:
    """Entry point ``vllm.general_plugins``."""
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts

    apply = CPUUnquantizedExperts.apply

    def apply_local(self: Any, *, topk_weights: Any, topk_ids: Any, expert_map: Any, **named: Any):  # type: ignore[no-untyped-def]
        if expert_map is not None:
            places = expert_map[topk_ids.long()]
            topk_weights = topk_weights.masked_fill(places < 0, 0)
            topk_ids = places.clamp(min=0).to(topk_ids.dtype)
        apply(self, topk_weights=topk_weights, topk_ids=topk_ids, expert_map=None, **named)

    CPUUnquantizedExperts.apply = apply_local
    CpuCommunicator.all_gatherv = all_gatherv
    CpuCommunicator.reduce_scatterv = reduce_scatterv


def all_gatherv(self: Any, input_: Any, dim: int = 0, sizes: list[int] | None = None) -> Any:
    import torch

    if isinstance(input_, list):
        return [all_gatherv(self, each, dim, sizes) for each in input_]
    sizes = sizes or [len(input_)] * self.world_size
    padded = input_.new_zeros((max(sizes), *input_.shape[1:]))
    padded[: len(input_)] = input_
    gathered = [torch.empty_like(padded) for _ in sizes]
    torch.distributed.all_gather(gathered, padded, group=self.cpu_group)
    return torch.cat([each[:size] for each, size in zip(gathered, sizes, strict=True)])


def reduce_scatterv(self: Any, input_: Any, dim: int = -1, sizes: list[int] | None = None) -> Any:
    import torch

    summed = input_.contiguous().clone()
    torch.distributed.all_reduce(summed, group=self.cpu_group)
    return summed.split(sizes or len(input_) // self.world_size)[self.rank_in_group].contiguous()


def install(folder: Path) -> dict[str, str]:
    """Install the plug-in into ``folder``; return the environment in which vLLM finds it."""
    shutil.copy(__file__, folder / f"{NAME}.py")
    about = folder / f"{NAME}-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(METADATA)
    (about / "entry_points.txt").write_text(f"[vllm.general_plugins]\n{NAME} = {NAME}:activate\n")
    return {"PYTHONPATH": os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])}
