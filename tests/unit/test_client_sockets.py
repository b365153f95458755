"""A client that gets no sockets: said once, and nothing piles up for it."""

from __future__ import annotations

import logging
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from kvshm.client import CoordinatorClient


class Silent:
    """A member of which nothing is asked: it never comes to that."""


@contextmanager
def descriptors(left: int) -> Iterator[None]:
    """As many as that can be opened, and no more."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken: list[int] = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    try:
        with suppress(OSError):
            while True:
                taken.append(os.dup(0))
        for _ in range(left):
            os.close(taken.pop())
        yield
    finally:
        for fd in taken:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_without_descriptors_the_engine_serves_on_unshared(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    with descriptors(left=1):  # for the client's own wake-up
        client = CoordinatorClient(tmp_path, "ns", Silent())  # type: ignore[arg-type]  # asked nothing
        thread = client._thread
        assert thread is not None
        thread.join(60)
    assert not thread.is_alive()
    for _ in range(100):
        client.rejoin()
        client.send_events(bytes(48))
    assert not client._outbox
    assert not client.is_member
    assert "unshared" in caplog.text
    client.close()
