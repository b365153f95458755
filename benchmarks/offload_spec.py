"""vLLM's own offloading to host memory with copies that need no GPU.

vLLM's OffloadingConnector decides, keeps account and evicts as ever; what it has for a GPU only is
the copying of blocks.  Engines load this module by ``spec_module_path``.  A copy is made at once,
by the worker's thread: there is no device that could make it meanwhile.
"""

from __future__ import annotations

import time

import torch
from vllm.v1.kv_offload.base import (
    BlockIDsLoadStoreSpec,
    CanonicalKVCaches,
    GPULoadStoreSpec,
    LoadStoreSpec,
    OffloadingWorker,
    TransferResult,
)
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec


class HostCopyWorker(OffloadingWorker):  # type: ignore[misc]  # mypy does not follow vLLM
    """Copies blocks of one KV cache group between two places in host memory."""

    def __init__(self, caches: CanonicalKVCaches, blocks: int) -> None:
        if len(caches.group_data_refs) != 1:
            raise NotImplementedError(f"{len(caches.group_data_refs)} KV cache groups")
        self._caches = [each.tensor for each in caches.tensors]
        # Written now: the first touch of a page costs more than the copy into it.
        self._kept = [
            torch.zeros((blocks, each.shape[1]), dtype=torch.int8) for each in self._caches
        ]
        self._done = list[TransferResult]()

    def submit_store(
        self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec
    ) -> bool:
        return self._copy(job_id, self._caches, src_spec, self._kept, dst_spec)

    def submit_load(self, job_id: int, src_spec: LoadStoreSpec, dst_spec: GPULoadStoreSpec) -> bool:
        return self._copy(job_id, self._kept, src_spec, self._caches, dst_spec)

    def _copy(
        self,
        job_id: int,
        sources: list[torch.Tensor],
        src_spec: LoadStoreSpec,
        targets: list[torch.Tensor],
        dst_spec: LoadStoreSpec,
    ) -> bool:
        assert isinstance(src_spec, BlockIDsLoadStoreSpec)
        assert isinstance(dst_spec, BlockIDsLoadStoreSpec)
        pairs = [*zip(src_spec.block_ids.tolist(), dst_spec.block_ids.tolist(), strict=True)]
        began, copied = time.monotonic(), 0
        for source, target in zip(sources, targets, strict=True):
            for there, here in pairs:
                target[here].copy_(source[there])
            copied += len(pairs) * source.shape[1]
        self._done.append(TransferResult(job_id, True, copied, time.monotonic() - began))
        return True

    def get_finished(self) -> list[TransferResult]:
        done, self._done = self._done, []
        return done

    def wait(self, job_ids: set[int]) -> None:
        """Every copy is made by the time it is submitted."""


class HostCopySpec(CPUOffloadingSpec):  # type: ignore[misc]  # mypy does not follow vLLM
    """vLLM's tier of host memory, for engines without a GPU."""

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        if self.blocks_per_chunk != 1:
            raise NotImplementedError(f"{self.blocks_per_chunk} blocks in a chunk")
        return HostCopyWorker(kv_caches, self.num_chunks)
