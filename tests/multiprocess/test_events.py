"""``kvshm events`` beside engines that a test plays: what they must not do to it, and keepers.

tests/vllm/test_event_stream.py has vLLM's own publishers in their place."""

from __future__ import annotations

import itertools
import json
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import zmq

from ..unit.kv_events import payload, removed, stored
from .event_streams import EventsProcess, Router
from .joined import Toys, served
from .keepers import Keeper
from .processes import Node, wait_until

pytestmark = pytest.mark.multiprocess

_names = itertools.count()


class Engine:
    """Publishes what the test wants, with no replay socket."""

    def __init__(self, node: Node) -> None:
        self.endpoint = f"ipc://{node.run_dir}/engine{next(_names)}"
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.XPUB)
        self._socket.set_hwm(0)
        self._socket.setsockopt(zmq.XPUB_VERBOSE, 1)
        self._socket.bind(self.endpoint)
        self._number = 0

    def wait(self) -> None:
        """Until a subscriber is there: one more than before, whoever has gone."""
        said = b""
        while said != b"\1":
            assert self._socket.poll(100_000)
            said = self._socket.recv()

    def publish(self, *events: dict, rank: int = 0) -> None:
        self.send(b"", self._number.to_bytes(8, "big"), payload(*events, rank=rank))
        self._number += 1

    def send(self, *frames: bytes) -> None:
        self._socket.send_multipart(frames)

    def close(self) -> None:
        self._context.destroy(0)


@pytest.fixture
def engines(node: Node) -> Iterator[tuple[Engine, Engine]]:
    made = Engine(node), Engine(node)
    yield made
    for one in made:
        one.close()


def listening(node: Node, engines: tuple[Engine, ...], *options: str) -> EventsProcess:
    events = EventsProcess(node, *(e.endpoint for e in engines), *options)
    for engine in engines:
        engine.wait()
    return events


def test_what_is_not_understood_is_complained_about_and_costs_its_engines_blocks_alone(
    node: Node, engines: tuple[Engine, Engine]
) -> None:
    sound, odd = engines
    events = listening(node, engines, "--topic", "kv@node@m")
    with Router.of(events) as router:
        for number, bad in enumerate((b"\xc1", b"\x90", payload() + b"\0", b"\x93\1\2\3")):
            sound.publish(stored(number + 100))
            odd._number = 0
            odd.publish(stored(7))
            odd.send(b"", b"\0" * 7 + b"\1", bad)
            odd.send(b"", b"\0" * 8)
            router.wait_for(*range(100, 101 + number))
        assert router.topics == {"kv@node@m"}
    assert events.process.terminate() == 0
    (line,) = events.process.err.matching(lambda s: "not understood: " in s and "times" in s)
    assert odd.endpoint in line
    assert line.endswith(": 8 times")


def test_an_engine_without_a_replay_socket_whose_connection_ends_has_nothing_any_more(
    node: Node, engines: tuple[Engine, Engine]
) -> None:
    one, two = engines
    with Router.of(listening(node, engines)) as router:
        one.publish(stored(1, 2))
        two.publish(stored(2, 3))
        router.wait_for(1, 2, 3)
        two.close()
        router.wait_for(1, 2)


def test_who_heard_a_stream_before_it_was_started_anew_believes_nothing_of_its_ranks(
    node: Node, engines: tuple[Engine, Engine]
) -> None:
    one, two = engines
    events = listening(node, engines, "--ranks")
    with Router.of(events) as router:
        one.publish(stored(1))
        two.publish(stored(2), rank=7)
        router.wait_for(1, 2)
        events.process.signal(signal.SIGKILL)
        events.process.wait()
        events.start()
        for engine in engines:
            engine.wait()
        one.publish(stored(3))
        two.publish(stored(4), rank=7)
        router.wait_for(3, 4)


