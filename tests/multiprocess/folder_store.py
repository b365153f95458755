"""A keeper whose store is a folder: several processes read and write it, as they do a real one.

Run as ``kvshm keeper`` with the folder for ``--store``.  Files there have it misbehave: ``down``
has each call fail, ``hung`` has it wait until that file is gone, ``held`` only those that read
values, and with ``full`` nothing more is written.  ``calls`` has one line for each call: what it
was, and the keys.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from hashlib import sha256
from pathlib import Path

from kvshm.tools import cli
from kvshm.tools.keeper import command
from kvshm.tools.keeper.store import StoreError


class FolderStore:
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def buffer(self, nbytes: int) -> memoryview:
        return memoryview(bytearray(nbytes))

    def connect(self) -> None:
        self._call("connect", ())

    def has(self, keys: Sequence[str]) -> list[bool]:
        self._call("has", keys)
        return [self.path(key).exists() for key in keys]

    def put(self, keys: Sequence[str], values: Sequence[memoryview]) -> list[bool]:
        self._call("put", keys)
        if (self.folder / "full").exists():
            return [False] * len(keys)
        for key, value in zip(keys, values, strict=True):
            if not self.path(key).exists():
                self._write(self.path(key), bytes(value))
        return [True] * len(keys)

    def get(self, keys: Sequence[str], into: Sequence[memoryview]) -> list[bool]:
        self._call("get", keys)
        self._wait_while("held")
        return [self._read(self.path(key), value) for key, value in zip(keys, into, strict=True)]

    def number(self, key: str) -> int:
        self._call("number", (key,))
        path = self.path(key)
        return int(path.read_bytes()) if path.exists() else 0

    def first_number(self, key: str, number: int) -> int:
        self._call("first_number", (key,))
        unfinished = self._unfinished(self.path(key), str(number).encode())
        with suppress(FileExistsError):
            self.path(key).hardlink_to(unfinished)
        unfinished.unlink()
        return int(self.path(key).read_bytes())

    def set_number(self, key: str, number: int) -> None:
        self._call("raise", (key,))
        self._write(self.path(key), str(number).encode())
        self._log("set_number", (key,))  # once others can see it

    def close(self) -> None:
        pass

    def path(self, key: str) -> Path:
        return self.folder / sha256(key.encode()).hexdigest()

    def _read(self, path: Path, into: memoryview) -> bool:
        if not path.exists() or path.stat().st_size != len(into):
            return False
        into[:] = path.read_bytes()
        return True

    def _write(self, path: Path, value: bytes) -> None:
        self._unfinished(path, value).rename(path)

    def _unfinished(self, path: Path, value: bytes) -> Path:
        unfinished = path.with_suffix(f".{os.getpid()}")
        unfinished.write_bytes(value)
        return unfinished

    def _log(self, what: str, keys: Sequence[str]) -> None:
        with (self.folder / "calls").open("a") as calls:
            calls.write(" ".join((what, str(os.getpid()), *keys)) + "\n")

    def _call(self, what: str, keys: Sequence[str]) -> None:
        self._log(what, keys)
        self._wait_while("hung")
        if (self.folder / "down").exists():
            raise StoreError("the folder is down")

    def _wait_while(self, name: str) -> None:
        while (self.folder / name).exists():
            time.sleep(0.005)  # nobody tells a process that a file has gone


if __name__ == "__main__":
    command._store = FolderStore  # type: ignore[assignment]  # made of the same path
    sys.exit(cli.main())
