"""``kvshm serve`` as tests start and ask it."""

from __future__ import annotations

import http.client
import json
import re
import socket
from collections.abc import Generator
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

from .processes import PATIENCE_SECONDS, Managed, Node

SERVE = ("-P", "-m", "kvshm.tools.cli", "serve")


class Answer(NamedTuple):
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


class Console:
    """Started on a port that the kernel chooses, or where ``options`` say."""

    def __init__(self, node: Node, *options: str) -> None:
        listen = () if "--listen" in options else ("--listen", "0")
        where = ("--run-dir", str(node.run_dir), "--namespace", node.namespace)
        self.process: Managed = node.processes.python("serve", *SERVE, *listen, *options, *where)
        said = self.process.wait_err("serving ").partition("serving ")[2]
        self.path = Path(said.removeprefix("unix:")) if said.startswith("unix:") else None
        self.url = said
        self.port = int(found[1]) if (found := re.search(r":(\d+)$", said)) else 0

    def connect(self) -> http.client.HTTPConnection:
        host, port = ("localhost", 0) if self.path else ("127.0.0.1", self.port)
        connection = http.client.HTTPConnection(host, port, timeout=PATIENCE_SECONDS)
        if self.path is not None:
            connection.sock = socket.socket(socket.AF_UNIX)
            connection.sock.connect(str(self.path))
        return connection

    def ask(
        self, path: str, body: bytes | None = None, method: str | None = None, **headers: str
    ) -> Answer:
        with closing(self.connect()) as connection:
            named = {name.replace("_", "-"): value for name, value in headers.items()}
            connection.request(method or ("GET" if body is None else "POST"), path, body, named)
            reply = connection.getresponse()
            found = {name.lower(): value for name, value in reply.getheaders()}
            return Answer(reply.status, found, reply.read())

    def events(self, **headers: str) -> Generator[tuple[str, Any]]:
        """Yield the events of a page: their name and what they say."""
        with closing(self.connect()) as connection:
            connection.request("GET", "/events", headers=headers)
            reply = connection.getresponse()
            assert reply.getheader("content-type", "").startswith("text/event-stream")
            name = ""
            while line := reply.readline():
                field, _, value = line.decode().rstrip("\n").partition(": ")
                if field == "event":
                    name = value
                elif field == "data":
                    yield name, json.loads(value)
