"""What a keeper keeps, in files: written when it ends, read when it begins.

Each file is one that ``kvshm kv`` reads (tools/kv/block_file.py), with as many blocks as
FILE_BYTES hold: so what is written needs little memory, and a damaged file costs no other one.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy
import xxhash

from kvshm._base.fingerprint import KVSHM_ABI
from kvshm._node.protocol import abi
from kvshm.api import BlockContent, EngineLayout
from kvshm.errors import ConfigError, KvshmError

from ..keeper.shelf import Filled
from .block_file import BlockFile, BlockKey, Description, write

SUFFIX = ".kvshm-kept"
FILE_BYTES = 256 << 20
HOST_MEMORY = "posix_shm"


class Files:
    """The files in a folder, which belongs to one keeper at a time."""

    def __init__(self, folder: Path, say: Callable[[str], None]) -> None:
        """Makes the folder unless it is there.  Raises ConfigError."""
        self._folder, self._say = folder, say
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if not os.access(folder, os.W_OK | os.X_OK):
                raise PermissionError("it cannot be written")
        except OSError as exc:
            raise ConfigError(f"--files {folder}: {exc.strerror or exc}") from exc

    def read(self) -> Iterator[KeptFile]:
        """Yield the files that can be read; of others it says why not."""
        for path in sorted(self._folder.glob(f"*{SUFFIX}")):
            try:
                yield KeptFile(path)
            except KvshmError as exc:
                self._say(f"left out: {exc}")

    def write(self, shelves: Sequence[Filled], memory: memoryview) -> None:
        """Write all blocks, and remove files of earlier times.  What fails is said."""
        written, count = set[Path](), 0
        for kept in shelves:
            for number, part in enumerate(_parts(kept)):
                path = self._folder / f"{kept.layout.fingerprint[:32]}.{number:05}{SUFFIX}"
                try:
                    _write(path, part, memory)
                except (KvshmError, MemoryError) as exc:
                    self._say(f"not written: {exc or 'not enough memory'}")
                    return  # what an earlier time has left is as good
                written.add(path)
                count += len(part.blocks)
        for path in set(self._folder.glob(f"*{SUFFIX}")) - written:
            path.unlink(missing_ok=True)
        self._say(f"wrote {count} blocks into {len(written)} files")


class KeptFile:
    """A file that was opened and checked, but for the bytes of its blocks."""

    def __init__(self, path: Path) -> None:
        """Raises KvshmError."""
        self.path = path
        self._file = BlockFile(path)
        what = self._file.what
        if (theirs := what.fields.get(KVSHM_ABI, abi())) != abi():
            raise KvshmError(f"{path} is of {KVSHM_ABI} {theirs}, this kvshm has {abi()}")
        parts = tuple(map(tuple, what.regions))
        identity = what.fingerprint.hex(), what.fields, what.model, what.block_size
        self.layout = EngineLayout(*identity, HOST_MEMORY, parts)
        self.contents = [BlockContent(b.key, b.parent, b.depth, b.group) for b in what.blocks]

    def copy(self, row: int, places: Sequence[Sequence[slice]], memory: memoryview) -> bool:
        """Copy one block into these places of the memory, for each rank and region.  Returns
        whether they then hold the bytes that were written.  Raises BlockFileError."""
        good = True
        for rank, its in enumerate(places):
            digest = xxhash.xxh3_64()
            for region, place in enumerate(its):
                (part,) = self._file.rows(f"rank{rank}.region{region}", row, row + 1)
                memory[place] = memoryview(part)
                digest.update(memory[place])
            good &= digest.intdigest() == self._file.what.checksums[rank][row]
        return good


def _parts(kept: Filled) -> Iterator[Filled]:
    at_once = max(1, FILE_BYTES // kept.layout.stride)
    for first in range(0, len(kept.blocks), at_once):
        chosen = slice(first, first + at_once)
        yield kept._replace(contents=kept.contents[chosen], blocks=kept.blocks[chosen])


def _write(path: Path, kept: Filled, memory: memoryview) -> None:
    layout, blocks = kept.layout, numpy.array(kept.blocks)
    grid = numpy.frombuffer(memory, numpy.uint8)
    grid = grid[: len(grid) // layout.stride * layout.stride].reshape(-1, layout.stride)
    arrays: list[list[Any]] = []
    checksums = []
    for rank in layout.regions(len(grid)):
        rows = [grid[blocks, r.offset : r.offset + r.block_bytes] for r in rank]
        arrays.append([numpy.ascontiguousarray(each) for each in rows])
        checksums.append([_checksum(arrays[-1], row) for row in range(len(blocks))])
    what = Description(
        fingerprint=bytes.fromhex(layout.fingerprint),
        fields=dict(layout.fields),
        engine="keeper",
        model=layout.model,
        block_size=layout.block_size,
        regions=[list(part) for part in layout.block_bytes],
        blocks=[BlockKey(bytes(c.key), c.parent, c.depth, c.group) for c in kept.contents],
        checksums=checksums,
    )
    write(path, what, arrays, force=True)


def _checksum(rank: Sequence[Any], row: int) -> int:
    digest = xxhash.xxh3_64()
    for array in rank:
        digest.update(array[row])
    return digest.intdigest()
