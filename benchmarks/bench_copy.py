"""How fast blocks are copied out of another process's KV cache, beside plain memcpy.

    .venv/bin/python benchmarks/bench_copy.py [--rounds 20] [--mooncake FOLDER] [--lmcache FOLDER]

An exporter in a process of its own; this one maps its memory through the transport, as ranks do.
In each round every way copies as many bytes from the exporter's mapping into the own one, one after
the other, from other places each time; the order turns round with each round.

memcpy   one memcpy of all bytes, from one run of addresses to another
kvshm    the transport's copy, on the calling thread, as a load at once makes it
index    torch's ``target[to] = source[from]`` for each region; index_copy: ``index_copy_`` of an
         ``index_select``

With two threads each copies half.  Rows: fragments (bytes of a block in one region) of 4 KiB to
1 MiB; ``groups``: two KV cache groups whose blocks alternate; ``states``: padded blocks, as models
with states have them.  ``first_touch``: the first copy into memory of which no page was written.

share    of memcpy's bytes per second, of the same round
"""

from __future__ import annotations

import argparse
import ctypes
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from copy_peers import PEERS, Failed
from measurement import end_what_is_started, percentiles, report

from kvshm import _native
from kvshm._base.ids import BlockId, Epoch
from kvshm.interfaces import CopyState, MemoryDescriptor, Region
from kvshm.transport.memory import KVMemory
from kvshm.transport.posix_shm import PosixAttachment, PosixShmTransport

EPOCH = Epoch(5)
KIB = 1 << 10
CACHE_BYTES = 256 << 20
"""Of each engine's cache, at least."""
COPIED_BYTES = 32 << 20
"""By each way in each round, about; a prefix of 4,000 tokens of an 8B model has 500 MB."""
FRAGMENTS = (4 * KIB, 16 * KIB, 64 * KIB, 256 * KIB, 1024 * KIB)
THREADS = (1, 2)
WAYS = ("memcpy", "kvshm", "index", "index_copy")


