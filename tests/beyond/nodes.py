"""Nodes that share one store: each a machine of its own, with vLLM engines.

A *way* says how a node is connected to the store: which programs run on the node beside its
engines, and what the engines are told.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from completions import Result
from local_node import Engine, EngineSpec, PromptTokens
from sharing_node import BLOCK_SIZE

from ..vllm.engines import SharedNode
from .networks import Network, Traffic
from .services import Service, running
from .store import Store

BLOCK_BYTES = BLOCK_SIZE * 2048
"""Of the tiny model: 4 layers, keys and values, 2 heads of 64 numbers of 2 bytes."""

LONGEST = 4096
"""Tokens of a prompt with its answer."""


@dataclass(frozen=True)
class Attachment:
    """What connects one node to the store."""

    services: Mapping[str, Service] = field(default_factory=dict)
    """Run on the node before its engines start, in this order."""
    transfer: Mapping[str, Any] | None = None
    """The engines' ``--kv-transfer-config``."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Of the engines."""


Way = Callable[["Machine", Store], Attachment]


class Asked(NamedTuple):
    """What an engine answered, and where the prompt's tokens came from."""

    answer: Result
    tokens: PromptTokens


class Machine(SharedNode):
    """A node of kvshm with a network of its own.  Questions to its engines are asked there, over
    the loopback interface, so they do not cross the wire."""

    def __init__(self, name: str, address: str, store: Store, way: Way) -> None:
        super().__init__({"VLLM_HOST_IP": address, "GLOO_SOCKET_IFNAME": "lo"})
        self.name = name
        self.network = Network(address)
        self.network.plug_into(store.network, name)
        self.attached = way(self, store)

    @contextmanager
    def running(self, model: Path, engines: int, num_blocks: int) -> Iterator[None]:
        """Start the coordinator, what the way adds, and engines, each on a core of its own."""
        with self, running(*self.attached.services.values()):
            self.start_coordinator()
            self.start_engines(*(self.spec(i, model, num_blocks) for i in range(engines)))
            yield

    def spec(self, number: int, model: Path, num_blocks: int) -> EngineSpec:
        arguments = EngineSpec.longest_prompt(LONGEST)
        if self.attached.transfer is not None:
            arguments += ("--kv-transfer-config", json.dumps(self.attached.transfer))
        name, environment = f"{self.name}-{number}", self.attached.environment
        return EngineSpec(name, model, number, num_blocks, arguments, environment)

    def start_engines(self, *specs: EngineSpec) -> list[Engine]:
        with self.network.entered():
            return super().start_engines(*specs)

    def ask(self, engine: Engine, prompt: Sequence[int], **options: Any) -> Asked:
        with self.network.entered():
            before = engine.prompt_tokens()
            answer = engine.complete(prompt, **options)
            return Asked(answer, engine.prompt_tokens() - before)

    def forget(self, *engines: Engine) -> None:
        """Empty the engines' own caches; what they are connected to keeps what it has."""
        with self.network.entered():
            for engine in engines:
                engine.request("/reset_prefix_cache", post=True)
                engine.complete([0], max_tokens=1)  # the ranks hear of it with a step

    def close(self) -> None:
        super().close()
        self.network.close()


@dataclass
class Nodes:
    """Machines on one wire, and the store between them."""

    store: Store
    machines: list[Machine]

    @contextmanager
    def crossing(self) -> Iterator[list[Traffic]]:
        """What crosses each machine's wire in the ``with``; filled in on leaving it."""
        before = [machine.network.traffic() for machine in self.machines]
        crossed: list[Traffic] = []
        yield crossed
        pairs = zip(self.machines, before, strict=True)
        crossed += [machine.network.traffic() - then for machine, then in pairs]


@contextmanager
def nodes(
    way: Way, model: Path, folder: Path, *, engines: Sequence[int] = (2, 2), num_blocks: int = 64
) -> Iterator[Nodes]:
    """Start a store and nodes that are connected to it by a way, each with so many ``engines``; one
    node after the other, because engines that start need a core each."""
    switch = Network("10.211.0.254")
    switch.become_switch()
    store = Store(switch, folder)
    with ExitStack() as stack:
        stack.callback(switch.close)
        stack.enter_context(running(store.master, store.memory))
        machines = []
        for number, count in enumerate(engines, start=1):
            machines.append(Machine(f"node{number}", f"10.211.0.{number}", store, way))
            stack.enter_context(machines[-1].running(model, count, num_blocks))
        yield Nodes(store, machines)
