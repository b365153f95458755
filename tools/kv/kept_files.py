"""What a keeper keeps, in files: written when it ends, read, and removed, when it begins.

Each file is one that ``kvshm kv`` reads (tools/kv/block_file.py), with as many blocks as
FILE_BYTES hold: so what is written needs little memory, and a damaged file costs no other one.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

import numpy
import xxhash

from kvshm._base.fingerprint import KVSHM_ABI, TRANSPORT
from kvshm._node.protocol import abi
from kvshm.api import BlockContent, EngineLayout
from kvshm.errors import ConfigError, KvshmError

from ..keeper.shelf import Filled
from .block_file import BlockFile, BlockFileError, BlockKey, Description, write

SUFFIX = ".kvshm-kept"
UNFINISHED = ".new"
"""What the name of a file ends in until all are written, and nothing in them was withdrawn."""
FILE_BYTES = 256 << 20
HOST_MEMORY = "posix_shm"
LOCK = "keeper.lock"
"""Locked by the keeper that has the folder, and says which one that is."""
HOLDER_BYTES = 256


class Files:
    """The files in a folder, which belongs to one keeper at a time."""

    def __init__(self, folder: Path, name: str, say: Callable[[str], None]) -> None:
        """Make the folder unless it is there, and take it for the keeper with this name, until its
        process ends.  Raises ConfigError, also if another keeper has it."""
        self._folder, self._say = folder, say
        self._good = True
        self._written = dict[Path, int]()
        """Files with their numbers of blocks."""
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if not os.access(folder, os.R_OK | os.W_OK | os.X_OK):
                raise PermissionError("it cannot be read and written")
            self._lock = _take(folder / LOCK, name)
        except OSError as exc:
            raise ConfigError(f"--files {folder}: {exc.strerror or exc}") from exc

    def read(self) -> Iterator[KeptFile]:
        """Yield the files that can be read, each of which has no name any more: what engines
        withdraw from now on no later start can find in it.  Of others it says why not."""
        self._remove_unfinished()  # of a keeper that was killed
        for path in sorted(self._folder.glob(f"*{SUFFIX}")):
            try:
                file = KeptFile(path)
                path.unlink()
                self._sync()
            except (KvshmError, OSError) as exc:
                self._say(f"left out, and removed when this keeper ends: {exc}")
            else:
                yield file

    def write(self, kept: Filled, memory: memoryview) -> Iterator[None]:
        """Write a shelf's blocks, and yield after each file.  What fails is said."""
        names = self._names(kept.layout.fingerprint)
        for part in _parts(kept):
            path = next(names)
            try:
                _write(_unfinished(path), part, memory)
            except (KvshmError, MemoryError) as exc:
                self._good = False
                self._say(f"not written: {exc or 'not enough memory'}")
                return
            self._written[path] = len(part.blocks)
            yield

    def take_back(self, fingerprint: str) -> None:
        """Remove what was written of a shelf."""
        for path in [each for each in self._written if each.name.startswith(fingerprint[:32])]:
            del self._written[path]
            self._remove(_unfinished(path))

    def finish(self) -> bool:
        """Have the next start find what was written, and nothing else.  Until then it finds none of
        it, so that a process that is killed before leaves nothing that was withdrawn meanwhile.
        Returns whether all was written, and files of earlier times are gone."""
        for path in list(self._written):
            try:
                _unfinished(path).rename(path)
                self._sync()
            except OSError as exc:
                self._good = False
                self._say(f"not written: {exc}")
                del self._written[path]
        self._remove_unfinished()
        for path in set(self._folder.glob(f"*{SUFFIX}")) - self._written.keys():
            if not _is_folder(path):  # it is not a keeper's
                self._remove(path)
        self._say(f"wrote {sum(self._written.values())} blocks into {len(self._written)} files")
        return self._good

    def _remove_unfinished(self) -> None:
        for path in self._folder.glob(f"*{SUFFIX}{UNFINISHED}"):
            if not _is_folder(path):
                self._remove(path)

    def _names(self, fingerprint: str) -> Iterator[Path]:
        """What a shelf's files may be called."""
        for number in count():
            path = self._folder / f"{fingerprint[:32]}.{number:05}{SUFFIX}"
            if not (_is_folder(path) or _is_folder(_unfinished(path))):
                yield path

    def _remove(self, path: Path) -> None:
        try:
            path.unlink(missing_ok=True)
        except OSError as exc:
            self._good = False
            self._say(f"not removed: {exc}")

    def _sync(self) -> None:
        """Have a name that was removed stay so if the machine loses its power."""
        folder = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


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
        self.layout = EngineLayout(*identity, what.fields.get(TRANSPORT, HOST_MEMORY), parts)
        self.contents = [BlockContent(b.key, b.parent, b.depth, b.group) for b in what.blocks]

    def copy(self, row: int, places: Sequence[Sequence[slice]], memory: memoryview) -> bool:
        """Copy one block into these places of the memory, for each rank and region.  Returns
        whether they then hold the bytes that were written: not if it cannot be read."""
        good = True
        for rank, its in enumerate(places):
            digest = xxhash.xxh3_64()
            for region, place in enumerate(its):
                try:
                    (part,) = self._file.rows(f"rank{rank}.region{region}", row, row + 1)
                except BlockFileError:  # for example, not enough memory
                    return False
                memory[place] = memoryview(part)
                digest.update(memory[place])
            good &= digest.intdigest() == self._file.what.checksums[rank][row]
        return good


def _unfinished(path: Path) -> Path:
    return path.with_name(path.name + UNFINISHED)


def _is_folder(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


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


def _take(path: Path, name: str) -> int:
    """Return the descriptor that holds the lock.  Raises OSError, and ConfigError if another
    process holds it."""
    number = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
        with suppress(OSError):  # no space: the lock needs none
            os.ftruncate(number, 0)
            os.pwrite(number, f"{name} (pid {os.getpid()})".encode(), 0)
    except BlockingIOError:
        holder = os.pread(number, HOLDER_BYTES, 0).decode("utf-8", "replace") or "another keeper"
        os.close(number)
        raise ConfigError(
            f"--files {path.parent}: {holder} has this folder; give each keeper a folder of its "
            "own, or start this one when that one has ended"
        ) from None
    except OSError:
        os.close(number)
        raise
    return number