def test_a_subscriber_that_does_not_read_holds_up_nobody_and_catches_up(
    node: Node, engines: tuple[Engine, Engine]
) -> None:
    one, _ = engines
    events = listening(node, engines)
    count = 25_000
    with Router.of(events) as sleeper, Router.of(events) as router:
        for number in range(count):
            one.publish(removed(number - 1), stored(number))
        router.wait_for(count - 1)
        sleeper.wait_for(count - 1)


def test_a_block_that_only_a_keeper_has_is_there_until_the_keeper_lets_it_go(
    engines: tuple[Engine, Engine], node: Node, request: pytest.FixtureRequest
) -> None:
    with served() as place:
        toys = Toys(place, request.node.nodeid)
        keeper = Keeper(place, 6)
        toy = toys.join("a")
        first = toy.prompt(salt=b"1")
        toy.compute(first, range(6))
        keeper.wait_for(first)
        where = ("--keepers", "--run-dir", str(place.run_dir), "--namespace", place.namespace)
        events = listening(node, engines, *where)
        one, two = engines
        with Router.of(events) as router:
            one.publish(stored(*first, 1))
            router.wait_for(*first, 1)
            two.publish(stored(2))  # keepers are looked at each second
            wait_until(lambda: removes_all_but_kept(one, router, first), "it knows the keeper")
            keeper.process.kill()
            router.wait_for(2)
        toys.close()


def removes_all_but_kept(engine: Engine, router: Router, kept: list[bytes]) -> bool:
    """Whether blocks that an engine removes stay there."""
    engine.publish(removed(*kept, 1))
    router.wait_until(lambda: 1 not in router.hashes)
    if router.hashes == {*kept, 2}:
        return True
    engine.publish(stored(*kept, 1))
    router.wait_until(lambda: 1 in router.hashes)
    return False


# -- API servers


@contextmanager
def api_server(answers: dict[str, object]) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            found = answers.get(self.path)
            self.send_response(404 if found is None else 200)
            self.end_headers()
            self.wfile.write(json.dumps(found).encode())

        def log_message(self, *_: object) -> None:
            pass

    with served_by(Handler) as url:
        yield url


@contextmanager
def served_by(handler: type[BaseHTTPRequestHandler]) -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


class Answers(dict[str, object]):
    """Of an API server, which tells how often it was asked."""

    times = 0

    def get(self, path: str, default: object = None) -> object:
        self.times += path == "/kv_event_sources"
        return super().get(path, default)

    def wait(self) -> None:
        """Until what is said now has been heard."""
        before = self.times
        wait_until(lambda: self.times >= before + 2, "the server is asked again")


def says(engine: Engine, model: str = "/a") -> dict[str, object]:
    config = {"endpoint": engine.endpoint, "replay_endpoint": None, "topic": ""}
    adapter, base = {"root": "/l", "parent": "m"}, {"root": model, "parent": None}
    return {"/kv_event_sources": {"0": config}, "/v1/models": {"data": [adapter, base]}}


def test_engines_are_found_through_their_api_servers_and_another_model_is_left_out(
    node: Node, engines: tuple[Engine, Engine]
) -> None:
    one, other = engines
    answers = says(one, "/a")
    found = answers.pop("/kv_event_sources")
    with api_server(answers) as first, api_server(says(other, "/b")) as second:
        events = EventsProcess(node, first)
        events.process.wait_err(f"{first}: it cannot be reached: HTTP 404")
        answers["/kv_event_sources"] = found
        one.wait()
        one.publish(stored(1))
        with Router.of(events) as router:
            router.wait_for(1)
        both = EventsProcess(node, first, second)
        both.process.wait_err(r"it is left out, for it serves another model: /[ab], and the others")


def test_an_engine_that_had_said_nothing_is_found_again_elsewhere(
    node: Node, engines: tuple[Engine, Engine]
) -> None:
    one, two = engines
    answers = Answers(says(one))
    with api_server(answers) as url, Router.of(EventsProcess(node, url)) as router:
        one.wait()
        answers.clear()
        one.close()
        answers.wait()
        answers.update(says(two))
        two.wait()
        two.publish(stored(1))
        router.wait_for(1)


