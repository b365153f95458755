"""A proxy for prefill and decode engines of one machine that share their KV caches by kvshm.

    python examples/disaggregated_prefill/proxy.py --port 8000 \
        --prefill http://127.0.0.1:8001 --decode http://127.0.0.1:8002 http://127.0.0.1:8003

A prefill engine computes each prompt and one token.  A decode engine then gets the whole request
and imports the prompt's blocks; its answer is streamed through.  Its request carries the *receipt*
of the prefill engine's answer, so that it looks for the blocks when it has heard of them.
"""

from __future__ import annotations

import argparse
import json
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from aiohttp import ClientError, ClientResponse, ClientSession, ClientTimeout, TCPConnector, web

PATHS = ("/v1/completions", "/v1/chat/completions")
ONE_TOKEN = {"max_tokens": 1, "min_tokens": 0, "n": 1, "stream": False}
NOT_FOR_PREFILL = (
    "stream_options", "stop", "stop_token_ids", "best_of", "use_beam_search",
    "logprobs", "top_logprobs", "prompt_logprobs", "echo",
)  # fmt: skip
"""What would change or end the prefill engine's one token, whose text nobody reads."""
PASSED_ON = ("Authorization", "X-Request-Id", "traceparent", "tracestate")
REST_SECONDS = 5.0
"""How long an engine to which a connection has failed gets no requests, if there are others."""
CONNECT_SECONDS = 5.0
MOST_BYTES = 1 << 28
"""Of a request; images come within it."""

log = logging.getLogger("proxy")
Json = dict[str, Any]


@dataclass
class Engine:
    url: str
    in_flight: int = 0
    requests: int = 0
    """So far; of engines that are equally busy the one with the fewest is next."""
    rests_until: float = 0.0

    @contextmanager
    def busy(self) -> Iterator[None]:
        self.in_flight += 1
        self.requests += 1
        try:
            yield
        finally:
            self.in_flight -= 1


class Engines:
    """Engines that do the same."""

    def __init__(self, urls: Sequence[str], clock: Callable[[], float] = time.monotonic) -> None:
        self.all = [Engine(url.rstrip("/")) for url in urls]
        self._clock = clock

    def in_turn(self) -> list[Engine]:
        """The engines to try, the least busy first, without those that rest."""
        awake = [engine for engine in self.all if engine.rests_until <= self._clock()]
        return sorted(awake, key=lambda engine: (engine.in_flight, engine.requests))

    def failed(self, engine: Engine, why: Exception) -> None:
        """A connection has failed: try others first for a while."""
        engine.rests_until = self._clock() + REST_SECONDS
        log.warning("%s: %s %s", engine.url, type(why).__name__, why)


class EngineEnded(Exception):
    """An engine has died in the middle of its answer."""


