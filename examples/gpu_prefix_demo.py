"""A prefix computed by one process is used by another, on GPU, without an engine.

    python examples/gpu_prefix_demo.py [--tokens 4096] [--tail 33]

Two processes have the same small transformer with a paged KV cache each.  The first computes a
long prefix; the second imports its blocks and computes only the tail.  Its logits must equal,
bit for bit, those it gets over a prefix that it computed itself.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import time
from typing import Any

from gpu_memory import no_gpu
from gpu_peer import GpuPeer, answer_calls
from gpu_sizes import sized

from kvshm._base.ids import BlockId, Epoch


class Side:
    """What runs in each of the two processes."""

    def __init__(self, device: int) -> None:
        import torch
        from paged_transformer import PagedTransformer, Shape

        torch.cuda.set_device(device)
        self.torch = torch
        self.shape = Shape()
        self.model = PagedTransformer(self.shape, "cuda", torch.bfloat16)
        self._share()

    def _share(self) -> None:
        from kvshm.interfaces import Region
        from kvshm.transport.cuda.transport import CudaIpcTransport

        cache = self.model.cache
        per_layer = cache[0].numel() * cache.element_size()
        block = per_layer // self.shape.blocks
        regions = [
            Region(layer * per_layer, block, block, self.shape.blocks)
            for layer in range(self.shape.layers)
        ]
        memory = CudaIpcTransport.adopt(cache.data_ptr(), per_layer * self.shape.layers, cache)
        self.transport = CudaIpcTransport(memory, regions, 0)

    def export(self, epoch: Epoch) -> str:
        import msgspec

        return msgspec.msgpack.encode(self.transport.export(epoch)).hex()

    def attach(self, descriptor: str) -> None:
        import msgspec

        from kvshm.interfaces import MemoryDescriptor

        found = msgspec.msgpack.decode(bytes.fromhex(descriptor), type=MemoryDescriptor)
        self.attachment = self.transport.attach(found)

    def load(self, source: list[BlockId], target: list[BlockId]) -> float:
        """Import blocks; seconds until they are there."""
        from kvshm.interfaces import CopyState

        begun = time.perf_counter()
        copy = self.attachment.begin_copy(source, target)
        while (state := copy.poll()) is CopyState.PENDING:
            pass
        assert state is CopyState.DONE
        return time.perf_counter() - begun

    def compute(self, tokens: list[int], blocks: list[int], computed: int = 0) -> dict[str, Any]:
        """Compute tokens; the logits and the seconds it took."""
        self.torch.cuda.synchronize()
        begun = time.perf_counter()
        logits = self.model.compute(tokens, blocks, computed)
        self.torch.cuda.synchronize()
        return {"logits": logits.tolist(), "seconds": time.perf_counter() - begun}


def main() -> int:
    options = arguments()
    if (reason := no_gpu()) is not None:
        print(reason)
        return 1
    with GpuPeer(program=__file__) as a, GpuPeer(program=__file__) as b:
        return compare(a, b, options.tokens, options.tail)


def compare(a: GpuPeer, b: GpuPeer, prefix: int, tail: int) -> int:
    """Compute on ``a``, import into ``b``, and compare with ``b`` on its own."""
    tokens = [random.Random(1).randrange(1024) for _ in range(prefix + tail)]
    full, total = prefix // 16, -(-(prefix + tail) // 16)
    computed = full * 16
    theirs = random.Random(2).sample(range(1024), full)
    free = random.Random(3).sample(range(1024), 2 * total)
    mine, imported = free[:total], free[total:]
    for peer in (a, b):
        peer.call("compute", tokens=tokens[:64], blocks=theirs[:4])  # the first run warms up
    a.call("compute", tokens=tokens[:computed], blocks=theirs)
    prefill = b.call("compute", tokens=tokens[:computed], blocks=mine)["seconds"]
    alone = b.call("compute", tokens=tokens, blocks=mine, computed=computed)
    b.call("attach", descriptor=a.call("export", epoch=1))
    b.call("load", source=theirs[:1], target=imported[:1])
    seconds = b.call("load", source=theirs, target=imported[:full])
    shared = b.call("compute", tokens=tokens, blocks=imported, computed=computed)
    equal = shared["logits"] == alone["logits"]
    print(f"prefix of {computed} tokens: computed in {prefill * 1e3:.2f} ms, ", end="")
    print(f"imported in {seconds * 1e3:.2f} ms; logits of the tail ", end="")
    print("are equal" if equal else "DIFFER")
    return int(not equal)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tokens", type=int, default=sized(4096, 256), help="tokens of the prefix")
    parser.add_argument("--tail", type=int, default=33, help="tokens behind it")
    return parser.parse_args()


if __name__ == "__main__":
    if os.environ.get("GPU_PEER"):
        answer_calls(Side)
    else:
        sys.exit(main())
