"""Mooncake Store as a keeper's store beyond the node.

Facts from Mooncake 0.3.13 (mooncake-wheel, mooncake/store.py and its bindings): an object is never
changed by ``put``; ``upsert`` replaces it; calls return negative numbers for errors, and
``batch_get_into`` the bytes read.  ``setup`` tries for minutes to reach a master, and all threads
stand still meanwhile, for it keeps Python's global lock; the other calls let go of it.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from kvshm.errors import ConfigError

from ..options import parse_size
from .store import StoreError

INSTALL = (
    "pip install mooncake-transfer-engine, or without CUDA mooncake-transfer-engine-non-cuda, and "
    "the system's libibverbs1, librdmacm1, libnuma1 and liburing2"
)
P2P = "P2PHANDSHAKE"
TRY_SECONDS = 30
"""How long another process may try to reach the store."""
THERE = -705
"""What a put returns of a key that has a value."""


class Settings(NamedTuple):
    """What the file of MOONCAKE_CONFIG_PATH says, as vLLM and LMCache read it."""

    master_server_address: str
    metadata_server: str = P2P
    protocol: str = "tcp"
    device_name: str = ""
    local_hostname: str = ""
    """Empty: the address of this machine from which it reaches the master."""
    global_segment_size: int = 0
    """Bytes of memory that this process adds to the store."""
    local_buffer_size: int = 64 << 20


def read_settings(path: Path) -> Settings:
    """Raises ConfigError, which names file, setting and remedy."""
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError) as exc:
        raise ConfigError(f"--store {path}: {exc}; give a file of Mooncake's settings") from exc
    if not isinstance(found, dict) or not found.get("master_server_address"):
        raise ConfigError(f"--store {path}: master_server_address is missing; give host:port")
    known = {name: found[name] for name in Settings._fields if name in found}
    for name, value in known.items():
        known[name] = _size(path, name, value) if name.endswith("_size") else str(value)
    return Settings(**known)


def _size(path: Path, name: str, value: object) -> int:
    try:
        return value if type(value) is int and value >= 0 else parse_size(str(value))
    except Exception as exc:
        raise ConfigError(f"--store {path}: {name} is {value!r}; give bytes, as 4G") from exc


class MooncakeStore:
    """See ``store.Store``."""

    def __init__(self, settings: Settings) -> None:
        """Does not connect: ``connect`` does.  Raises ConfigError without Mooncake's package."""
        self._settings = settings
        os.environ.setdefault("MC_LOG_LEVEL", "WARNING")  # of Mooncake's library
        try:
            from mooncake.store import MooncakeDistributedStore, ReplicateConfig
        except ImportError as exc:
            raise ConfigError(f"--store needs Mooncake ({exc}): {INSTALL}") from exc
        self._pinned = ReplicateConfig()
        self._pinned.with_hard_pin = True
        self._store = MooncakeDistributedStore()
        self._connected = False
        self._buffers: list[tuple[mmap.mmap, Any]] = []

    def connect(self) -> None:
        """Blocks until the store answers, or some seconds.  Raises StoreError."""
        master = self._settings.master_server_address
        if not _answers(self._settings):
            raise StoreError(f"Mooncake's master at {master} does not answer")
        if result := _set_up(self._store, self._settings):
            raise StoreError(f"Mooncake's master at {master} says {result}")
        for memory, first in self._buffers:
            self._register(memory, first)
        self._connected = True

    def buffer(self, nbytes: int) -> memoryview:
        try:
            memory = mmap.mmap(-1, nbytes)
        except OSError as exc:
            raise StoreError(f"no {nbytes} bytes to read and write blocks: {exc}") from exc
        first = ctypes.c_char.from_buffer(memory)
        if self._connected:
            self._register(memory, first)
        self._buffers.append((memory, first))
        return memoryview(memory)

    def has(self, keys: Sequence[str]) -> list[bool]:
        found = self._store.batch_is_exist(list(keys))
        if len(found) != len(keys) or any(each < 0 for each in found):
            raise StoreError(f"batch_is_exist: {min(found, default=0)}")
        return [each == 1 for each in found]

    def put(self, keys: Sequence[str], values: Sequence[memoryview]) -> list[bool]:
        results = self._store.batch_put_from(list(keys), *_places(values))
        return [result == 0 or result == THERE for result in results]

    def get(self, keys: Sequence[str], into: Sequence[memoryview]) -> list[bool]:
        results = self._store.batch_get_into(list(keys), *_places(into))
        return [result == len(value) for result, value in zip(results, into, strict=True)]

    def number(self, key: str) -> int:
        if not self.has([key])[0]:
            return 0
        text = self._store.get(key)
        try:
            return int(text)
        except ValueError:
            raise StoreError(f"{key} is {text!r}, no number") from None

    def first_number(self, key: str, number: int) -> int:
        result = self._store.put(key, str(number).encode(), self._pinned)
        if result not in (0, THERE):
            raise StoreError(f"put of {key}: {result}")
        return self.number(key)

    def set_number(self, key: str, number: int) -> None:
        if result := self._store.upsert(key, str(number).encode(), self._pinned):
            raise StoreError(f"upsert of {key}: {result}")

    def close(self) -> None:
        self._store.close()

    def _register(self, memory: mmap.mmap, first: Any) -> None:
        if result := self._store.register_buffer(ctypes.addressof(first), len(memory)):
            raise StoreError(f"register_buffer: {result}")


def _set_up(store: Any, s: Settings) -> int:
    host = s.local_hostname or _own_address(s.master_server_address)
    memory = s.global_segment_size, s.local_buffer_size
    network = s.protocol, s.device_name, s.master_server_address
    return int(store.setup(host, s.metadata_server or P2P, *memory, *network))


def _answers(settings: Settings) -> bool:
    """Whether another process can use the store, so that ``setup`` will not wait."""
    asked = json.dumps(settings._replace(global_segment_size=0))
    program = f"import sys; from {__name__} import try_to_use; try_to_use(sys.argv[1])"
    command = [sys.executable, "-P", "-c", program, asked]
    none = subprocess.DEVNULL
    return subprocess.run(command, stdin=none, stdout=none, stderr=none).returncode == 0


def try_to_use(settings: str) -> None:
    """End this process, with status 0 if the store answers."""
    signal.alarm(TRY_SECONDS)  # ends it though no thread can run
    from mooncake.store import MooncakeDistributedStore

    os._exit(_set_up(MooncakeDistributedStore(), Settings(*json.loads(settings))) != 0)


def _places(values: Sequence[memoryview]) -> tuple[list[int], list[int]]:
    starts = [ctypes.addressof(ctypes.c_char.from_buffer(value)) for value in values]
    return starts, [len(value) for value in values]


def _own_address(master: str) -> str:
    """The address from which this machine would speak to the master.  Raises StoreError."""
    host, _, port = master.rpartition(":")
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:  # sends nothing
            probe.connect((host.strip("[]"), int(port)))
            return str(probe.getsockname()[0])
    except (OSError, ValueError) as exc:
        raise StoreError(f"master_server_address {master}: {exc}") from exc
