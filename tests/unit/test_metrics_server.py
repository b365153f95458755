"""The server of ``kvshm metrics``: what it answers, to whom, and that no one holds it up."""

from __future__ import annotations

import asyncio
import signal
import socket
import threading
import time
from collections.abc import Awaitable, Callable
from contextlib import ExitStack

import pytest

from kvshm.tools.bounded_server import CLIENT_SECONDS, MAX_CLIENTS
from kvshm.tools.metrics.samples import Samples
from kvshm.tools.metrics.server import MetricsServer

Work = Callable[[int], Awaitable[None]]
LINE = b'kvshm_build_info{layout="2",protocol="3",version="1"} 1.0'


def scraped(version: str = "1") -> Samples:
    return {"kvshm_build_info": {(version, "2", "3"): 1.0}}


def signal_without_interrupting() -> None:
    """SIGTERM on this thread, as if it came just before the main thread waits."""
    signal.pthread_kill(threading.get_ident(), signal.SIGTERM)


@pytest.fixture
def serving(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Serves while a coroutine works with the port; returns what was logged besides."""

    def serve(
        work: Work,
        read: Callable[[], Samples] = scraped,
        client_seconds: float = CLIENT_SECONDS,
        max_clients: int = MAX_CLIENTS,
        host: str = "127.0.0.1",
        ends_it: bool = False,
    ) -> str:
        """``ends_it``: the coroutine sends SIGTERM itself."""
        server = MetricsServer(read, host, 0, client_seconds, max_clients)
        failures, unhandled = [], signal.getsignal(signal.SIGTERM)

        def client() -> None:
            try:
                asyncio.run(work(server.server_address[1]))
            except BaseException as exc:
                failures.append(exc)
            if not ends_it or failures:
                while signal.getsignal(signal.SIGTERM) is unhandled:
                    time.sleep(0.001)
                signal_without_interrupting()

        handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
        thread = threading.Thread(target=client)
        thread.start()
        server.serve("metrics", "/metrics")
        thread.join()
        for number, handler in handlers.items():
            assert signal.signal(number, handler) == signal.SIG_IGN, "a second one changes nothing"
        for failure in failures:
            raise failure
        first, *rest = capsys.readouterr().err.splitlines(keepends=True)
        assert first.startswith("kvshm metrics: serving http://")
        return "".join(rest)

    return serve


async def exchange(port: int, sent: bytes, host: str = "127.0.0.1") -> bytes:
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
        head, _, body = (await get(port)).partition(b"\r\n\r\n")
        assert b"Content-Type: text/plain; version=0.0.4" in head
        assert LINE in body
        assert b"# EOF" not in body
        openmetrics = "accept:  application/openmetrics-text;version=1.0.0 "
        head, _, body = (await get(port, "/metrics", openmetrics)).partition(b"\r\n\r\n")
        assert b"Content-Type: application/openmetrics-text; version=1.0.0" in head
        assert body.endswith(b"# EOF\n")
        senseless = await get(port, "/metrics", "Accept: application/openmetrics-text; version=abc")
        assert b"Content-Type: text/plain; version=0.0.4" in senseless, "a version that is none"

    assert serving(work) == ""


def test_only_metrics_look_at_the_engines(serving: Callable[..., str]) -> None:
    looks = []

    def read() -> Samples:
        looks.append(1)
        return scraped()

    async def work(port: int) -> None:
        for sent in (b"GET / HTTP/1.1", b"GET /x HTTP/1.1", b"POST /metrics HTTP/1.1"):
            await exchange(port, sent + b"\r\n\r\n")
        assert not looks
        await get(port)
        assert looks

    assert serving(work, read) == ""


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
        (b"POST /metrics HTTP/1.1\r\nContent-Length: 5\r\n\r\n", b"405 Method Not Allowed"),
        (b"GET /metrics HTTP/1.1\r\nHost: a\xff\x00\r\n: x\r\nno colon\r\n\r\n", b"200 OK"),
        (b"GET /" + b"x" * 70000, b"414 "),
        (b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 200 + b"\r\n", b"431 "),
    ],
)
def test_whatever_is_asked_has_an_answer(
    serving: Callable[..., str], sent: bytes, status: bytes
) -> None:
    async def work(port: int) -> None:
        assert (await exchange(port, sent)).startswith(b"HTTP/1.0 " + status)

    assert serving(work) == ""


@pytest.mark.parametrize(
    ("sent", "code"), [(b"PRI * HTTP/2.0\r\n\r\n", b"505"), (b"\x16\x03\x01\x02\r\n\r\n", b"400")]
)
def test_what_is_not_http_1_gets_a_page_that_says_so(
    serving: Callable[..., str], sent: bytes, code: bytes
) -> None:
    async def work(port: int) -> None:
        assert b"Error code: " + code in await exchange(port, sent)

    assert serving(work) == ""


def test_a_scrape_that_fails_is_a_line_in_the_log_and_the_next_one_may_succeed(
    serving: Callable[..., str],
) -> None:
    faults = [PermissionError(13, "no\nway"), None]

    def read() -> Samples:
        if (fault := faults.pop(0)) is not None:
            raise fault
        return scraped()

    async def work(port: int) -> None:
        assert (await get(port)).startswith(b"HTTP/1.0 500 ")
        assert LINE in await get(port)

    log = serving(work, read)
    assert log == "kvshm metrics: a scrape failed: PermissionError: [Errno 13] no way\n"


def test_clients_that_are_there_at_the_end_are_no_error(serving: Callable[..., str]) -> None:
    with ExitStack() as idle:

        async def work(port: int) -> None:
            for _ in range(3):
                idle.enter_context(socket.create_connection(("127.0.0.1", port)))
            await get(port)  # the others have been accepted before it

        assert serving(work) == ""


def test_scrapes_at_the_same_time_are_made_one_after_the_other(
    serving: Callable[..., str],
) -> None:
    lock = threading.Lock()

    def read() -> Samples:
        assert lock.acquire(blocking=False)
        for _ in range(1000):  # gives others the chance to come in
            threading.Event().wait(0)
        lock.release()
        return scraped()

    async def work(port: int) -> None:
        answers = await asyncio.gather(*(get(port) for _ in range(8)))
        assert {answer[:15] for answer in answers} == {b"HTTP/1.0 200 OK"}

    assert serving(work, read) == ""


def test_slow_clients_hold_up_no_one_and_are_hung_up_on_in_time(
    serving: Callable[..., str],
) -> None:
    before = threading.active_count()

    async def drip(port: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        end = asyncio.ensure_future(reader.read())
        while not end.done():
            writer.write(b"G")
            await asyncio.sleep(0.02)
        writer.close()

    async def work(port: int) -> None:
        silent = [await asyncio.open_connection("127.0.0.1", port) for _ in range(3)]
        assert LINE in await get(port)  # beside three that say nothing
        for reader, writer in silent:
            assert await reader.read() == b""
            writer.close()
        await drip(port)

    assert serving(work, client_seconds=0.2) == ""
    while threading.active_count() > before:
        time.sleep(0.001)


def test_who_does_not_read_is_hung_up_on_too(serving: Callable[..., str]) -> None:
    async def work(port: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1)
        writer.write(b"GET /metrics HTTP/1.1\r\n\r\n")
        await asyncio.sleep(0.8)
        with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
            await reader.readexactly(30_000_000)
        writer.close()

    assert serving(work, lambda: scraped("v" * 30_000_000), client_seconds=0.3) == ""


def test_more_clients_than_are_served_at_once_are_hung_up_on(serving: Callable[..., str]) -> None:
    async def work(port: int) -> None:
        first = [await asyncio.open_connection("127.0.0.1", port) for _ in range(2)]
        assert await _or_nothing(port) == b""
        for _, writer in first:
            writer.close()
        while LINE not in await _or_nothing(port):
            await asyncio.sleep(0)

    assert serving(work, max_clients=2) == ""


async def _or_nothing(port: int) -> bytes:
    try:
        return await get(port)
    except ConnectionError:
        return b""


def test_ipv6(serving: Callable[..., str]) -> None:
    async def work(port: int) -> None:
        assert LINE in await get(port, host="::1")
        with pytest.raises(ConnectionRefusedError):
            await get(port, host="127.0.0.1")

    assert serving(work, host="::1") == ""
    assert serving(work, host="::") == ""


def test_clients_that_wait_for_others_scrapes_do_not_keep_it_from_its_end(
    serving: Callable[..., str],
) -> None:
    reads, go_on = [], threading.Event()

    def read() -> Samples:
        reads.append(1)
        go_on.wait()
        return scraped()

    async def work(port: int) -> None:
        waiting = [asyncio.ensure_future(get(port)) for _ in range(20)]
        while not reads:
            await asyncio.sleep(0.001)
        signal_without_interrupting()
        while await is_listening(port):
            await asyncio.sleep(0.001)
        go_on.set()
        await asyncio.gather(*waiting, return_exceptions=True)

    async def is_listening(port: int) -> bool:
        try:
            _, writer = await asyncio.open_connection("127.0.0.1", port)
        except OSError:
            return False
        writer.close()
        return True

    assert serving(work, read, ends_it=True) == ""
    assert len(reads) == 1


def test_a_client_does_not_keep_the_server_from_its_end(serving: Callable[..., str]) -> None:
    silent = socket.socket()

    async def work(port: int) -> None:
        silent.connect(("127.0.0.1", port))
        await get(port)

    with silent:
        assert serving(work) == ""
