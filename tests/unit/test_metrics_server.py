"""The server of ``kvshm metrics``: what it answers, to whom, and that nobody holds it up."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import threading
from collections.abc import Awaitable, Callable
from contextlib import ExitStack

import pytest

from kvshm.tools.metrics.server import CLIENT_SECONDS, HEAD_BYTES, MAX_CLIENTS, MetricsServer

Work = Callable[[int], Awaitable[None]]


def scraped(accept: str) -> tuple[bytes, str]:
    return f"for {accept}".encode(), "text/x-test"


@pytest.fixture
def serving(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Serves while a coroutine works with the port; returns what was logged besides."""

    def serve(
        work: Work,
        scrape: Callable[[str], tuple[bytes, str]] = scraped,
        client_seconds: float = CLIENT_SECONDS,
        max_clients: int = MAX_CLIENTS,
        host: str = "127.0.0.1",
    ) -> str:
        said = ""

        async def both() -> None:
            nonlocal said
            server = MetricsServer(scrape, client_seconds, max_clients)
            served = asyncio.create_task(server.serve(host, 0))
            while not (found := re.search(r":(\d+)/metrics\n", said)):
                await asyncio.sleep(0)
                said += capsys.readouterr().err
            said = said[found.end() :]
            try:
                await work(int(found[1]))
            finally:
                os.kill(os.getpid(), signal.SIGTERM)
                await served

        asyncio.run(both())
        return said + capsys.readouterr().err

    return serve


async def exchange(port: int, sent: bytes, host: str = "127.0.0.1") -> bytes:
    """What the server answers, until it hangs up."""
    reader, writer = await asyncio.open_connection(host, port)
    writer.write(sent)
    try:
        return await reader.read()
    finally:
        writer.close()


async def get(port: int, target: str = "/metrics", *headers: str, host: str = "127.0.0.1") -> bytes:
    head = "\r\n".join((f"GET {target} HTTP/1.1", "Host: x", *headers, "", ""))
    return await exchange(port, head.encode(), host)


def test_metrics_are_answered_in_the_format_that_is_accepted(serving: Callable[..., str]) -> None:
    async def work(port: int) -> None:
        answer = await get(port, "/metrics?name[]=x", "accept:  text/y ", "Accept-Encoding: gzip")
        assert answer == (
            b"HTTP/1.1 200 OK\r\nContent-Type: text/x-test\r\nContent-Length: 10\r\n"
            b"Connection: close\r\n\r\nfor text/y"
        )
        assert (await get(port)).endswith(b"\r\n\r\nfor ")

    assert serving(work) == ""


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"GET / HTTP/1.0\r\n\r\n", b"200 OK"),
        (b"GET /metric HTTP/1.1\r\n\r\n", b"404 Not Found"),
        (b"GET /../../etc/passwd HTTP/1.1\r\n\r\n", b"404 Not Found"),
        (b"GET http://elsewhere/metrics HTTP/1.1\r\nHost: elsewhere\r\n\r\n", b"200 OK"),
        (b"GET http://[x/metrics HTTP/1.1\r\n\r\n", b"200 OK"),
        (b"GET http://[x HTTP/1.1\r\n\r\n", b"200 OK"),
        (b"GET http://elsewhere/other HTTP/1.1\r\nHost: elsewhere\r\n\r\n", b"404 Not Found"),
        (b"GET //metrics HTTP/1.1\r\n\r\n", b"404 Not Found"),
        (b"POST /metrics HTTP/1.1\r\nContent-Length: 5\r\n\r\n", b"405 Method Not Allowed"),
        (b"\x16\x03\x01\x02\r\n\r\n", b"400 Bad Request"),
        (b"GET /metrics\r\n\r\n", b"400 Bad Request"),
        (b"PRI * HTTP/2.0\r\n\r\n", b"400 Bad Request"),
        (b"GET /metrics HTTP/1.1\r\nHost: a\xff\x00\r\n: x\r\nno colon\r\n\r\n", b"200 OK"),
        (b"GET /" + b"x" * HEAD_BYTES, b"431 Request Header Fields Too Large"),
    ],
)
def test_whatever_is_asked_has_an_answer(
    serving: Callable[..., str], sent: bytes, status: bytes
) -> None:
    async def work(port: int) -> None:
        assert (await exchange(port, sent)).startswith(b"HTTP/1.1 " + status + b"\r\n")

    assert serving(work) == ""


