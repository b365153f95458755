"""The kernel that copies scattered blocks on one GPU: one launch, whatever the number of blocks.

Imported only to compile the kernel: that needs triton, which is installed with torch for CUDA.
Addresses come from a table of regions and a list of block ids, so that a copy of 1,000 blocks
of 64 regions sends 8 KB of ids and no pointer per fragment::

    table    int64[regions][5]: source address, target address, source stride, target stride,
             bytes per block
    ids      int64[2][pairs]: source blocks, then target blocks
    stop     int32: if it is set, nothing is copied

One *tile* is up to ``TILE`` words of one fragment.  A few programs go through all tiles, so that
a model that runs at the same time keeps its multiprocessors.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from .driver import TILE_BYTES, CudaError

WARPS = 8


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _copy_kernel(  # type: ignore[no-untyped-def, unused-ignore]
    table: tl.int64,
    ids: tl.int64,
    stop: tl.int64,
    pairs: tl.int32,
    regions: tl.int32,
    chunks: tl.int32,
    WORD: tl.constexpr,  # noqa: N803
    TILE: tl.constexpr,  # noqa: N803
):
    word_type = tl.int64 if WORD >= 8 else (tl.int32 if WORD == 4 else tl.int8)
    word_bytes = 8 if WORD >= 8 else WORD
    table_words = table.to(tl.pointer_type(tl.int64))
    id_words = ids.to(tl.pointer_type(tl.int64))
    stopped = tl.load(stop.to(tl.pointer_type(tl.int32)))
    tiles = pairs * regions * chunks
    tiles = tl.where(stopped == 0, tiles, 0)
    lanes = tl.arange(0, TILE)
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        chunk = tile % chunks
        fragment = tile // chunks
        row = table_words + (fragment % regions) * 5
        pair = fragment // regions
        source = tl.load(row) + tl.load(id_words + pair) * tl.load(row + 2)
        target = tl.load(row + 1) + tl.load(id_words + pairs + pair) * tl.load(row + 3)
        words = tl.load(row + 4) // word_bytes
        reading = source.to(tl.pointer_type(word_type))
        writing = target.to(tl.pointer_type(word_type))
        if WORD == 16:  # these hints make the compiler choose 16-byte accesses
            reading = tl.multiple_of(reading, 16)
            writing = tl.multiple_of(writing, 16)
            words = tl.multiple_of(words, 2)
        offsets = chunk * TILE + lanes
        inside = offsets < words
        copied = tl.load(reading + offsets, mask=inside)
        tl.store(writing + offsets, copied, mask=inside)


def compile_for(capability: int, word: int) -> Any:
    """Compile the kernel for a compute capability (90: Hopper) and a width of access; return
    triton's CompiledKernel.  Its code takes the parameters of ``_copy_kernel`` in order and then
    pointers to scratch memory, which it does not use.  Needs no GPU.  Raises CudaError."""
    types = {"table": "i64", "ids": "i64", "stop": "i64"}
    types |= {"pairs": "i32", "regions": "i32", "chunks": "i32"}
    source = ASTSource(
        fn=_copy_kernel,
        signature={**types, "WORD": "constexpr", "TILE": "constexpr"},
        constexprs={"WORD": word, "TILE": TILE_BYTES // min(word, 8)},
    )
    # The kernel has no floating-point numbers, but triton warns if this option is not given.
    options = {"num_warps": WARPS, "enable_fp_fusion": True}
    try:
        compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    except Exception as exc:  # triton has no common class for the errors of its compiler
        raise CudaError("triton", f"the copy kernel does not compile: {exc}") from exc
    metadata = compiled.metadata
    if metadata.shared or getattr(metadata, "global_scratch_size", 0):
        raise CudaError("triton", "the copy kernel wants memory of its own")
    return compiled
