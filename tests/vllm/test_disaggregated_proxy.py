"""The proxy of the example for disaggregated prefill: what it asks of whom, and what follows when
an engine or a client goes.  The engines are played; tests/vllm/test_disaggregated_prefill.py has
real ones."""

from __future__ import annotations

import asyncio
import json
import logging
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import Any

import pytest

pytest.importorskip("aiohttp")

from aiohttp import ClientError, ClientSession, web
from aiohttp.test_utils import TestServer, unused_port
from disaggregated_prefill import proxy
from disaggregated_prefill.proxy import ONE_TOKEN, REST_SECONDS, Engines, Proxy, application

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
RECEIPT = "0123456789abcdef.17.3"
PATIENCE_S = 100.0
Json = dict[str, Any]
Answer = Callable[["Played", web.Request], Awaitable[web.StreamResponse]]
Prepared = Callable[[web.Request, web.StreamResponse], Awaitable[None]]


class Played:
    """An engine that notes what it is asked."""

    def __init__(self, answer: Answer) -> None:
        self.asked: list[Json] = []
        self.headers: list[Mapping[str, str]] = []
        self.arrived, self.aborted = asyncio.Event(), asyncio.Event()
        self._answer = answer
        app = web.Application()
        for path in (CHAT, COMPLETION):
            app.router.add_post(path, self._asked)
        app.router.add_get("/health", self._is_well)
        self.server = TestServer(app, handler_cancellation=True)

    async def _asked(self, request: web.Request) -> web.StreamResponse:
        self.asked.append(await request.json())
        self.headers.append(request.headers)
        self.arrived.set()
        try:
            return await self._answer(self, request)
        except asyncio.CancelledError:
            self.aborted.set()
            raise

    async def _is_well(self, request: web.Request) -> web.Response:
        return web.Response()

    @property
    def url(self) -> str:
        return str(self.server.make_url("")).rstrip("/")


async def computes(engine: Played, request: web.Request) -> web.StreamResponse:
    return web.json_response({"kv_transfer_params": {"kvshm": {"after": RECEIPT, "peers": {}}}})


async def decodes(engine: Played, request: web.Request) -> web.StreamResponse:
    """As an answer that is streamed: in two chunks."""
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    for chunk in (b"data: {}\n\n", b"data: [DONE]\n\n"):
        await response.write(chunk)
    return response


async def refuses(engine: Played, request: web.Request) -> web.StreamResponse:
    return web.json_response({"error": {"message": "no such model"}}, status=404)


async def hangs(engine: Played, request: web.Request) -> web.StreamResponse:
    await asyncio.Event().wait()
    raise AssertionError


