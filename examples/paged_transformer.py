"""A small decoder with a paged KV cache, in plain torch: an engine's inside without the engine.

Weights are random but the same for the same seed, so two processes have the same model.  The
cache is one tensor, ``[layer, block, key or value, token, head, dim]``; a request is a list of
block ids, as in vLLM.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Shape:
    """Sizes of model and cache.  The default's KV has 32 layers of 8 heads of 128: an 8B's."""

    layers: int = 32
    heads: int = 8
    dim: int = 128
    vocabulary: int = 1024
    block_size: int = 16
    blocks: int = 1024

    @property
    def width(self) -> int:
        return self.heads * self.dim


class PagedTransformer:
    """The model and its cache on one device."""

    def __init__(self, shape: Shape, device: str, dtype: torch.dtype, seed: int = 0) -> None:
        self.shape, self.device, self.dtype = shape, device, dtype
        generator = torch.Generator().manual_seed(seed)

        def weights(*size: int) -> Tensor:
            scale = size[0] ** -0.5
            return (torch.randn(*size, generator=generator) * scale).to(device, dtype)

        width = shape.width
        self.embedding = weights(shape.vocabulary, width) * 10
        self.attention = [weights(width, 4 * width) for _ in range(shape.layers)]
        self.feedforward = [
            (weights(width, 2 * width), weights(2 * width, width)) for _ in range(shape.layers)
        ]
        self.output = weights(width, shape.vocabulary)
        self.cache = torch.zeros(
            shape.layers, shape.blocks, 2, shape.block_size, shape.heads, shape.dim,
            device=device, dtype=dtype,
        )  # fmt: skip

    def compute(self, tokens: Sequence[int], blocks: Sequence[int], computed: int = 0) -> Tensor:
        """Compute ``tokens[computed:]`` over the KV in ``blocks``, fill in theirs, and return
        the last token's logits.  ``computed`` tokens must have theirs there already."""
        new = torch.tensor(tokens[computed:], device=self.device)
        hidden = self.embedding[new] + self._positions(computed, len(tokens))
        table = torch.tensor(blocks, device=self.device)
        for layer in range(self.shape.layers):
            hidden = hidden + self._attend(layer, _norm(hidden), table, computed)
            up, down = self.feedforward[layer]
            hidden = hidden + torch.nn.functional.gelu(_norm(hidden) @ up) @ down
        return (_norm(hidden[-1]) @ self.output).float()

    def _positions(self, begin: int, end: int) -> Tensor:
        steps = torch.arange(begin, end, device=self.device, dtype=torch.float32)[:, None]
        rates = torch.arange(self.shape.width, device=self.device, dtype=torch.float32)
        return torch.sin(steps / 10000 ** (rates / self.shape.width)).to(self.dtype)

    def _attend(self, layer: int, hidden: Tensor, table: Tensor, computed: int) -> Tensor:
        shape, count = self.shape, len(hidden)
        query, key, value, gate = (hidden @ self.attention[layer]).chunk(4, dim=-1)
        at = torch.arange(computed, computed + count, device=self.device)
        block, slot = table[at // shape.block_size], at % shape.block_size
        self.cache[layer, block, 0, slot] = key.view(count, shape.heads, shape.dim)
        self.cache[layer, block, 1, slot] = value.view(count, shape.heads, shape.dim)
        paged = self.cache[layer, table]  # [block, key or value, token, head, dim]
        keys, values = (
            paged[:, part].reshape(-1, shape.heads, shape.dim)[: computed + count].transpose(0, 1)
            for part in (0, 1)
        )
        mask = torch.arange(computed + count, device=self.device) <= at[:, None]
        attended = torch.nn.functional.scaled_dot_product_attention(
            query.view(count, shape.heads, shape.dim).transpose(0, 1)[None],
            keys[None], values[None], attn_mask=mask,
        )[0]  # fmt: skip
        return attended.transpose(0, 1).reshape(count, -1) * torch.sigmoid(gate)


def _norm(hidden: Tensor) -> Tensor:
    return torch.nn.functional.layer_norm(hidden, hidden.shape[-1:])