def test_a_server_that_outlives_its_engine_is_asked_until_it_names_what_is_there(
    node: Node, engines: tuple[Engine, Engine]
) -> None:
    one, two = engines
    answers = Answers(says(one))
    with api_server(answers) as url:
        events = EventsProcess(node, url)
        with Router.of(events) as router:
            one.wait()
            one.publish(stored(1))
            router.wait_for(1)
            one.close()
            router.wait_for()
            answers.wait()
            answers.update(says(two))
            two.wait()
            two.publish(stored(2))
            router.wait_for(2)
        events.process.wait_err(f"{one.endpoint}: its API server does not name it any more")


def test_engines_that_all_move_to_another_model_are_heard_again(
    node: Node, engines: tuple[Engine, Engine]
) -> None:
    (one, two), later = engines, (Engine(node), Engine(node))
    first, second = says(one), says(two)
    with api_server(first) as url, api_server(second) as other:
        events = EventsProcess(node, url, other)
        with Router.of(events) as router:
            one.wait()
            two.wait()
            two.publish(stored(1))
            router.wait_for(1)
            one.close()
            first.update(says(later[0], "/b"))
            events.process.wait_err(f"{url}: it is left out, .*: /b, and the others serve /a")
            two.close()
            second.update(says(later[1], "/b"))
            for number, engine in enumerate(later):
                engine.wait()
                engine.publish(stored(number + 2))
            router.wait_for(2, 3)
    for engine in later:
        engine.close()


class Drips(BaseHTTPRequestHandler):
    """A byte now and then, for ever."""

    def handle(self) -> None:
        with suppress(OSError):  # who has asked has gone
            self.wfile.write(b"HTTP/1.0 200 OK\r\n\r\n")
            while True:
                self.wfile.write(b" ")
                threading.Event().wait(0.1)


class NoHTTP(BaseHTTPRequestHandler):
    def handle(self) -> None:
        self.wfile.write(b"\xff\0\0\0\0\0\0\0\1\x7f")


@pytest.mark.parametrize(
    ("handler", "line"),
    [(Drips, "TimeoutError: no whole answer in 2 s"), (NoHTTP, "BadStatusLine")],
)
def test_a_server_that_gives_no_answer_is_named_and_holds_up_no_end(
    node: Node, handler: type[BaseHTTPRequestHandler], line: str
) -> None:
    with served_by(handler) as url:
        events = EventsProcess(node, url)
        events.process.wait_err(f"{url}: it cannot be reached: {line}")
        assert events.process.terminate() == 0


# -- the command line


@pytest.mark.parametrize(
    ("arguments", "wrong"),
    [
        (("nowhere",), "'nowhere' is no source"),
        (("ipc:///tmp/x,nowhere",), "is no source"),
        (("ipc:///tmp/x", "ipc:///tmp/x"), "is given twice"),
        (("tcp://127.0.0.1:port",), "cannot be connected to"),
    ],
)
def test_what_cannot_be_listened_to_is_named(
    node: Node, arguments: tuple[str, ...], wrong: str
) -> None:
    bind = ("--bind", f"ipc://{node.run_dir}/a", "--replay", f"ipc://{node.run_dir}/b")
    process = node.processes.python(
        "events", "-P", "-m", "kvshm.tools.cli", "events", *arguments, *bind
    )
    assert process.wait() == 2
    process.wait_err(wrong)


def test_an_address_that_is_taken_ends_it_and_one_that_others_reach_is_warned_of(
    node: Node, engines: tuple[Engine, Engine]
) -> None:
    command = ("-P", "-m", "kvshm.tools.cli", "events", engines[0].endpoint)
    with socket.create_server(("0.0.0.0", 0)) as taken:
        endpoint = f"tcp://0.0.0.0:{taken.getsockname()[1]}"
        process = node.processes.python("events", *command, "--bind", endpoint)
        assert process.wait() == 1
    process.wait_err(f"{endpoint} may be reached from other machines, by anyone: the events hold")
    process.wait_err(f"cannot listen on '{endpoint}': Address already in use")
