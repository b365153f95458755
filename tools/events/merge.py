"""Makes one stream of the events of many engines."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Iterator, Sequence
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
        """Whether it has to be asked: not all that it names were connected since its answer."""
        self.model = ""
        self.names: tuple[Endpoints, ...] = ()
        """As it answered last; none if it was left out."""
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
        self._given: set[Endpoints] = set()
        """They stay, whatever API servers say."""
        self._begun: set[int] = set()
        """Ranks of which the stream has said something."""
        self._begin(0)

    def add(self, endpoints: Endpoints) -> None:
        """Listen to an engine.  Raises ConfigError if ZeroMQ does not take the endpoints."""
        self._add(endpoints)
        self._given.add(endpoints)

    def _add(self, endpoints: Endpoints) -> None:
        number = next(n for n in itertools.count() if n not in self._sources)
        self._sources[number] = Source(self._context, endpoints)

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
            if action.why is Trouble.GONE and source.endpoints not in self._given:
                self._sources.pop(number).close()
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

    def ask(self, servers: Sequence[Server], executor: ThreadPoolExecutor, now: float) -> None:
        """Ask each server of which not all engines are connected, and listen where it says.

        To be called before each ``turn``: so it sees each connection that ends, however soon there
        is another."""
        connected = {s.endpoints for s in self._sources.values() if s.follower.connected}
        for server in servers:
            server.incomplete |= not connected.issuperset(server.names)
            try:
                engine = server.look(executor, now)
            except NoSources as exc:
                self._complaints.note(server.url, Trouble.UNREACHABLE, now, str(exc))
                server.names = tuple(each for each in server.names if each in connected)
                self._drop_unnamed(servers, Trouble.UNREACHABLE, now)
                continue
            if engine is not None:
                self._found(server, engine, servers, now)

    def _found(self, server: Server, engine: Engine, servers: Sequence[Server], now: float) -> None:
        models = {each.model for each in servers if each is not server and each.names} - {""}
        is_alike = not (engine.model and models) or engine.model in models
        server.incomplete, server.model = not is_alike, engine.model
        server.names = engine.sources if is_alike else ()
        self._drop_unnamed(servers, Trouble.UNNAMED, now)
        if not is_alike:
            text = f"{engine.model}, and the others serve {models.pop()}"
            self._complaints.note(server.url, Trouble.OTHER_MODEL, now, text)
        known = {source.endpoints for source in self._sources.values()}
        for endpoints in server.names:
            if endpoints not in known:
                try:
                    self._add(endpoints)
                except ConfigError as exc:
                    self._complaints.note(server.url, Trouble.UNREACHABLE, now, str(exc))

    def _drop_unnamed(self, servers: Iterable[Server], why: Trouble, now: float) -> None:
        wanted = self._given.union(*(server.names for server in servers))
        for number, source in list(self._sources.items()):
            if source.endpoints not in wanted:
                self._forget(number, source, why, now)
                self._sources.pop(number).close()
