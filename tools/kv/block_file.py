"""A file of KV blocks: what ``kvshm kv dump`` writes and ``serve`` and ``compare`` read.

A safetensors file (docs/kv-files.md).  Its tensors are the raw bytes of one region of one rank,
``rank0.region0``: one row for each block, in the order of the keys in the metadata.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec
import numpy
from msgspec import Meta
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from kvshm._base.fingerprint import fingerprint
from kvshm._base.ids import HASH_BYTES
from kvshm._shm.layout import MAX_BLOCKS, MAX_RANKS
from kvshm.errors import KvshmError
from kvshm.interfaces import MAX_REGIONS, Region
from kvshm.version import __version__

FORMAT = "kvshm-kv 1"
TAG_BYTES = 8

_Word = Annotated[int, Meta(ge=0, lt=1 << 32)]
_Tokens = Annotated[int, Meta(ge=1, lt=1 << 32)]
_Size = Annotated[int, Meta(ge=1, lt=1 << 62)]
_Key = Annotated[str, Meta(pattern=rf"^[0-9a-f]{{{2 * HASH_BYTES}}}\Z")]
_Tag = Annotated[str, Meta(pattern=rf"^[0-9a-f]{{{2 * TAG_BYTES}}}\Z")]
"""The beginning of a key, or a checksum."""
_Group = Annotated[int, Meta(ge=0, lt=1 << 16)]
_Regions = Annotated[list[_Size], Meta(min_length=1, max_length=MAX_REGIONS)]
_Ranks = Annotated[list[_Regions], Meta(min_length=1, max_length=MAX_RANKS)]
T = TypeVar("T")


class BlockFileError(KvshmError):
    """A file of blocks cannot be read or written; names the file and the reason."""


@dataclass(frozen=True)
class BlockKey:
    key: bytes
    parent: bytes
    """The first 8 bytes of the key of the block before it; zeros for the first one."""
    depth: int
    group: int


@dataclass(frozen=True)
class Description:
    fingerprint: bytes
    fields: dict[str, str]
    engine: str
    model: str
    block_size: int
    regions: list[list[int]]
    """For each rank the bytes of one block in each region."""
    blocks: list[BlockKey] = field(default_factory=list)
    checksums: list[list[int]] = field(default_factory=list)
    """For each rank the checksum of each block: 64-bit xxh3 of its bytes in all regions."""
    kvshm_version: str = __version__

    @property
    def block_bytes(self) -> int:
        return sum(map(sum, self.regions))

    def tensors(self) -> Iterator[tuple[str, int, int, int]]:
        """Yield name, rank, region and bytes per block of each tensor."""
        for rank, regions in enumerate(self.regions):
            for region, block_bytes in enumerate(regions):
                yield f"rank{rank}.region{region}", rank, region, block_bytes

    def metadata(self) -> dict[str, str]:
        lists = {
            "fields": self.fields,
            "regions": self.regions,
            "keys": [block.key.hex() for block in self.blocks],
            "parents": [block.parent.hex() for block in self.blocks],
            "depths": [block.depth for block in self.blocks],
            "groups": [block.group for block in self.blocks],
            "checksums": [[f"{each:016x}" for each in rank] for rank in self.checksums],
            "block_size": self.block_size,
        }
        return {
            "format": FORMAT,
            "fingerprint": self.fingerprint.hex(),
            "engine": self.engine,
            "model": self.model,
            "kvshm_version": self.kvshm_version,
            **{name: msgspec.json.encode(value).decode() for name, value in lists.items()},
        }


def packed_regions(sizes: Sequence[int], count: int) -> tuple[list[Region], int]:
    """Return adjacent regions of ``count`` blocks each, and their bytes together."""
    ends = [0, *accumulate(nbytes * count for nbytes in sizes)]
    return [Region(at, n, n, count) for at, n in zip(ends, sizes, strict=False)], ends[-1]


# -- writing


def write(path: Path, what: Description, arrays: Sequence[Sequence[Any]], *, force: bool) -> None:
    """Write a file that only its owner can read, complete or not at all.  ``arrays``: for each rank
    and region the rows of all blocks; ``force``: replace a file.  Raises BlockFileError."""
    refuse_existing(path, force=force)
    tensors = {name: arrays[rank][region] for name, rank, region, _ in what.tensors()}
    try:
        with _folder_beside(path) as folder:
            fresh = folder / "new"
            save_file(tensors, fresh, metadata=what.metadata())
            fresh.chmod(0o600)
            if force:
                fresh.replace(path)
            else:
                os.link(fresh, path)  # unlike a rename it fails if the name was taken meanwhile
    except (OSError, SafetensorError) as exc:
        raise BlockFileError(f"{path} cannot be written: {exc}") from exc


@contextmanager
def _folder_beside(path: Path) -> Iterator[Path]:
    """Open a private folder for what safetensors writes, so that a killed process leaves nothing
    elsewhere; what such processes left is removed first.  Raises OSError."""
    prefix = f".{path.name}.kvshm-"
    with suppress(OSError):  # a folder that cannot be listed can be written all the same
        for left in [each for each in path.parent.iterdir() if each.name.startswith(prefix)]:
            _remove_if_left(left)
    folder = Path(tempfile.mkdtemp(prefix=prefix, dir=path.parent))
    try:
        with ExitStack() as locked:
            with suppress(
                OSError
            ):  # no locks on this filesystem: then no process removes the folder
                locked.enter_context(_locked(folder))
            yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _remove_if_left(folder: Path) -> None:
    found = folder.lstat()
    if stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid():
        with suppress(OSError), _locked(folder):  # else its process runs
            shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    number = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(number)


def refuse_existing(path: Path, *, force: bool) -> None:
    """Raise BlockFileError if something has this name already, except a file with ``force``."""
    if os.path.lexists(path) and not (force and path.is_file()):
        remedy = "--force replaces it" if path.is_file() else "it is no file"
        raise BlockFileError(f"{path} exists already; {remedy}")


# -- reading


class BlockFile:
    """A file of blocks, opened, checked and mapped: do not change it while it is open."""

    def __init__(self, path: Path) -> None:
        """Raises BlockFileError."""
        self.path = path
        try:
            if not stat.S_ISREG(os.stat(path).st_mode):
                raise BlockFileError(f"{path} is no file")
            self._file = _map(path)
            self.what = _describe(self._file.metadata() or {})
            self._check_tensors()
        except BlockFileError:
            raise
        except (OSError, SafetensorError, ValueError, RecursionError) as exc:
            raise BlockFileError(f"{path} is no file of kvshm's blocks: {exc}") from exc
        except MemoryError as exc:  # a file with holes has any size
            raise BlockFileError(f"{path} cannot be read: {exc}") from exc

    def _check_tensors(self) -> None:
        wanted = {name: nbytes for name, _, _, nbytes in self.what.tensors()}
        found = set(self._file.keys())
        if found != wanted.keys():
            name = min(found ^ wanted.keys())
            raise ValueError(f"tensor {name} is {'missing' if name in wanted else 'unknown'}")
        for name, nbytes in wanted.items():
            tensor, rows = self._file.get_slice(name), len(self.what.blocks)
            if tensor.get_dtype() != "U8" or list(tensor.get_shape()) != [rows, nbytes]:
                shape = f"{tensor.get_dtype()} {tensor.get_shape()}"
                raise ValueError(f"tensor {name} is {shape}, not U8 [{rows}, {nbytes}]")

    def rows(self, name: str, start: int, end: int) -> Any:
        """Return blocks ``start`` to ``end`` of one tensor as rows.  Raises BlockFileError."""
        try:
            return numpy.asarray(self._file.get_slice(name)[start:end])
        except (OSError, SafetensorError, ValueError, MemoryError) as exc:
            raise BlockFileError(f"{self.path} cannot be read: {exc}") from exc


def _map(path: Path) -> Any:
    return safe_open(path, "numpy")


def _describe(metadata: dict[str, str]) -> Description:
    if (stated := metadata.get("format")) != FORMAT:
        raise ValueError(f"its format is {stated!r}, wanted {FORMAT!r}")
    keys = _decode(metadata, "keys", list[_Key])
    parents = _decode(metadata, "parents", list[_Tag])
    depths = _decode(metadata, "depths", list[_Word])
    groups = _decode(metadata, "groups", list[_Group])
    if not 0 < len(keys) <= MAX_BLOCKS:
        raise ValueError(f"it has {len(keys)} blocks")
    rows = zip(keys, parents, depths, groups, strict=True)
    blocks = [BlockKey(bytes.fromhex(k), bytes.fromhex(p), d, g) for k, p, d, g in rows]
    if len({(block.key, block.group) for block in blocks}) < len(blocks):
        raise ValueError("it names a block twice")
    regions = _decode(metadata, "regions", _Ranks)
    checksums = _decode(metadata, "checksums", list[list[_Tag]])
    if [len(rank) for rank in checksums] != [len(keys)] * len(regions):
        raise ValueError("it does not have a checksum for each block of each rank")
    found = Description(
        fingerprint=bytes.fromhex(_text(metadata, "fingerprint")),
        fields=_decode(metadata, "fields", dict[str, str]),
        engine=_text(metadata, "engine"),
        model=_text(metadata, "model"),
        block_size=_decode(metadata, "block_size", _Tokens),
        regions=regions,
        blocks=blocks,
        checksums=[[int(each, 16) for each in rank] for rank in checksums],
        kvshm_version=_text(metadata, "kvshm_version"),
    )
    if fingerprint(found.fields) != found.fingerprint:
        raise ValueError("its fingerprint is not that of its fields")
    return found


def _text(metadata: dict[str, str], name: str) -> str:
    if name not in metadata:
        raise ValueError(f"its metadata have no {name}")
    return metadata[name]


def _decode(metadata: dict[str, str], name: str, kind: Any) -> Any:
    try:
        return msgspec.json.decode(_text(metadata, name), type=kind)
    except msgspec.DecodeError as exc:
        raise ValueError(f"{name}: {exc}") from exc