class Proxy:
    """Passes requests on.  One event loop."""

    def __init__(self, prefill: Engines, decode: Engines, prefill_seconds: float) -> None:
        """``prefill_seconds``: after this time the decode engine computes the prompt itself."""
        self.prefill, self.decode = prefill, decode
        self._prefill_timeout = ClientTimeout(total=prefill_seconds, sock_connect=CONNECT_SECONDS)
        self._session: ClientSession

    async def session(self, app: web.Application) -> Any:
        """Opens and closes the connections to the engines, as aiohttp's ``cleanup_ctx`` asks."""
        timeout = ClientTimeout(total=None, sock_connect=CONNECT_SECONDS)
        async with ClientSession(connector=TCPConnector(limit=0), timeout=timeout) as self._session:
            yield

    async def answer(self, request: web.Request) -> web.StreamResponse:
        """Answer a completion or a chat.  If the client goes, aiohttp cancels this, which closes
        the connection to the engine, and the engine aborts the request."""
        try:
            body = await request.json()
        except ValueError as exc:
            return failure(400, f"the body is not JSON: {exc}")
        if not isinstance(body, dict):
            return failure(400, "the body is not a JSON object")
        headers = {name: request.headers[name] for name in PASSED_ON if name in request.headers}
        if (options := options_of(body)) is not None:
            receipt = await self._computed(request.path, body, options, headers)
            body = with_options(body, {**options, **receipt})
        return await self._decoded(request, body, headers)

    async def _computed(
        self, path: str, body: Json, options: Json, headers: Mapping[str, str]
    ) -> Json:
        """Have a prefill engine compute the prompt.  Returns its receipt, as an option; nothing if
        it has none or could not: then the decode engine computes what it does not find, and says
        what is wrong."""
        wanted = {name: value for name, value in body.items() if name not in NOT_FOR_PREFILL}
        wanted |= ONE_TOKEN
        if "max_completion_tokens" in body:
            wanted["max_completion_tokens"] = 1
        wanted = with_options(wanted, {**options, "report": True})
        for engine in self.prefill.in_turn():
            try:
                with engine.busy():
                    sent = self._session.post(
                        engine.url + path, json=wanted, headers=headers,
                        timeout=self._prefill_timeout,
                    )  # fmt: skip
                    async with sent as answered:
                        return receipt_in(await answered.json())
            except (ClientError, TimeoutError, ValueError) as exc:
                self.prefill.failed(engine, exc)
                if isinstance(exc, TimeoutError):
                    break  # the next one would take as long
        return {}

    async def _decoded(
        self, request: web.Request, body: Json, headers: Mapping[str, str]
    ) -> web.StreamResponse:
        """Have a decode engine answer; the next one if one cannot be reached."""
        for engine in self.decode.in_turn() or self.decode.all:
            with engine.busy():
                try:
                    answered = await self._session.post(
                        engine.url + request.path, json=body, headers=headers
                    )
                except (ClientError, TimeoutError) as exc:
                    self.decode.failed(engine, exc)
                    continue
                async with answered:
                    return await self._pass_through(request, engine, answered)
        return failure(503, "no decode engine can be reached")

    async def _pass_through(
        self, request: web.Request, engine: Engine, answered: ClientResponse
    ) -> web.StreamResponse:
        response = web.StreamResponse(status=answered.status)
        for name in ("Content-Type", "Content-Length", "X-Request-Id"):
            if name in answered.headers:
                response.headers[name] = answered.headers[name]
        with suppress(ConnectionError):  # the client has gone, which no engine is blamed for
            await response.prepare(request)
            try:
                while chunk := await self._next_chunk(engine, answered):
                    await response.write(chunk)
            except EngineEnded as exc:  # the client must not take the rest for the end
                if response.content_type == "text/event-stream":
                    said = json.dumps(error_body(502, f"the decode engine has ended: {exc}"))
                    await response.write(f"data: {said}\n\n".encode())
                if request.transport is not None:
                    request.transport.close()
        return response

    async def _next_chunk(self, engine: Engine, answered: ClientResponse) -> bytes:
        """What an engine says next, empty at its end.  Raises EngineEnded if it dies before."""
        try:
            chunk: bytes = await answered.content.readany()
        except ClientError as exc:
            self.decode.failed(engine, exc)
            raise EngineEnded(exc) from exc
        return chunk

    async def models(self, request: web.Request) -> web.StreamResponse:
        return await self._ask_decoders(request, "/v1/models")

    async def health(self, request: web.Request) -> web.StreamResponse:
        """Well if a decode engine is: prefill engines may be missing."""
        return await self._ask_decoders(request, "/health")

    async def _ask_decoders(self, request: web.Request, path: str) -> web.StreamResponse:
        for engine in self.decode.all:
            try:
                async with self._session.get(engine.url + path, timeout=ClientTimeout(10)) as got:
                    if got.ok:
                        return web.Response(body=await got.read(), content_type=got.content_type)
            except (ClientError, TimeoutError) as exc:
                self.decode.failed(engine, exc)
        return failure(503, "no decode engine can be reached")


def options_of(body: Json) -> Json | None:
    """What the client itself asks of kvshm.  None if the prompt is not to be shared, or nobody
    knows: then it is computed where it is decoded."""
    if (params := body.get("kv_transfer_params")) is None:
        params = {}
    options = params.get("kvshm", {}) if isinstance(params, dict) else None
    if not isinstance(options, dict) or options.get("share", True) is not True:
        return None
    return {name: value for name, value in options.items() if name != "after"}


def with_options(body: Json, options: Json) -> Json:
    """The request with these options of kvshm beside what others are asked."""
    return {
        **body,
        "kv_transfer_params": {**(body.get("kv_transfer_params") or {}), "kvshm": options},
    }


def receipt_in(answer: Any) -> Json:
    """The receipt in an engine's answer, as an option of the next engine's request.  Errors have
    none, and null stands there for an engine without kvshm."""
    try:
        return {"after": answer["kv_transfer_params"]["kvshm"]["after"]}
    except (KeyError, TypeError):
        return {}


def error_body(status: int, message: str) -> Json:
    """An error as OpenAI's clients and vLLM have it."""
    return {"error": {"message": message, "type": "proxy_error", "param": None, "code": status}}


def failure(status: int, message: str) -> web.Response:
    return web.json_response(error_body(status, message), status=status)


def application(proxy: Proxy) -> web.Application:
    app = web.Application(client_max_size=MOST_BYTES)
    app.cleanup_ctx.append(proxy.session)
    app.add_routes([web.post(path, proxy.answer) for path in PATHS])
    app.add_routes([web.get("/v1/models", proxy.models), web.get("/health", proxy.health)])
    return app


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--prefill", nargs="+", required=True, metavar="URL")
    parser.add_argument("--decode", nargs="+", required=True, metavar="URL")
    parser.add_argument(
        "--prefill-timeout", type=float, default=60.0, metavar="SECONDS",
        help="then the decode engine computes the prompt",
    )  # fmt: skip
    args = parser.parse_args()
    logging.basicConfig(format="%(asctime)s %(name)s: %(message)s", level=logging.INFO)
    proxy = Proxy(Engines(args.prefill), Engines(args.decode), args.prefill_timeout)
    # handler_cancellation: else a request whose client has gone would go on.
    web.run_app(
        application(proxy), host=args.host, port=args.port, handler_cancellation=True,
        access_log=None, print=None,
    )  # fmt: skip


if __name__ == "__main__":
    main()
