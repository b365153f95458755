"""A digest of the experts of a mixture that does not depend on where they lie.

A block's bytes depend on every expert, whichever rank holds it: the ranks send each other tokens,
not weights.  So each rank digests the experts that it holds one by one, by their numbers in the
model, and the digests of all ranks are added up:

    rank 0: experts 0 1 2  ->  share 0 \
                                          sum: the model's experts, whoever holds them
    rank 1: experts 3 4 5  ->  share 1 /

Of an expert that is divided among ranks, each part counts by its number and that of the parts.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from hashlib import sha256
from typing import Any, NamedTuple

import torch

from kvshm._base.fingerprint import EXPERTS, WEIGHTS

from ...weights import WeightsUnknown, digest_tensors, where

ROUTED_EXPERTS = "RoutedExperts"
LEAST_BITS = 2
"""Of a number of a quantized weight, at least; scales have fewer for each number."""
SHARE_BYTES = 32
NO_EXPERTS = bytes(SHARE_BYTES)
PLACEMENT = (
    "_expert_map",
    "expert_mask",
    "expert_global_to_physical",
    "expert_physical_to_global",
    "expert_local_to_global",
)
"""Buffers of vLLM's layers that only say where experts lie."""
_NOT_BY_EXPERT = ("e_score_correction_bias", "hash_indices_table")
"""Parameters that vLLM's layers also have, and that belong to the router."""


class Held(NamedTuple):
    """Tensors of one layer, each with one row per expert that this rank holds."""

    layer: str
    experts: list[int]
    """The number in the model of the expert of each row."""
    part: tuple[int, int]
    """Which of how many parts of each expert the rank holds."""
    tensors: dict[str, torch.Tensor]


def held_experts(model: torch.nn.Module) -> list[Held]:
    """Return the experts of each layer that has some.  Raises WeightsUnknown."""
    held = (_held(name, module) for name, module in sorted(model.named_modules()))
    return [found for found in held if found is not None]


def names_apart(held: Iterable[Held]) -> set[str]:
    """Return the names of the tensors whose rows are experts, and of those that only say where
    experts lie."""
    return {f"{each.layer}.{key}" for each in held for key in (*each.tensors, *PLACEMENT)}


def _held(name: str, module: torch.nn.Module) -> Held | None:
    """What a layer of vLLM's class RoutedExperts holds; None for another module, as its runner,
    which has its configuration, too."""
    config = getattr(module, "moe_config", None)
    manager = getattr(module, "expert_map_manager", None)
    if config is None or manager is None:
        return None
    experts = _numbers(manager)
    tensors = {
        key: tensor.detach()
        for key, tensor in (*module._parameters.items(), *module._buffers.items())
        if tensor is not None
        and key not in (*PLACEMENT, *_NOT_BY_EXPERT)
        and tensor.ndim
        and len(tensor) == len(experts)
    }
    # vLLM's runner of such a layer has no tensors, and is not of that class.
    if is_a(ROUTED_EXPERTS, module) and not _keeps(module, config):
        raise WeightsUnknown(f"vLLM keeps the experts of {name} where they cannot be read")
    parallel = config.moe_parallel_config
    part = parallel.tp_rank, parallel.tp_size
    return Held(name, experts, part, tensors) if tensors else None


def is_a(name: str, module: torch.nn.Module) -> bool:
    """Whether a module is of vLLM's class of this name."""
    return any(kind.__name__ == name for kind in type(module).__mro__)


def _keeps(module: torch.nn.Module, config: Any) -> bool:
    """Whether a layer holds both matrices of its experts, on any device: some kernels keep weights
    in a form of their own, and leave nothing behind, or the scales."""
    numbers = config.num_local_experts * config.hidden_dim * config.intermediate_size_per_partition
    return all(
        any(
            key.startswith(matrix) and each is not None and each.nbytes * 8 >= numbers * LEAST_BITS
            for key, each in module._parameters.items()
        )
        for matrix in ("w13", "w2")
    )


def _numbers(manager: Any) -> list[int]:
    """The number of the expert at each place of this rank, by vLLM's ExpertMapManager."""
    if (places := manager.expert_map) is None:
        return list(range(manager.global_num_experts))
    held = [(place, number) for number, place in enumerate(places.tolist()) if place >= 0]
    return [number for _, number in sorted(held)]


def share_of(held: Iterable[Held], model: str = "") -> bytes:
    """Return the sum of the digests of what this rank holds, SHARE_BYTES long.  ``model`` tells the
    experts of several models apart.  Blocks while it reads them.  Raises WeightsUnknown."""
    found = list(held)
    rows: dict[object, bytes] = {}
    digest_tensors(
        ((key, row) for each in found for key, rows_of in each.tensors.items() for row in rows_of),
        rows,
    )
    return total(
        _expert(model, each, place, rows) for each in found for place in range(len(each.experts))
    )


def _expert(model: str, held: Held, place: int, rows: dict[object, bytes]) -> bytes:
    digest = sha256(repr((model, held.layer, held.experts[place], held.part)).encode())
    for key, tensor in sorted(held.tensors.items()):
        row = tensor[place]
        about = key, tuple(row.shape), row.stride(), str(row.dtype)
        digest.update(repr(about).encode() + rows[where(row)])
    return digest.digest()


def total(shares: Iterable[bytes]) -> bytes:
    """Return the sum, in whatever order; no two lists of digests that anybody can find have the
    same."""
    number = sum(int.from_bytes(share, "big") for share in shares)
    return (number % (1 << 8 * SHARE_BYTES)).to_bytes(SHARE_BYTES, "big")


def rest_of(fields: Mapping[str, str]) -> bytes:
    """Return a digest of all that a rank holds besides experts, as its ``fields`` tell."""
    return sha256(fields[WEIGHTS].encode()).digest()


def with_experts(
    fields: dict[str, str], shares: Iterable[bytes], unknown: Collection[bytes] = ()
) -> dict[str, str]:
    """Return ``fields`` with EXPERTS, the sum of the ranks' ``shares`` of the model's experts.
    ``unknown``: number and ``rest_of`` of ranks that hold what no own rank has, so perhaps experts
    in layers that are not known here."""
    together = total([*shares, *(sha256(rest).digest() for rest in unknown)])
    return {**fields, EXPERTS: "none" if together == NO_EXPERTS else together.hex()}


def kernels(model: torch.nn.Module) -> list[tuple[str, str]]:
    """Return by which kernels each layer of ``model`` computes its experts, as far as known."""
    methods = ((name, getattr(each, "quant_method", None)) for name, each in model.named_modules())
    chosen = ((name, getattr(method, "moe_kernel", None)) for name, method in methods)
    named = ((name, getattr(kernel, "fused_experts", kernel)) for name, kernel in chosen)
    return [(name, type(kernel).__qualname__) for name, kernel in named if kernel is not None]