@dataclass(frozen=True)
class Layout:
    """How blocks lie in a cache: in each region a block of so many bytes at each stride."""

    name: str
    num_regions: int
    block_bytes: int
    stride: int
    groups: int = 1

    @property
    def num_blocks(self) -> int:
        return max(8, CACHE_BYTES // (self.num_regions * self.stride))

    @property
    def num_copied(self) -> int:
        """Blocks of one copy: two at least, one for each thread."""
        return max(2, COPIED_BYTES // (self.num_regions * self.block_bytes) // 2 * 2)

    @property
    def nbytes(self) -> int:
        return self.num_regions * self.num_blocks * self.stride

    def regions(self) -> list[Region]:
        return [
            Region(
                block_bytes=self.block_bytes,
                handle=0,
                num_blocks=self.num_blocks,
                offset=each * self.num_blocks * self.stride,
                stride=self.stride,
            )
            for each in range(self.num_regions)
        ]

    def choose(self, dice: random.Random) -> list[BlockId]:
        """Blocks of one copy, as a pool hands them out: of each group some run, which begins
        somewhere, in turns.  With one group they lie anywhere."""
        if self.groups == 1:
            return [
                BlockId(block) for block in dice.sample(range(self.num_blocks), self.num_copied)
            ]
        each = self.num_blocks // self.groups
        starts = [dice.randrange(each) for _ in range(self.groups)]
        places = (
            (number // self.groups, number % self.groups) for number in range(self.num_copied)
        )
        return [BlockId(g * each + (starts[g] + at) % each) for at, g in places]


def layouts() -> list[Layout]:
    """All rows.  The regions of a layer hold keys, or values; a state is one block of its layer."""
    fragments = [Layout(f"{size // KIB} KiB", 16, size, size) for size in FRAGMENTS[:-1]]
    largest = FRAGMENTS[-1]
    return [
        *fragments,
        Layout(f"{largest // KIB} KiB", 4, largest, largest),
        Layout("groups", 24, 64 * KIB, 64 * KIB, groups=2),
        Layout("states", 6, 66 * 8 * KIB, 68 * 8 * KIB),
    ]


# -- the exporter


def export(name: str, socket: str) -> None:
    """Serve a written cache of a layout until the input ends."""
    layout = next(each for each in layouts() if each.name == name)
    memory = KVMemory.create(layout.nbytes)
    pattern = random.Random(0).randbytes(1 << 20)
    for start in range(0, layout.nbytes, len(pattern)):
        part = memory.buffer[start : start + len(pattern)]
        part[:] = pattern[: len(part)]
    with closing(PosixShmTransport(memory, layout.regions(), 0, socket)) as transport:
        print(msgspec.json.encode(transport.export(EPOCH)).decode(), flush=True)
        sys.stdin.read()


# -- the importer


class Copies:
    """The own cache, a peer's mapping, and each way to copy from one to the other."""

    def __init__(self, layout: Layout, descriptor: MemoryDescriptor, socket: str) -> None:
        self.layout = layout
        self.memory = KVMemory.create(layout.nbytes)
        self.transport = PosixShmTransport(self.memory, layout.regions(), 0, socket)
        self.attachment: PosixAttachment = self.transport.attach(descriptor)
        assert self.attachment._mappings is not None
        (self._mapping,) = self.attachment._mappings
        self._from, self._to = _native.address(self._mapping), self.memory.address
        self._dice = random.Random(1)

    def touch(self) -> None:
        """Have every page of both mappings in this process's page tables."""
        ctypes.memmove(self._to, self._from, self.layout.nbytes)

    def close(self) -> None:
        self.attachment.close()
        self.transport.close()
        self.memory.close()

    def choose(self) -> tuple[list[BlockId], list[BlockId]]:
        return self.layout.choose(self._dice), self.layout.choose(self._dice)

    def parts(self, way: str, threads: int) -> list[Callable[[], None]]:
        """What each thread is to do, for other places than the last time."""
        source, target = self.choose()
        make: Callable[..., Callable[[], None]] = getattr(self, f"_{way}")
        each = len(source) // threads
        cuts = [slice(n * each, (n + 1) * each) for n in range(threads)]
        return [make(source[cut], target[cut]) for cut in cuts]

    def _memcpy(self, source: Sequence[BlockId], target: Sequence[BlockId]) -> Callable[[], None]:
        size = len(source) * self.layout.num_regions * self.layout.block_bytes
        page, room = 4 * KIB, self.layout.nbytes - size
        begin, end = (page * self._dice.randrange(room // page) for _ in range(2))

        def copy() -> None:
            ctypes.memmove(self._to + end, self._from + begin, size)

        return copy

    def _kvshm(self, source: Sequence[BlockId], target: Sequence[BlockId]) -> Callable[[], None]:
        def copy() -> None:
            done = self.attachment.begin_copy(source, target, lambda: True)
            assert done.poll() is CopyState.DONE

        return copy

    def _index(self, source: Sequence[BlockId], target: Sequence[BlockId]) -> Callable[[], None]:
        pairs, at, to = self._tensors(source, target)

        def copy() -> None:
            for theirs, mine in pairs:
                mine[to] = theirs[at]

        return copy

    def _index_copy(
        self, source: Sequence[BlockId], target: Sequence[BlockId]
    ) -> Callable[[], None]:
        pairs, at, to = self._tensors(source, target)

        def copy() -> None:
            for theirs, mine in pairs:
                mine.index_copy_(0, to, theirs.index_select(0, at))

        return copy

    def _tensors(
        self, source: Sequence[BlockId], target: Sequence[BlockId]
    ) -> tuple[Any, Any, Any]:
        import torch

        torch.set_num_threads(1)  # the bench has threads of its own
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the peer's mapping is read-only
            caches = [
                torch.frombuffer(memory, dtype=torch.uint8).view(
                    self.layout.num_regions, self.layout.num_blocks, self.layout.stride
                )[:, :, : self.layout.block_bytes]
                for memory in (self._mapping, self.memory.buffer)
            ]
        pairs = list(zip(*caches, strict=True))
        return pairs, torch.tensor(source), torch.tensor(target)


def bytes_of(layout: Layout) -> int:
    return layout.num_copied * layout.num_regions * layout.block_bytes


def timed(parts: list[Callable[[], None]]) -> float:
    """Seconds until all parts are done, each on a thread of its own; the first on this one."""
    go = threading.Barrier(len(parts))

    def run(part: Callable[[], None]) -> None:
        go.wait()
        part()

    threads = [threading.Thread(target=run, args=(part,)) for part in parts[1:]]
    for thread in threads:
        thread.start()
    go.wait()
    begin = time.perf_counter()
    parts[0]()
    for thread in threads:
        thread.join()
    return time.perf_counter() - begin


def turns(ways: Sequence[str], rounds: int) -> Iterator[Sequence[str]]:
    for number in range(rounds):
        yield ways if number % 2 == 0 else ways[::-1]


def measure(copies: Copies, ways: Sequence[str], threads: int, rounds: int) -> dict[str, Any]:
    """Bytes per second of each way, in GB/s, and their share of memcpy's in the same round."""
    took: dict[str, list[float]] = {way: [] for way in ways}
    for order in turns(ways, rounds):
        for way in order:
            took[way].append(timed(copies.parts(way, threads)))
    return rates(took, bytes_of(copies.layout))


def rates(took: dict[str, list[float]], nbytes: int) -> dict[str, Any]:
    """``took``: seconds of each way, round by round."""
    speeds = {way: percentiles([nbytes / t / 1e9 for t in times]) for way, times in took.items()}
    plain = took["memcpy"]
    shares = {
        way: percentiles([base / t for base, t in zip(plain, times, strict=True)])
        for way, times in took.items()
        if way != "memcpy"
    }
    return {"gb_per_second": speeds, "share": shares}


@contextmanager
def two_caches(layout: Layout, folder: str) -> Iterator[Copies]:
    """An exporter, and a fresh importer of the same layout."""
    argv = [sys.executable, __file__, "--export", layout.name, "--socket", f"{folder}/e.sock"]
    with subprocess.Popen(
        argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as exporter:
        assert exporter.stdout is not None
        descriptor = msgspec.json.decode(exporter.stdout.readline(), type=MemoryDescriptor)
        copies = Copies(layout, descriptor, f"{folder}/i.sock")
        try:
            yield copies
        finally:
            copies.close()
            exporter.communicate("")


def first_touch(layout: Layout, folder: str) -> dict[str, float]:
    """GB/s of the first copy into a new cache, and of the second onto the same blocks."""
    with two_caches(layout, folder) as copies:
        source, target = copies.choose()
        copies.parts("kvshm", 1)
        first = timed([copies._kvshm(source, target)])
        second = timed([copies._kvshm(source, target)])
    nbytes = bytes_of(layout) / 1e9
    return {"first": round(nbytes / first, 3), "second": round(nbytes / second, 3)}


def rows(options: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory(prefix="kv-") as folder:
        for layout in layouts():
            if options.rows and layout.name not in options.rows:
                continue
            touched = [first_touch(layout, folder) for _ in range(2)]
            about = {"row": layout.name, "fragment": layout.block_bytes,
                     "regions": layout.num_regions, "blocks": layout.num_copied,
                     "bytes": bytes_of(layout), "first_touch_gb_per_second": touched}  # fmt: skip
            with two_caches(layout, folder) as copies:
                copies.touch()
                for threads in options.threads:
                    found = measure(copies, options.ways, threads, options.rounds)
                    report("copy", **about, threads=threads, rounds=options.rounds, **found)


def peers(options: argparse.Namespace) -> None:
    """The same bytes through other caches' own ways; one that does not start is a failed row."""
    for name, copy in PEERS.items():
        folder = getattr(options, name)
        if folder is None:
            continue
        for size in (64 * KIB, 1024 * KIB):
            about = {"row": name, "fragment": size, "bytes": COPIED_BYTES}
            try:
                took = copy(folder.resolve(), size, COPIED_BYTES // size, options.rounds)
            except Failed as failure:
                report("copy", **about, failed=str(failure))
                continue
            speeds = [COPIED_BYTES / seconds / 1e9 for seconds in took]
            report("copy", **about, rounds=len(took), gb_per_second={name: percentiles(speeds)})


def main() -> None:
    """Command line: print a line of JSON for each row and number of threads."""
    names = [layout.name for layout in layouts()]
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--rows", nargs="*", choices=names, metavar="ROW", help=", ".join(names))
    parser.add_argument("--threads", nargs="*", type=int, choices=THREADS, default=THREADS)
    parser.add_argument("--ways", nargs="*", choices=WAYS, default=WAYS)
    parser.add_argument("--mooncake", type=Path, help="the folder that holds its package")
    parser.add_argument("--lmcache", type=Path, help="likewise")
    parser.add_argument("--export", help="for the parts: a row")
    parser.add_argument("--socket", help="for the parts: its socket")
    options = parser.parse_args()
    if options.export:
        export(options.export, options.socket)
        return
    if options.rounds < 2 or "memcpy" not in options.ways:
        parser.error("wanted at least two rounds, and memcpy among the ways")
    for name in PEERS:
        if (folder := getattr(options, name)) is not None and not (folder / name).is_dir():
            parser.error(f"--{name} {folder}: there is no {name} in it")
    end_what_is_started()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    rows(options)
    peers(options)


if __name__ == "__main__":
    main()
