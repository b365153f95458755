"""An engine without a model whose cache lies in GPU memory, told what to do line by line."""

from __future__ import annotations

from hashlib import sha256
from typing import Any

from gpu_peer import answer_calls

import kvshm
from kvshm import Config, Identity, Region
from kvshm.transport.cuda.export import DeviceMemory

LAYERS, BLOCK, BLOCKS, TOKENS = 3, 1 << 16, 64, 4
PATIENCE_SECONDS = 60.0


class Engine:
    def __init__(self, device: int) -> None:
        import torch  # here: tests import this file without it

        self.torch = torch
        torch.cuda.set_device(device)

    def join(self, run_dir: str, namespace: str, name: str) -> str:
        """Returns why it cannot share, or nothing."""
        nbytes = LAYERS * BLOCK * BLOCKS
        self.cache = self.torch.zeros(nbytes, dtype=self.torch.uint8, device="cuda")
        self.torch.cuda.synchronize()
        memory = DeviceMemory(self.cache.data_ptr(), nbytes, self.cache)
        regions = [Region(i * BLOCK * BLOCKS, BLOCK, BLOCK, BLOCKS) for i in range(LAYERS)]
        self.node = kvshm.join(
            Identity(engine="toy 1", model="m", weights="w"), memory=memory, regions=regions,
            block_size=TOKENS, config=Config(run_dir=run_dir, namespace=namespace), name=name,
            device="cuda", wait=PATIENCE_SECONDS,
        )  # fmt: skip
        return self.node.refusal or ""

    def compute(self, blocks: int) -> None:
        """A prompt of so many blocks, into the first ones."""
        keys = self._keys(blocks)
        for block, key in enumerate(keys):
            for layer in range(LAYERS):
                content = _content(key, layer)
                self._at(layer, block).copy_(self.torch.frombuffer(content, dtype=self.torch.uint8))
        self.torch.cuda.synchronize()
        assert self.node.publish(keys, range(blocks)) == blocks

    def find(self, blocks: int) -> list[Any]:
        """How many blocks of the prompt others have, and who."""
        found = self.node.lookup(self._keys(blocks))
        return [found.length, [owner.name for owner in found.owners]]

    def load(self, blocks: int) -> list[Any]:
        """Import the prompt into the last blocks; returns how that ended, and how many
        are right."""
        keys, targets = self._keys(blocks), range(BLOCKS - blocks, BLOCKS)
        state = self.node.load(self.node.lookup(keys), targets).wait(PATIENCE_SECONDS)
        self.torch.cuda.synchronize()
        right = [
            bytes(self._at(layer, block).cpu().numpy()) == _content(key, layer)
            for block, key in zip(targets, keys, strict=True)
            for layer in range(LAYERS)
        ]
        return [state.value, sum(right)]

    def close(self) -> None:
        self.node.close()

    def _keys(self, blocks: int) -> list[bytes]:
        return list(self.node.keys(range(blocks * TOKENS)))

    def _at(self, layer: int, block: int) -> Any:
        start = (layer * BLOCKS + block) * BLOCK
        return self.cache[start : start + BLOCK]


def _content(key: bytes, layer: int) -> bytearray:
    return bytearray(sha256(key + bytes([layer])).digest() * (BLOCK // 32))


if __name__ == "__main__":
    answer_calls(Engine)
