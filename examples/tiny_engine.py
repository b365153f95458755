"""A small engine that shares its prefix cache: examples/tiny_engine_alone.py with kvshm.

    kvshm-coordinator &
    python examples/tiny_engine.py      # in two terminals: give both the same prompt

Each line of stdin, or each argument, is a prompt; its tokens are its bytes.  For each prompt it
prints where its tokens came from, and the next tokens.  docs/porting.md leads from the engine alone
to the one that shares.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from hashlib import sha256
from itertools import chain, islice

import torch
from paged_transformer import PagedTransformer, Shape

try:
    import kvshm
except ImportError:  # only sharing needs it
    kvshm = None  # type: ignore[assignment]  # a module, else

BLOCK_SIZE = 16


def prefixes_of(tokens: Sequence[int]) -> list[tuple[int, ...]]:
    """What the full blocks of a prompt hold: each its own tokens, after all before them."""
    ends = range(BLOCK_SIZE, len(tokens) + 1, BLOCK_SIZE)
    return [tuple(tokens[:end]) for end in ends]


class BlockPool:
    """Who uses which block, and what the full ones hold.

    A block that nobody uses keeps its contents until it is taken for others, the one whose use
    ended first before all others.
    """

    def __init__(self, num_blocks: int) -> None:
        self._unused = dict.fromkeys(range(num_blocks))
        self._users = [0] * num_blocks
        self._blocks: dict[tuple[int, ...], int] = {}
        self._contents: dict[int, tuple[int, ...]] = {}

    def find(self, prefixes: Sequence[tuple[int, ...]]) -> list[int]:
        """Return the blocks of the longest prefix that the cache holds; they are used now."""
        found = []
        for prefix in prefixes:
            if (block := self._blocks.get(prefix)) is None:
                break
            self._unused.pop(block, None)
            self._users[block] += 1
            found.append(block)
        return found

    def take(self, count: int) -> list[int]:
        """Return blocks for new contents; they are used now."""
        if count > len(self._unused):
            raise MemoryError(f"{count} blocks are wanted, {len(self._unused)} are there")
        taken = list(islice(self._unused, count))
        for block in taken:
            del self._unused[block]
            self._users[block] = 1
            if (prefix := self._contents.pop(block, None)) is not None:
                del self._blocks[prefix]
        return taken

    def keep(self, prefixes: Sequence[tuple[int, ...]], blocks: Sequence[int]) -> None:
        """Remember what these blocks hold, all of whose bytes are written."""
        for prefix, block in zip(prefixes, blocks, strict=False):
            if self._blocks.setdefault(prefix, block) == block:
                self._contents[block] = prefix

    def give_back(self, blocks: Sequence[int]) -> None:
        """One user less; the end of a prefix is taken for others before its beginning."""
        for block in reversed(blocks):
            self._users[block] -= 1
            if not self._users[block]:
                self._unused[block] = None


class Engine:
    """Model, cache and pool: one request after the other."""

    node: kvshm.Node | None = None  # of an engine that can share its cache

    def __init__(self, num_blocks: int, seed: int) -> None:
        self.shape = Shape(3, 4, 32, vocabulary=256, block_size=BLOCK_SIZE, blocks=num_blocks)
        self.model = PagedTransformer(self.shape, "cpu", torch.float32, seed)
        self.pool = BlockPool(num_blocks)
        if kvshm is not None:
            self._share()

    def _share(self) -> None:
        """Share the cache with the other engines of this machine."""
        cache = self.model.cache
        try:
            self.memory = kvshm.allocate(cache.nbytes)
        except kvshm.TransportError as exc:
            print(f"not sharing the cache: {exc}", file=sys.stderr)
            return
        self.model.cache = torch.frombuffer(self.memory.buffer, dtype=cache.dtype).view(cache.shape)
        layer, block = cache[0].nbytes, cache[0, 0].nbytes
        blocks = self.shape.blocks
        self.node = kvshm.join(
            self._identity(),
            memory=self.memory,
            regions=[kvshm.Region(n * layer, block, block, blocks) for n in range(len(cache))],
            block_size=BLOCK_SIZE,
            wait=10.0,  # seconds at most, until the engines that are there are known
        )

    def _identity(self) -> kvshm.Identity:
        """Return all that decides the bytes of a block, besides its tokens."""
        model, shape, weights = self.model, self.shape, sha256()
        feedforward = chain.from_iterable(model.feedforward)
        for tensor in (model.embedding, *model.attention, *feedforward, model.output):
            weights.update(f"{tensor.shape} {tensor.dtype}".encode())
            weights.update(tensor.numpy().tobytes())
        return kvshm.Identity(
            engine=f"tiny_engine 1, torch {torch.__version__}",
            model="paged_transformer",
            weights=weights.hexdigest(),
            settings={
                "dtype": str(model.cache.dtype),
                "heads": f"{shape.heads} of {shape.dim}",  # other heads may have the same weights
                "threads": str(torch.get_num_threads()),  # other threads round otherwise
            },
        )

    def generate(self, prompt: Sequence[int], count: int) -> tuple[dict[str, int], list[int]]:
        """Return where the prompt's tokens came from, and the next ``count`` tokens."""
        tokens = list(prompt)
        wanted = tokens[:-1]  # the last one is computed in any case: its logits are needed
        blocks = self.pool.find(prefixes_of(wanted))
        hit = len(blocks) * BLOCK_SIZE
        try:
            new = self.pool.take(-(-(len(tokens) + count) // BLOCK_SIZE) - len(blocks))
            if self.node:
                self.node.retract(new)  # before anything is written to them
            blocks += new
            imported = self._load(wanted, blocks, len(blocks) - len(new)) * BLOCK_SIZE
            written = hit + imported
            while len(tokens) < len(prompt) + count:
                # A block at a time, so that rounding is the same, whatever was hit.
                end = min((written // BLOCK_SIZE + 1) * BLOCK_SIZE, len(tokens))
                logits = self.model.compute(tokens[:end], blocks, written)
                written = end
                if written == len(tokens):
                    tokens.append(int(logits.argmax()))
            self.pool.keep(prefixes_of(tokens[:written]), blocks)
            if self.node:
                keys = self.node.keys(tokens[:written])
                self.node.publish(keys, blocks[: len(keys)])
        finally:
            self.pool.give_back(blocks)
        counts = {"hit": hit, "imported": imported, "computed": len(prompt) - hit - imported}
        return counts, tokens[len(prompt) :]

    def _load(self, tokens: Sequence[int], blocks: Sequence[int], start: int) -> int:
        """Fill ``blocks`` from block ``start`` on with what other engines hold of these tokens;
        return how many of them are filled."""
        if not self.node or not (found := self.node.lookup(self.node.keys(tokens), start)):
            return 0
        load = self.node.load(found, blocks[start : found.length])
        load.wait()
        return load.good

    def close(self) -> None:
        """Leave the node, then let go of the memory."""
        if self.node:
            self.node.close()
            self.memory.close()


def main() -> None:
    parser = argparse.ArgumentParser(description="Continue prompts with a small random model.")
    parser.add_argument("prompts", nargs="*")
    parser.add_argument("--blocks", type=int, default=64, help="blocks of the KV cache")
    parser.add_argument("--seed", type=int, default=0, help="of the weights")
    parser.add_argument("--tokens", type=int, default=8, help="to compute for each prompt")
    options = parser.parse_args()
    torch.set_num_threads(1)
    engine = Engine(options.blocks, options.seed)
    for line in options.prompts or sys.stdin:
        prompt = line.strip().encode()
        counts, tokens = engine.generate(prompt, options.tokens)
        said = ", ".join(f"{what} {number}" for what, number in counts.items())
        print(f"{said}; next {tokens}", flush=True)
    engine.close()


if __name__ == "__main__":
    main()
