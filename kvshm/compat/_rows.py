"""Rows of memory, each published under a key of its own: what blocks of KV cannot carry."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

from ..api import Config, Identity, LoadState, MisuseError, Region, allocate, join


def buffer_of(what: str, given: Any) -> memoryview:
    """Return what can be copied into a row.  Raises MisuseError."""
    try:
        view = memoryview(given)
    except (TypeError, ValueError, BufferError):
        raise MisuseError(
            f"{what} is {type(given).__name__}, without the buffer protocol: give what has it, as "
            "bytes or an array (of a torch tensor, .numpy())"
        ) from None
    if not view.c_contiguous:
        raise MisuseError(f"{what} is not C-contiguous: give a copy that is")
    return view


class Rows:
    """A Node whose blocks are rows.  Any thread, but each row is used by one at a time."""

    def __init__(
        self, identity: Identity, num_rows: int, row_bytes: int, config: Config | None
    ) -> None:
        """Rows of equal size, in all engines that are to share: the size is a part of the
        fingerprint."""
        self._row_bytes = row_bytes
        config = replace(config or Config.from_env(os.environ), min_prefix_tokens=0)
        self._memory = allocate(num_rows * row_bytes, config)
        try:
            self.node = join(
                identity,
                memory=self._memory,
                regions=[Region(0, row_bytes, row_bytes, num_rows)],
                block_size=1,
                config=config,
            )
        except BaseException:
            self._memory.close()
            raise

    def publish(self, row: int, key: bytes, *parts: bytes) -> None:
        """Write the row and publish it, once no process reads what it held."""
        self.node.retract([row])
        begin = row * self._row_bytes
        for part in parts:
            self._memory.buffer[begin : begin + len(part)] = part
            begin += len(part)
        self.node.publish([key], [row])

    def fetch(self, row: int, key: bytes, timeout: float | None) -> bytes | None:
        """Return another engine's row with this key, by way of this row; None if there is none
        after ``timeout`` seconds, or it went while it was read."""
        if not (found := self.node.wait_for([key], timeout)):
            return None
        self.node.retract([row])
        if self.node.load(found, into=[row]).wait() is not LoadState.DONE:
            return None
        return bytes(self._memory.buffer[row * self._row_bytes : (row + 1) * self._row_bytes])

    def close(self) -> None:
        """Withdraw the rows.  Blocks up to a few seconds."""
        self.node.close()
        self._memory.close()