async def begins(engine: Played, request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    await response.write(b"data: {}\n\n")
    return await hangs(engine, request)


async def dies(engine: Played, request: web.Request) -> web.StreamResponse:
    """In the middle of an answer, as a process that is killed."""
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    await response.write(b"data: {}\n\n")
    assert request.transport is not None
    request.transport.abort()
    return response


class Node:
    """Engines behind the proxy."""

    def __init__(self, proxy: Proxy, client: ClientSession, url: str) -> None:
        self.proxy, self._client, self._url = proxy, client, url

    async def ask(self, body: Any, path: str = COMPLETION, **more: Any) -> tuple[int, str]:
        async with self._client.post(self._url + path, data=json.dumps(body), **more) as answer:
            return answer.status, await answer.text()

    def begin(self, body: Any) -> asyncio.Task[tuple[int, str]]:
        return asyncio.create_task(self.ask(body))


@asynccontextmanager
async def node(
    prefill: list[Played],
    decode: list[Played],
    seconds: float = PATIENCE_S,
    dead: int = 0,
    on_prepare: Prepared | None = None,
) -> AsyncIterator[Node]:
    """``dead``: so many prefill engines that nobody can reach come first; ``on_prepare``: is
    called before the proxy's answers begin."""
    async with AsyncExitStack() as stack:
        for engine in (*prefill, *decode):
            await engine.server.start_server()
            stack.push_async_callback(engine.server.close)
        gone = [f"http://127.0.0.1:{unused_port()}" for _ in range(dead)]
        urls = [*gone, *(e.url for e in prefill)]
        made = Proxy(Engines(urls), Engines([e.url for e in decode]), seconds)
        app = application(made)
        app.on_response_prepare.extend([on_prepare] if on_prepare else [])
        server = TestServer(app, handler_cancellation=True)
        await server.start_server()
        stack.push_async_callback(server.close)
        client = await stack.enter_async_context(ClientSession())
        yield Node(made, client, str(server.make_url("")).rstrip("/"))


def run(test: Awaitable[None]) -> None:
    async def bounded() -> None:
        await asyncio.wait_for(test, PATIENCE_S)

    asyncio.run(bounded())


def test_the_prompt_is_computed_first_and_its_receipt_passed_on() -> None:
    async def test() -> None:
        p, d = Played(computes), Played(decodes)
        asked = {
            "prompt": "x", "max_tokens": 9, "stream": True, "stop": ["a"], "logprobs": 2,
            "stream_options": {"include_usage": True}, "temperature": 0,
        }  # fmt: skip
        async with node([p], [d]) as n:
            said = await n.ask(asked, headers={"Authorization": "Bearer t", "X-Request-Id": "7"})
        assert said == (200, "data: {}\n\ndata: [DONE]\n\n")
        report = {"kv_transfer_params": {"kvshm": {"report": True}}}
        assert p.asked == [{"prompt": "x", "temperature": 0, **ONE_TOKEN, **report}]
        assert d.asked == [{**asked, "kv_transfer_params": {"kvshm": {"after": RECEIPT}}}]
        for headers in (*p.headers, *d.headers):
            assert headers["Authorization"] == "Bearer t"
            assert headers["X-Request-Id"] == "7"

    run(test())


def test_a_chat_has_another_limit_and_others_parameters_stay() -> None:
    async def test() -> None:
        p, d = Played(computes), Played(decodes)
        own = {"remote": 3, "kvshm": {"report": False, "after": "a client's own"}}
        asked = {"messages": [], "max_completion_tokens": 9, "kv_transfer_params": own}
        async with node([p], [d]) as n:
            await n.ask(asked, CHAT)
        assert p.asked[0]["max_completion_tokens"] == 1
        assert p.asked[0]["kv_transfer_params"] == {"remote": 3, "kvshm": {"report": True}}
        wanted = {"remote": 3, "kvshm": {"report": False, "after": RECEIPT}}
        assert d.asked == [{**asked, "kv_transfer_params": wanted}]

    run(test())


NOT_SHARED = [{"kvshm": {"share": False}}, {"kvshm": {"share": 0}}, {"kvshm": 3}, {"kvshm": []}]
NO_OBJECTS = [[3], [], "x", "", 3, 0, False]
"""vLLM refuses a request that has one of these for an object."""


@pytest.mark.parametrize("params", NOT_SHARED + NO_OBJECTS, ids=json.dumps)
def test_what_may_not_be_shared_is_computed_where_it_is_decoded(params: Any) -> None:
    async def test() -> None:
        p, d = Played(computes), Played(decodes)
        asked = {"prompt": "x", "kv_transfer_params": params}
        async with node([p], [d]) as n:
            assert (await n.ask(asked))[0] == 200
        assert p.asked == []
        assert d.asked == [asked]

    run(test())


@pytest.mark.parametrize("answer", [refuses, hangs, decodes, dies])
def test_a_prefill_engine_that_does_not_answer_well_costs_no_answer(answer: Answer) -> None:
    async def test() -> None:
        p, d = Played(answer), Played(decodes)
        async with node([p], [d], seconds=0.05) as n:
            assert (await n.ask({"prompt": "x"}))[0] == 200
        assert len(p.asked) == 1
        assert d.asked == [{"prompt": "x", "kv_transfer_params": {"kvshm": {}}}]

    run(test())


def test_a_dead_prefill_engine_is_passed_over() -> None:
    async def test() -> None:
        p, d = Played(computes), Played(decodes)
        async with node([p], [d], dead=1) as n:
            for _ in range(3):
                await n.ask({"prompt": "x"})
        assert len(p.asked) == 3
        assert [e.requests for e in n.proxy.prefill.all] == [1, 3]
        assert all(body["kv_transfer_params"]["kvshm"] for body in d.asked)

    run(test())


def test_an_engine_that_failed_is_tried_again_after_a_while() -> None:
    now = [100.0]
    engines = Engines(["a", "b"], clock=lambda: now[0])
    engines.failed(engines.all[0], OSError("gone"))
    assert [e.url for e in engines.in_turn()] == ["b"]
    now[0] += REST_SECONDS
    assert [e.url for e in engines.in_turn()] == ["a", "b"]


def test_the_least_busy_engine_is_next_and_equal_ones_in_turn() -> None:
    engines = Engines(["a", "b"])
    chosen = []
    for _ in range(4):
        with (engine := engines.in_turn()[0]).busy():
            chosen.append(engine.url)
    assert chosen == ["a", "b", "a", "b"]
    with engines.all[0].busy():
        assert engines.in_turn()[0].url == "b"


def test_what_the_decode_engine_says_is_passed_through() -> None:
    async def test() -> None:
        async with node([Played(refuses)], [Played(refuses)]) as n:
            status, said = await n.ask({"prompt": "x"})
        assert status == 404
        assert "no such model" in said

    run(test())


def test_without_a_decode_engine_there_is_a_clear_error() -> None:
    async def test() -> None:
        d = Played(decodes)
        async with node([Played(computes)], [d]) as n:
            await d.server.close()
            for _ in range(2):  # also while it rests
                status, said = await n.ask({"prompt": "x"})
                assert status == 503
                assert "no decode engine can be reached" in json.loads(said)["error"]["message"]

    run(test())


def test_if_all_decode_engines_have_failed_they_are_asked_all_the_same() -> None:
    async def test() -> None:
        async with node([Played(computes)], [Played(decodes)]) as n:
            n.proxy.decode.failed(n.proxy.decode.all[0], OSError("gone, and back"))
            assert (await n.ask({"prompt": "x"}))[0] == 200

    run(test())


def test_a_decode_engine_that_cannot_be_reached_is_replaced_by_another() -> None:
    async def test() -> None:
        gone, d = Played(decodes), Played(decodes)
        async with node([Played(computes)], [gone, d]) as n:
            await gone.server.close()
            assert (await n.ask({"prompt": "x"}))[0] == 200

    run(test())


def test_an_answer_that_breaks_off_does_not_look_complete() -> None:
    async def test() -> None:
        async with node([Played(computes)], [Played(dies)]) as n:
            url = n._url + COMPLETION
            async with n._client.post(url, json={"prompt": "x"}) as answer:
                said, whole = b"", False
                with suppress(ClientError):
                    async for chunk in answer.content.iter_any():
                        said += chunk
                    whole = True
        assert not whole
        assert b"the decode engine has ended" in said
        assert b"[DONE]" not in said

    run(test())


@pytest.mark.parametrize(("p", "d"), [(hangs, decodes), (computes, hangs), (computes, begins)])
def test_a_client_that_goes_aborts_its_request(p: Answer, d: Answer) -> None:
    async def test() -> None:
        prefill, decode = Played(p), Played(d)
        waits = prefill if p is hangs else decode
        async with node([prefill], [decode]) as n:
            task = n.begin({"prompt": "x", "stream": True})
            await waits.arrived.wait()
            task.cancel()
            await waits.aborted.wait()
            assert all(e.in_flight == 0 for e in n.proxy.decode.all)
        assert bool(decode.asked) is (waits is decode)

    run(test())


def goes_before(said: bytes) -> Prepared:
    """A client that is found gone when the proxy writes this to it; nothing: the headers."""

    async def prepared(request: web.Request, response: web.StreamResponse) -> None:
        write, transport = response.write, request.transport
        assert transport is not None

        async def checked(data: Any) -> None:
            if said in data:
                transport.close()
            await write(data)

        if not said:
            transport.close()
        response.write = checked  # type: ignore[method-assign]  # of this answer alone

    return prepared


@pytest.mark.parametrize(
    ("d", "said", "blamed"), [(begins, b"", 0), (begins, b"data", 0), (dies, b"has ended", 1)]
)
def test_no_engine_is_blamed_for_a_client_that_goes(
    d: Answer, said: bytes, blamed: int, caplog: pytest.LogCaptureFixture
) -> None:
    async def test() -> None:
        decode = Played(d)
        async with node([Played(computes)], [decode], on_prepare=goes_before(said)) as n:
            with suppress(ClientError):
                await n.ask({"prompt": "x", "stream": True})
            if not blamed:
                await decode.aborted.wait()
            assert bool(n.proxy.decode.all[0].rests_until) is bool(blamed)
        assert sum(r.levelno >= logging.WARNING for r in caplog.records) == blamed, caplog.text

    run(test())


@pytest.mark.multiprocess
def test_the_program_passes_on_and_aborts_as_well() -> None:
    async def test() -> None:
        p, d = Played(computes), Played(begins)
        async with node([p], [d]) as n:
            url = f"http://127.0.0.1:{(port := unused_port())}"
            program = (sys.executable, proxy.__file__, "--port", str(port))
            process = await asyncio.create_subprocess_exec(
                *program, "--prefill", p.url, "--decode", d.url
            )
            try:
                while not await is_well(n._client, url + "/health"):
                    assert process.returncode is None
                    await asyncio.sleep(0.05)
                async with n._client.post(url + COMPLETION, json={"prompt": "x"}) as answer:
                    assert await answer.content.readline() == b"data: {}\n"
                await d.aborted.wait()
            finally:
                process.terminate()
                await process.wait()

    run(test())


async def is_well(client: ClientSession, url: str) -> bool:
    try:
        async with client.get(url) as answer:
            return answer.ok
    except ClientError:
        return False


@pytest.mark.parametrize("body", [b"{", b"[]", b"\xff"])
def test_what_is_no_request_is_refused(body: bytes) -> None:
    async def test() -> None:
        p, d = Played(computes), Played(decodes)
        async with node([p], [d]) as n, n._client.post(n._url + COMPLETION, data=body) as answer:
            assert answer.status == 400
            assert "JSON" in (await answer.json())["error"]["message"]
        assert not p.asked + d.asked

    run(test())