def test_a_scrape_that_fails_is_a_line_in_the_log_and_the_next_one_may_succeed(
    serving: Callable[..., str],
) -> None:
    faults = [PermissionError(13, "no\nway"), None]

    def scrape(accept: str) -> tuple[bytes, str]:
        if (fault := faults.pop(0)) is not None:
            raise fault
        return scraped(accept)

    async def work(port: int) -> None:
        assert (await get(port)).startswith(b"HTTP/1.1 500 ")
        assert (await get(port)).startswith(b"HTTP/1.1 200 ")

    log = serving(work, scrape)
    assert log == "kvshm metrics: a scrape failed: PermissionError: [Errno 13] no way\n"


def test_clients_that_are_there_at_the_end_are_no_error(
    serving: Callable[..., str], caplog: pytest.LogCaptureFixture
) -> None:
    with ExitStack() as idle:

        async def work(port: int) -> None:
            for _ in range(3):
                idle.enter_context(socket.create_connection(("127.0.0.1", port)))
            await get(port)  # the others have been accepted before it

        assert serving(work) == ""
    assert caplog.text == "", "asyncio logs what its tasks raise"


def test_scrapes_at_the_same_time_are_made_one_after_the_other(
    serving: Callable[..., str],
) -> None:
    lock = threading.Lock()

    def scrape(accept: str) -> tuple[bytes, str]:
        assert lock.acquire(blocking=False)
        for _ in range(1000):  # gives others the chance to come in
            threading.Event().wait(0)
        lock.release()
        return scraped(accept)

    async def work(port: int) -> None:
        answers = await asyncio.gather(*(get(port) for _ in range(8)))
        assert {answer[:15] for answer in answers} == {b"HTTP/1.1 200 OK"}

    assert serving(work, scrape) == ""


def test_slow_clients_take_no_thread_and_are_hung_up_on_in_time(
    serving: Callable[..., str],
) -> None:
    before = threading.active_count()

    async def work(port: int) -> None:
        slow = [await asyncio.open_connection("127.0.0.1", port) for _ in range(3)]
        for _, writer in slow:
            writer.write(b"GET /metrics HT")
        assert (await get(port)).endswith(b"for ")  # beside three that say nothing
        for reader, writer in slow:
            assert await reader.read() == b""
            writer.close()
        assert threading.active_count() <= before + 1

    assert serving(work, client_seconds=0.2) == ""


def test_who_does_not_read_is_hung_up_on_too(serving: Callable[..., str]) -> None:
    def scrape(_: str) -> tuple[bytes, str]:
        return bytes(100_000_000), "text/x-test"

    async def work(port: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1)
        writer.write(b"GET /metrics HTTP/1.1\r\n\r\n")
        await asyncio.sleep(0.5)
        with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
            await reader.readexactly(100_000_000)
        writer.close()

    assert serving(work, scrape, client_seconds=0.3) == ""


def test_more_clients_than_are_served_at_once_are_hung_up_on(serving: Callable[..., str]) -> None:
    async def work(port: int) -> None:
        first = [await asyncio.open_connection("127.0.0.1", port) for _ in range(2)]
        assert await _or_nothing(port) == b""
        for _, writer in first:
            writer.close()
        while not (await _or_nothing(port)).endswith(b"for "):
            await asyncio.sleep(0)

    assert serving(work, max_clients=2) == ""


async def _or_nothing(port: int) -> bytes:
    try:
        return await get(port)
    except ConnectionError:
        return b""


def test_ipv6(serving: Callable[..., str]) -> None:
    async def work(port: int) -> None:
        assert (await get(port, host="::1")).endswith(b"for ")

    assert serving(work, host="::1") == ""


def test_a_client_does_not_keep_the_server_from_its_end(serving: Callable[..., str]) -> None:
    silent = socket.socket()

    async def work(port: int) -> None:
        silent.connect(("127.0.0.1", port))
        await get(port)

    with silent:
        assert serving(work) == ""
