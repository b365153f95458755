"""``kvshm events``: its command line, and the loop around it."""

from __future__ import annotations

import argparse
import os
import socket
import time
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from urllib.parse import urlsplit

import zmq

from kvshm._base.resources import require_descriptors
from kvshm.api import Reader
from kvshm.config import Config
from kvshm.errors import ConfigError

from ..options import add_place, number
from ..output import say
from ..signals import ending_signals
from .complaints import Complaints
from .copies import KeptBlock, NodeCopies
from .history import MAX_BATCHES, History
from .keepers import LOOK_SECONDS, Keepers
from .merge import Merge, Server
from .sources import Endpoints
from .stream import Stream

HELP = "the KV events of a node's engines as one stream, for a router"
BIND, REPLAY = "tcp://127.0.0.1:5757", "tcp://127.0.0.1:5758"
OWN_DESCRIPTORS, DESCRIPTORS_OF_A_SOURCE = 32, 16
"""Without them libzmq would end the process."""
TURN_SECONDS = 0.2
"""Between two looks at what makes no socket readable."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Listen to the KV events of engines (vLLM's --kv-events-config), and publish them as those "
        "of one engine, in vLLM's format: a block is stored with its first copy on the node and "
        "removed with its last. A router so knows the node as one cache. Engines notice nothing of "
        "this, and it may be started, stopped or killed at any time. All engines must have the "
        "same weights: block hashes do not tell them apart."
    )
    parser.epilog = (
        "exit status: 0 ended by SIGTERM or SIGINT; 1 it cannot listen there; 2 wrong command line "
        "or setting"
    )
    add = parser.add_argument
    add(
        "sources",
        nargs="+",
        metavar="SOURCE",
        help="an engine's endpoint and its replay endpoint (ipc:///run/a,ipc:///run/a-replay), or "
        "the URL of its API server (http://127.0.0.1:8001), which names both for each rank",
    )
    add("--bind", default=BIND, metavar="ENDPOINT", help=f"where to publish ({BIND})")
    add("--replay", default=REPLAY, metavar="ENDPOINT", help=f"where to replay ({REPLAY})")
    add("--topic", default="", help="before each message, as routers want it (default: none)")
    add(
        "--history",
        type=number(int, lambda n: 0 < n <= MAX_BATCHES, f"from 1 to {MAX_BATCHES}"),
        default=MAX_BATCHES,
        metavar="N",
        help=f"how many batches to replay one by one; earlier ones as one batch ({MAX_BATCHES})",
    )
    add(
        "--ranks",
        action="store_true",
        help="keep data-parallel ranks apart and count for each (default: all are rank 0)",
    )
    add(
        "--keepers",
        action="store_true",
        help="a block that an engine has stored is not removed while a keeper of the namespace has "
        "it",
    )
    add_place(parser, "of which keepers (default: $KVSHM_NAMESPACE)")


def run(asked: argparse.Namespace) -> int:
    servers, endpoints = _parsed(asked.sources)
    for endpoint in (asked.bind, asked.replay):
        _warn(endpoint)
    with ExitStack() as stack:
        ended = stack.enter_context(ending_signals())
        require_descriptors(OWN_DESCRIPTORS + DESCRIPTORS_OF_A_SOURCE * len(asked.sources))
        context = zmq.Context[zmq.Socket[bytes]]()
        stack.callback(context.destroy, 0)
        # Routers take a number below their last for an old batch.  One above it, also after a
        # restart, is a gap: they ask for a replay.
        history = History(asked.history, first=time.time_ns() // 1000)
        stream = Stream(context, asked.bind, asked.replay, asked.topic, history)
        stack.enter_context(closing(stream))
        complaints = Complaints(_say)
        merge = Merge(context, stream, NodeCopies(asked.ranks), complaints)
        stack.enter_context(closing(merge))
        for each in endpoints:
            merge.add(each)
        keepers = _keepers(asked, stack) if asked.keepers else None
        executor = ThreadPoolExecutor(1 + len(servers))
        stack.callback(executor.shutdown, cancel_futures=True)
        _say(f"publishing at {asked.bind}, replaying at {asked.replay}")
        _serve(merge, servers, _Looks(keepers, executor), ended)
        for line in complaints.lines():
            _say(line)
    return 0


def _serve(merge: Merge, servers: list[Server], looks: _Looks, ended: socket.socket) -> None:
    while True:
        poller = zmq.Poller()
        poller.register(ended.fileno(), zmq.POLLIN)
        for each in merge.waits_for():
            poller.register(each, zmq.POLLIN)
        ready = dict(poller.poll(int(1000 * TURN_SECONDS)))
        if ended.fileno() in ready:
            return
        now = time.monotonic()
        merge.ask(servers, looks.executor, now)
        merge.turn(now)
        if (kept := looks.kept(now)) is not None:
            merge.keep(kept)


class _Looks:
    """Has the keepers looked at, on a thread: it may take seconds."""

    def __init__(self, keepers: Keepers | None, executor: ThreadPoolExecutor) -> None:
        self.executor = executor
        self._keepers = keepers
        self._look: Future[frozenset[KeptBlock]] | None = None
        self._next_at = 0.0

    def kept(self, now: float) -> frozenset[KeptBlock] | None:
        """Return what the keepers have, once for each look."""
        if self._look is not None and self._look.done():
            look, self._look = self._look, None
            return look.result()
        if self._keepers is not None and self._look is None and now >= self._next_at:
            self._next_at = now + LOOK_SECONDS
            self._look = self.executor.submit(self._keepers.look)
        return None


def _keepers(asked: argparse.Namespace, stack: ExitStack) -> Keepers:
    options = {"--namespace": asked.namespace, "--run-dir": asked.run_dir}
    return Keepers(stack.enter_context(Reader(Config.of_place(os.environ, options))), _say)


def _parsed(sources: list[str]) -> tuple[list[Server], list[Endpoints]]:
    """Raises ConfigError."""
    if twice := {source for source in sources if sources.count(source) > 1}:
        raise ConfigError(f"{twice.pop()!r} is given twice")
    servers = [Server(s.rstrip("/")) for s in sources if s.startswith(("http://", "https://"))]
    others = [s for s in sources if not s.startswith(("http://", "https://"))]
    return servers, [_endpoints(source) for source in others]


def _endpoints(source: str) -> Endpoints:
    first, comma, second = source.partition(",")
    for endpoint in (first, second) if comma else (first,):
        if not endpoint.startswith(("tcp://", "ipc://")):
            raise ConfigError(
                f"{source!r} is no source: give tcp://HOST:PORT, ipc://PATH, two of them with a "
                "comma between them, or http://HOST:PORT"
            )
    return Endpoints(first, second or None)


def _warn(endpoint: str) -> None:
    """Say what leaves the machine, if anything can."""
    host = ""
    with suppress(ValueError):
        host = urlsplit(endpoint).hostname or ""
    is_here = host == "localhost" or host == "::1" or host.startswith("127.")
    if not (endpoint.startswith("ipc://") or is_here):
        _say(
            f"{endpoint} may be reached from other machines, by anyone: the events hold the tokens "
            "of all prompts and answers, salts and the names of adapters"
        )


def _say(text: str) -> None:
    say("events", text)
