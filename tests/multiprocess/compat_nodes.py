"""A coordinator, an engine in this process and others in their own, for tests of kvshm.compat."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kvshm.config import Config

from .compat_engine import CallsEngine
from .processes import PATIENCE_SECONDS, Managed, Node, wait_until

PROGRAM = str(Path(__file__).with_name("compat_engine.py"))


class Other:
    def __init__(self, node: Node, *arguments: str) -> None:
        environ = {
            "KVSHM_RUN_DIR": str(node.run_dir),
            "KVSHM_NAMESPACE": node.namespace,
            "KVSHM_VERIFY": "1",
        }
        self.process: Managed = node.processes.start("calls", PROGRAM, *arguments, environ=environ)
        self._answer(0)

    def _answer(self, since: int) -> Any:
        return json.loads(self.process.wait_out(lambda line: True, since))

    def do(self, *what: Any) -> Any:
        self.begin(*what)
        return self.end()

    def begin(self, *what: Any) -> None:
        self._since = len(self.process.out)
        self.process.say(json.dumps(what))

    def end(self) -> Any:
        return self._answer(self._since)


class Calls:
    def __init__(self, node: Node) -> None:
        self.node = node
        self.own = self.engine()

    def config(self, namespace: str | None = None) -> Config:
        return Config(
            run_dir=str(self.node.run_dir),
            namespace=namespace or self.node.namespace,
            verify=True,
        )

    def engine(self, *arguments: Any) -> CallsEngine:
        return CallsEngine(self.config(), *arguments)

    def other(self, *arguments: str) -> Other:
        """Start an engine in a process of its own, and wait until this one can use it."""
        before = self.own.node.stats()["peers"]
        other = Other(self.node, *arguments)
        if not arguments:
            wait_until(lambda: self.own.node.stats()["peers"] > before, "a peer")
        return other

    def wait_found(self, tokens: list[int], num_tokens: int | None = None) -> None:
        keys = self.own.node.keys(tokens)
        num_tokens = len(tokens) if num_tokens is None else num_tokens
        wanted = num_tokens // self.own.node.block_size
        assert self.own.node.wait_for(keys[:wanted], PATIENCE_SECONDS).length == wanted


@contextmanager
def calls_on(node: Node) -> Iterator[Calls]:
    node.coordinator()
    calls = Calls(node)
    try:
        assert calls.own.node.wait_joined(PATIENCE_SECONDS)
        yield calls
        assert calls.own.wrong_blocks() == []
    finally:
        calls.own.close()
