"""Makes one stream of the events of many engines."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import zmq

from kvshm.errors import ConfigError

from . import wire
from .complaints import Complaints
from .copies import NodeCopies, Said
from .engines import Engine, NoSources, ask
from .follower import Action, Apply, Complain, Forget, Trouble
from .sources import Endpoints, Source
from .stream import Stream
from .wire import BadBatch, Batch

ASK_SECONDS = 2.0
"""Between two questions to an API server whose engine's sockets are not known."""


class Server:
    """An API server, which says where its engine's events are."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.incomplete = True
        """Whether it has to be asked: it never was, or one of its engines has gone since."""
        self._answer: Future[Engine] | None = None
        self._asked_at: float | None = None

    def look(self, executor: ThreadPoolExecutor, now: float) -> Engine | None:
        """Return its answer, once.  Raises NoSources."""
        if self._answer is not None and self._answer.done():
            answer, self._answer = self._answer, None
            return answer.result()
        due = self._asked_at is None or now - self._asked_at >= ASK_SECONDS
        if self.incomplete and self._answer is None and due:
            self._asked_at = now
            self._answer = executor.submit(ask, self.url)
        return None


class Merge:
    """One thread.  Nothing blocks."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        stream: Stream,
        copies: NodeCopies,
        complaints: Complaints,
    ) -> None:
        self._context, self._stream = context, stream
        self._copies, self._complaints = copies, complaints
        self._sources: dict[int, Source] = {}
        """By the numbers that ``copies`` knows them by."""
        self._found_by: dict[int, Server] = {}
        self._model = ""
        self._begun: set[int] = set()
        """Ranks of which the stream has said something."""
        self._begin(0)

    def add(self, endpoints: Endpoints, found_by: Server | None = None) -> None:
        """Listen to an engine.  Raises ConfigError if ZeroMQ does not take the endpoints."""
        number = next(n for n in itertools.count() if n not in self._sources)
        self._sources[number] = Source(self._context, endpoints)
        if found_by is not None:
            self._found_by[number] = found_by

    def close(self) -> None:
        for source in self._sources.values():
            source.close()

    def waits_for(self) -> Iterator[zmq.Socket[bytes]]:
        yield self._stream.replay
        for source in self._sources.values():
            yield from source.waits_for()

    def turn(self, now: float) -> None:
        """Take in what has arrived, and let subscribers know."""
        self._stream.answer()
        for number, source in list(self._sources.items()):
            for action in source.hear(now):
                self._do(number, source, action, now)

    def _do(self, number: int, source: Source, action: Action, now: float) -> None:
        if isinstance(action, Apply):
            self._apply(number, source, action.payload, now)
        elif isinstance(action, Forget):
            self._forget(number, source, action.why, now)
            server = self._found_by.get(number)
            if action.why is Trouble.GONE and server is not None:  # its address may be another
                self._drop(number)
                server.incomplete = True
        elif isinstance(action, Complain):
            self._complaints.note(source.name, action.what, now)

    def _apply(self, number: int, source: Source, payload: bytes, now: float) -> None:
        try:
            batch = wire.decode_batch(payload)
        except BadBatch as exc:  # perhaps it removed blocks
            self._forget(number, source, Trouble.BAD, now, str(exc))
            return
        said = self._copies.apply(number, batch)
        self._publish(batch.at, said, batch.rest)

    def _forget(
        self, number: int, source: Source, why: Trouble, now: float, more: str = ""
    ) -> None:
        count = self._copies.count(number)
        self._complaints.note(source.name, why, now, more or f"it had {count} blocks")
        self._publish_all(self._copies.forget(number))

    def _drop(self, number: int) -> None:
        self._sources.pop(number).close()
        self._found_by.pop(number, None)

    def keep(self, kept: frozenset[tuple[int, int]]) -> None:
        """Keepers have these blocks now."""
        self._publish_all(self._copies.keep(kept))

    def _publish_all(self, said: Iterable[Said]) -> None:
        for each in said:
            self._publish(time.time(), each)

    def _publish(self, at: float, said: Said, rest: tuple[object, ...] = ()) -> None:
        if said.events:
            self._begin(said.rank)
            self._stream.publish(wire.encode_batch(Batch(at, said.events, said.rank, rest)))

    def _begin(self, rank: int) -> None:
        """Take back what a process before this has said of the rank."""
        if rank not in self._begun:
            self._begun.add(rank)
            self._publish(time.time(), Said(rank, [{"type": wire.CLEARED}]))

    # -- engines that API servers name

    def ask(self, servers: Iterable[Server], executor: ThreadPoolExecutor, now: float) -> None:
        for server in servers:
            try:
                engine = server.look(executor, now)
            except NoSources as exc:
                self._complaints.note(server.url, Trouble.UNREACHABLE, now, str(exc))
                continue
            if engine is not None:
                self._found(server, engine, now)

    def _found(self, server: Server, engine: Engine, now: float) -> None:
        self._model = self._model or engine.model
        if engine.model not in ("", self._model):
            text = f"{engine.model}, and the others serve {self._model}"
            self._complaints.note(server.url, Trouble.OTHER_MODEL, now, text)
            return
        server.incomplete = False
        known = {source.endpoints for source in self._sources.values()}
        for endpoints in engine.sources:
            if endpoints not in known:
                try:
                    self.add(endpoints, server)
                except ConfigError as exc:
                    self._complaints.note(server.url, Trouble.UNREACHABLE, now, str(exc))
