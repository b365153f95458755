"""Archives in parts: a folder's files in one compressed stream that is cut into files small enough
for a transfer, with a manifest that knows the sha256 of each part.

Only the standard library is used, so that any Python puts the parts together again.
"""

from __future__ import annotations

import hashlib
import json
import lzma
import os
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

MANIFEST = "manifest.json"
FORMAT = 1
CHUNK = 1 << 20


class BundleError(Exception):
    """The bundle is not whole, or does not fit; the message names what is wrong."""


@dataclass(frozen=True)
class Part:
    """One file of an archive."""

    file: str
    nbytes: int
    sha256: str


@dataclass(frozen=True)
class Archive:
    """A compressed stream, cut into parts in this order."""

    name: str
    key: str
    """Of what it was made from: equal keys, equal contents."""
    parts: tuple[Part, ...]


@dataclass(frozen=True)
class Manifest:
    """All archives of a bundle, and what it was made for."""

    made_for: Mapping[str, str]
    archives: tuple[Archive, ...] = ()
    contents: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Of each archive, the wheels that it was made from."""

    def archive(self, name: str) -> Archive | None:
        """Return the archive of that name, None if there is none."""
        return next((archive for archive in self.archives if archive.name == name), None)

    def write(self, folder: Path) -> None:
        """Write the manifest into the bundle's folder."""
        text = json.dumps({"format": FORMAT, **asdict(self)}, indent=1)
        (folder / MANIFEST).write_text(text + "\n")

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """Return the manifest of the bundle in a folder; BundleError if there is none that can be
        read, or one of another format."""
        try:
            found = json.loads((folder / MANIFEST).read_text())
        except FileNotFoundError:
            raise BundleError(f"{folder} holds no bundle: {MANIFEST} is missing") from None
        except ValueError as exc:
            raise BundleError(f"{folder / MANIFEST} is damaged: {exc}") from None
        if not isinstance(found, dict) or found.get("format") != FORMAT:
            raise BundleError(f"{folder / MANIFEST} is not of format {FORMAT}")
        try:
            return cls.of(found)
        except (AttributeError, KeyError, TypeError) as exc:
            raise BundleError(
                f"{folder / MANIFEST} is damaged: {type(exc).__name__}: {exc}"
            ) from None

    @classmethod
    def of(cls, found: Mapping[str, Any]) -> Manifest:
        """Return the manifest that was written so; KeyError, TypeError or AttributeError if
        something is missing or of another type."""
        archives = tuple(
            Archive(one["name"], one["key"], tuple(Part(**part) for part in one["parts"]))
            for one in found["archives"]
        )
        return cls(dict(found["made_for"].items()), archives, dict(found["contents"].items()))


class PartWriter:
    """A stream that is written to files of at most ``limit`` bytes each."""

    def __init__(self, folder: Path, name: str, limit: int) -> None:
        """``name``: what the files are called, before a dot and their number."""
        self.parts: list[Part] = []
        self._folder, self._name, self._limit = folder, name, limit
        self._open: BinaryIO | None = None
        self._path = folder
        self._hash = hashlib.sha256()
        self._written = 0

    def write(self, data: bytes) -> int:
        """Append to the stream; the next file begins where one is full."""
        left = memoryview(data)
        while left:
            if self._open is None:
                self._begin()
            piece = left[: self._limit - self._written]
            assert self._open is not None
            self._open.write(piece)
            self._hash.update(piece)
            self._written += len(piece)
            left = left[len(piece) :]
            if self._written == self._limit:
                self._end()
        return len(data)

    def close(self) -> None:
        """End the last file."""
        if self._open is not None:
            self._end()

    def _begin(self) -> None:
        self._path = self._folder / f"{self._name}.{len(self.parts):02}"
        self._open = self._path.open("wb")
        self._hash, self._written = hashlib.sha256(), 0

    def _end(self) -> None:
        assert self._open is not None
        self._open.close()
        self._open = None
        self.parts.append(Part(self._path.name, self._written, self._hash.hexdigest()))


class PartReader:
    """The stream that was cut into parts, read from its begin to its end."""

    def __init__(self, folder: Path, parts: Sequence[Part]) -> None:
        self._chunks = self._read(folder, parts)
        self._left = b""

    def read(self, size: int = -1) -> bytes:
        """Return up to ``size`` bytes, or all that are left; none at the end."""
        if size < 0:
            return self._take() + b"".join(self._chunks)
        while not self._left:
            chunk = next(self._chunks, b"")
            if not chunk:
                return b""
            self._left = chunk
        taken, self._left = self._left[:size], self._left[size:]
        return taken

    def _take(self) -> bytes:
        taken, self._left = self._left, b""
        return taken

    @staticmethod
    def _read(folder: Path, parts: Sequence[Part]) -> Iterator[bytes]:
        for part in parts:
            with (folder / part.file).open("rb") as file:
                while chunk := file.read(CHUNK):
                    yield chunk


def pack(source: Path, folder: Path, name: str, key: str, limit: int) -> Archive:
    """Compress all files below ``source`` into parts of at most ``limit`` bytes in ``folder``.

    Equal files give equal parts: names are sorted, times and owners left out.  Blocks; about 2 MB
    of input per second and core.
    """
    writer = PartWriter(folder, f"{name}.tar.xz", limit)
    compressor = lzma.LZMACompressor(preset=6)

    class Compressed:
        """What tarfile writes to."""

        def write(self, data: bytes) -> int:
            writer.write(compressor.compress(data))
            return len(data)

    with tarfile.open(fileobj=Compressed(), mode="w|") as tar:  # type: ignore[call-overload]
        for path in sorted(p for p in source.rglob("*") if p.is_file()):
            member = tarfile.TarInfo(path.relative_to(source).as_posix())
            member.size = path.stat().st_size
            member.mode = 0o755 if os.access(path, os.X_OK) else 0o644
            with path.open("rb") as file:
                tar.addfile(member, file)
    writer.write(compressor.flush())
    writer.close()
    return Archive(name, key, tuple(writer.parts))


def unpack(folder: Path, archive: Archive, target: Path) -> None:
    """Put an archive's parts together and write its files below ``target``; call ``faults`` first.
    BundleError if the stream is none, which equal sha256s rule out."""
    stream = PartReader(folder, archive.parts)
    try:
        with tarfile.open(fileobj=stream, mode="r|xz") as tar:  # type: ignore[call-overload]
            tar.extractall(target, filter="data")
    except (tarfile.TarError, lzma.LZMAError, EOFError) as exc:
        raise BundleError(f"{archive.name} cannot be unpacked: {exc}") from exc


def faults(folder: Path, manifest: Manifest) -> Iterator[str]:
    """Yield what is wrong with the parts in a folder: each that is missing or damaged, by name."""
    for archive in manifest.archives:
        for part in archive.parts:
            path = folder / part.file
            if not path.is_file():
                yield f"{part.file} is missing ({part.nbytes} bytes)"
            elif (size := path.stat().st_size) != part.nbytes:
                yield f"{part.file} has {size} bytes instead of {part.nbytes}"
            elif sha256_of(path) != part.sha256:
                yield f"{part.file} is damaged: its sha256 is not {part.sha256}"


def sha256_of(*paths: Path) -> str:
    """Return the sha256 of the contents of files, one after the other."""
    found = hashlib.sha256()
    for path in paths:
        with path.open("rb") as file:
            while chunk := file.read(CHUNK):
                found.update(chunk)
    return found.hexdigest()
