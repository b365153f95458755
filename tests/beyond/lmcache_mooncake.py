"""Mooncake's store as a second tier of LMCache's server: a plugin that LMCache loads by its name.

LMCache's own adapter (``mooncake_store``) needs a library that its wheel lacks.  This plays that
library in Python, over Mooncake's: LMCache's adapter for such libraries does the rest.

    --l2-adapter '{"type": "plugin", "module_path": "lmcache_mooncake",
                   "class_name": "MooncakeAdapter", "adapter_params": {...}}'
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from lmcache.v1.distributed.l2_adapters.native_connector_l2_adapter import (
    NativeConnectorL2Adapter,
)
from mooncake.store import MooncakeDistributedStore

Outcome = tuple[bool, list[bool]]
"""Whether the call as a whole succeeded, and what became of each key."""
Completion = tuple[int, bool, str, list[bool] | None]


class MooncakeClient:
    """What LMCache asks of a library: each call returns a number at once, and what became of it
    is drained later.  Any thread may call."""

    def __init__(self, setup: dict[str, str], workers: int) -> None:
        """``setup`` is Mooncake's own.  RuntimeError if the store does not take this client."""
        self._store = MooncakeDistributedStore()
        if code := self._store.setup(setup):
            raise RuntimeError(f"Mooncake's store takes no client with {setup}: error {code}")
        self._workers = ThreadPoolExecutor(workers, "mooncake")
        self._event = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._lock = threading.Lock()
        self._asked = 0
        self._done: list[Completion] = []

    def register(self, address: int, size: int) -> None:
        """Let the store read and write this memory without a copy of its own."""
        if code := self._store.register_buffer(address, size):
            raise RuntimeError(f"Mooncake's store cannot register {size} bytes: error {code}")

    def event_fd(self) -> int:
        return self._event

    def submit_batch_exists(self, keys: list[str]) -> int:
        def look() -> tuple[bool, list[bool]]:
            return True, [code == 1 for code in self._store.batch_is_exist(keys)]

        return self._submit(look)

    def submit_batch_set(self, keys: list[str], views: list[memoryview]) -> int:
        def put() -> tuple[bool, list[bool]]:
            codes = self._store.batch_put_from(keys, _addresses(views), _sizes(views))
            return not any(codes), [code == 0 for code in codes]

        return self._submit(put)

    def submit_batch_get(self, keys: list[str], views: list[memoryview]) -> int:
        def get() -> tuple[bool, list[bool]]:
            sizes = _sizes(views)
            got = self._store.batch_get_into(keys, _addresses(views), sizes)
            return True, [code == size for code, size in zip(got, sizes, strict=True)]

        return self._submit(get)

    def drain_completions(self) -> list[Completion]:
        try:
            os.eventfd_read(self._event)
        except BlockingIOError:
            return []
        with self._lock:
            done, self._done = self._done, []
        return done

    def close(self) -> None:
        self._workers.shutdown()
        self._store.close()
        os.close(self._event)

    def _submit(self, work: Callable[[], Outcome]) -> int:
        with self._lock:
            self._asked += 1
            number = self._asked
        self._workers.submit(self._run, number, work)
        return number

    def _run(self, number: int, work: Callable[[], Outcome]) -> None:
        try:
            succeeded, results = work()
            done = (number, succeeded, "", results)
        except Exception as error:  # to LMCache a failed call; it must hear of each
            done = (number, False, str(error), None)
        with self._lock:
            self._done.append(done)
        os.eventfd_write(self._event, 1)


class MooncakeAdapter(NativeConnectorL2Adapter):
    """``params``: Mooncake's setup, and how many ``workers`` call it at once (4)."""

    def __init__(self, params: dict[str, Any], l1_memory_desc: Any = None) -> None:
        setup = {name: str(value) for name, value in params.items() if name != "workers"}
        client = MooncakeClient(setup, int(params.get("workers", 4)))
        if l1_memory_desc is not None:
            client.register(l1_memory_desc.ptr, l1_memory_desc.size)
        super().__init__(client, type_name="mooncake")


def _addresses(views: Sequence[memoryview]) -> list[int]:
    return [ctypes.addressof(ctypes.c_char.from_buffer(view)) for view in views]


def _sizes(views: Sequence[memoryview]) -> list[int]:
    return [view.nbytes for view in views]
