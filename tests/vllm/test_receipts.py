"""Who passes a request on with the receipt of a first engine finds all that this one has computed.

Both schedulers are vLLM's.  What the first one sends reaches the second one when the test says so.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm.v1.request import RequestStatus

from kvshm._base.ids import Epoch
from kvshm._engine.load_plan import LoadReport
from kvshm._node.coordinator_client import CoordinatorClient
from kvshm._node.receipt import Receipt
from kvshm._shm import statistics as c
from kvshm.hooks.vllm.imports.receipts import PATIENCE_SECONDS, PAUSE_SECONDS

from ..unit.served import ServedNode
from .conftest import Lines
from .scheduling import BLOCK_SIZE, DrivenEngine, Make, full, prompt, states, window
from .several_groups import Played

GROUPS: dict[str, list[Any]] = {
    "one group": [full()],
    "a window": [full(), window(40)],
    "larger blocks": [full(2), window(40)],
    "states": [states(), full()],
}
REPORT = {"kv_transfer_params": {"kvshm": {"report": True}}}


class Node:
    """A prefill engine and a decode engine; the events of the former are on their way."""

    def __init__(self, make: Make, **arguments: Any) -> None:
        self.prefill, self.decode = make(**arguments), make(**arguments)
        self.now = 1000.0
        self.events: list[bytes] = []
        self.hurried = 0
        sender = self.cache(self.prefill)
        sender.publisher._send = self.events.append
        sender._client.send_soon = self._hurry
        self.receipts._clock = lambda: self.now
        self.served = ServedNode(Path(os.environ["KVSHM_RUN_DIR"]), os.environ["KVSHM_NAMESPACE"])
        self.served.enlist(self.prefill.table)  # type: ignore[arg-type]  # its descriptors are asked for
        self.epoch = Epoch(self.prefill.table.epoch)
        self.peers.joined(sender.epoch_state.info)

    @staticmethod
    def cache(e: DrivenEngine) -> Any:
        return e.connector._scheduler.cache

    @property
    def peers(self) -> Any:
        return self.cache(self.decode).epoch_state.peers

    @property
    def receipts(self) -> Any:
        return self.decode.connector._scheduler.importer.lookups.receipts

    def _hurry(self) -> None:
        self.hurried += 1

    def computed(self, tokens: list[int], **asked: Any) -> dict[str, Any]:
        """The prefill engine computes a prompt; returns what its answer says of it."""
        e = self.prefill
        e.add("p", tokens, max_tokens=1, **{"extra_args": REPORT, **asked})
        while "p" in e.scheduler.requests:
            e.step()
        outputs = (one for each in e.outputs.values() for one in each.outputs)
        said: dict[str, Any] = next(o.kv_transfer_params for o in outputs if o.request_id == "p")
        return said

    def deliver(self) -> None:
        """The events arrive."""
        self.peers.apply_events([(self.epoch, event) for event in self.events])
        self.events.clear()

    def ask(self, name: str, tokens: list[int], params: Any) -> None:
        self.decode.add(name, tokens, max_tokens=1, extra_args={"kv_transfer_params": params})

    def scheduled(self) -> set[str]:
        """What the next step of the decode engine computes, or loads."""
        sent = self.decode.schedule()
        loads = [*sent.metadata.loads, *sent.metadata.at_once]
        begun = {self.decode.connector._scheduler.importer.running.by_id[o.load_id] for o in loads}
        Played(self.decode).run(sent, *(LoadReport(load.load_id, load.lost) for load in loads))
        return {*sent.output.num_scheduled_tokens, *(import_.request_id for import_ in begun)}

    def finish(self, name: str) -> None:
        for _ in range(20):
            if name not in self.decode.scheduler.requests:
                break
            self.scheduled()
        assert name not in self.decode.scheduler.requests

    def count(self, counter: int) -> int:
        return self.decode.table.counters.read(counter)

    def leave(self) -> None:
        """The prefill engine's process gives its table up."""
        self.prefill.table.retire()


@pytest.fixture
def node(engine: Make, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Node]]:
    monkeypatch.setattr(CoordinatorClient, "is_member", True)
    made: list[Node] = []

    def make(**arguments: Any) -> Node:
        made.append(Node(engine, **arguments))
        return made[-1]

    yield make
    for one in made:
        one.served.close()


@pytest.mark.parametrize("chunk", [256, 32], ids=["one step", "chunks"])
@pytest.mark.parametrize("kind", GROUPS)
def test_it_waits_until_the_events_are_applied_and_imports_all(
    node: Callable[..., Node], kind: str, chunk: int
) -> None:
    n = node(specs=GROUPS[kind], num_blocks=80, max_num_batched_tokens=chunk)
    said = n.computed(tokens := prompt(8))
    n.ask("d", tokens, said)
    for _ in range(20):  # however often vLLM asks
        assert n.scheduled() == set()
    n.deliver()
    assert n.scheduled() == {"d"}
    n.finish("d")
    assert n.count(c.IMPORTED_TOKENS) == 8 * BLOCK_SIZE
    assert n.hurried == 1, "and its events did not wait for later ones"


def test_a_proxy_of_vllms_gets_a_receipt_that_it_passes_on_as_it_is(
    node: Callable[..., Node],
) -> None:
    n, tokens = node(), prompt(4)
    handed_over = {"do_remote_decode": True, "do_remote_prefill": False, "remote_host": None}
    said = n.computed(tokens, extra_args={"kv_transfer_params": handed_over})
    assert said.keys() == {"kvshm"}
    assert said["kvshm"].keys() == {"after"}
    n.ask("d", tokens, said)
    assert n.scheduled() == set()
    n.deliver()
    assert "d" in n.scheduled()


def test_the_last_event_is_the_one_that_counts(node: Callable[..., Node]) -> None:
    """In chunks the prompt is shown by several events, and some blocks come before the last one."""
    n = node(max_num_batched_tokens=32)
    said = n.computed(tokens := prompt(8))
    *early, last = n.events
    assert early
    n.ask("d", tokens, said)
    n.peers.apply_events([(n.epoch, event) for event in early])
    assert n.scheduled() == set()
    n.peers.apply_events([(n.epoch, last)])
    assert n.scheduled() == {"d"}
    n.finish("d")
    assert n.count(c.IMPORTED_TOKENS) == 8 * BLOCK_SIZE


def test_nobody_else_waits_nor_does_it_without_a_receipt(node: Callable[..., Node]) -> None:
    n = node()
    said = n.computed(tokens := prompt(4))
    n.ask("d", tokens, said)
    n.ask("plain", prompt(4, first=500), None)
    n.ask("nixl", prompt(4, first=700), {"do_remote_prefill": True, "remote_block_ids": [1]})
    n.ask("alone", tokens, {"kvshm": {**said["kvshm"], "share": False}})
    assert n.scheduled() == {"plain", "nixl", "alone"}


def test_what_was_shown_long_ago_is_not_waited_for(node: Callable[..., Node]) -> None:
    """The prefill engine has hit its own cache, and has nothing new to send."""
    n = node()
    n.computed(tokens := prompt(4))
    n.deliver()
    said = n.computed(tokens)
    assert not n.events
    n.ask("d", tokens, said)
    assert n.scheduled() == {"d"}
    n.finish("d")
    assert n.count(c.IMPORTED_TOKENS) == 4 * BLOCK_SIZE


def test_blocks_that_are_reused_meanwhile_are_not_waited_for(node: Callable[..., Node]) -> None:
    n = node(num_blocks=12)
    said = n.computed(tokens := prompt(8))
    n.computed(prompt(8, first=700))  # in the same blocks
    n.ask("d", tokens, said)
    assert n.scheduled() == set()
    n.deliver()
    assert n.scheduled() == {"d"}
    n.finish("d")


def test_new_contents_of_blocks_that_were_shown_before_are_waited_for(
    node: Callable[..., Node],
) -> None:
    n = node(num_blocks=12)
    n.computed(prompt(8, first=700))
    n.deliver()
    said = n.computed(tokens := prompt(8))
    n.ask("d", tokens, said)
    assert n.scheduled() == set()
    n.deliver()
    assert n.scheduled() == {"d"}
    n.finish("d")
    assert n.count(c.IMPORTED_TOKENS) == 8 * BLOCK_SIZE


def test_with_drafts_it_waits_for_what_is_not_published_yet(node: Callable[..., Node]) -> None:
    """A drafter writes behind its step's output: the blocks are shown a step later."""
    ngram = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 2}
    n = node(speculative_config=ngram)
    said = n.computed(tokens := prompt(4))
    n.ask("d", tokens, said)
    assert not n.events
    assert n.scheduled() == set()
    n.prefill.step()  # which asks the ranks for a fence
    n.deliver()
    assert n.scheduled() == {"d"}
    n.finish("d")
    assert n.count(c.IMPORTED_TOKENS) == 4 * BLOCK_SIZE


def test_it_waits_for_a_while_and_then_nobody_does_for_longer(node: Callable[..., Node]) -> None:
    n = node()
    said = n.computed(tokens := prompt(4))
    n.ask("d", tokens, said)
    assert n.scheduled() == set()
    n.now += PATIENCE_SECONDS * 0.99
    assert n.scheduled() == set()
    n.now += PATIENCE_SECONDS * 0.02
    assert n.scheduled() == {"d"}
    n.finish("d")
    assert n.count(c.IMPORTED_TOKENS) == 0
    tail = list(range(3000, 3000 + 2 * BLOCK_SIZE))  # else the own cache has all of it
    n.ask("next", tail, said)
    assert n.scheduled() == {"next"}
    n.now += PAUSE_SECONDS
    n.ask("later", tail[::-1], said)
    assert "later" not in n.scheduled()


def _ends(n: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    n.peers.gone(n.epoch)


def _is_suspected(n: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    n.peers.suspected(n.epoch)


def _leaves(n: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    n.leave()


def _loses_the_coordinator(n: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CoordinatorClient, "is_member", False)


@pytest.mark.parametrize("then", [_ends, _is_suspected, _leaves, _loses_the_coordinator])
def test_it_stops_waiting_when_nothing_can_come(
    node: Callable[..., Node], monkeypatch: pytest.MonkeyPatch, then: Callable[..., None]
) -> None:
    n = node()
    said = n.computed(tokens := prompt(4))
    n.ask("d", tokens, said)
    assert n.scheduled() == set()
    then(n, monkeypatch)
    assert n.scheduled() == {"d"}
    n.finish("d")


def test_a_receipt_of_whoever_is_not_known_is_not_waited_for(node: Callable[..., Node]) -> None:
    n = node()
    for number, epoch in enumerate((n.epoch ^ 1, n.decode.table.epoch)):  # another's, the own
        after = str(Receipt(Epoch(epoch), 3, 0))  # type: ignore[arg-type]  # any block
        n.ask(f"d{number}", prompt(4, first=100 * number + 1), {"kvshm": {"after": after}})
        assert f"d{number}" in n.scheduled()


def test_a_client_that_gives_up_leaves_nothing(node: Callable[..., Node]) -> None:
    n = node()
    said = n.computed(tokens := prompt(4))
    n.ask("d", tokens, said)
    assert n.scheduled() == set()
    n.decode.scheduler.finish_requests("d", RequestStatus.FINISHED_ABORTED)
    n.scheduled()
    assert Played(n.decode).is_clean()


def test_what_is_no_receipt_is_named_and_the_request_is_shared(
    node: Callable[..., Node], lines: Lines
) -> None:
    n = node()
    n.computed(tokens := prompt(4))
    n.deliver()
    n.ask("d", tokens, {"kvshm": {"after": 12}})
    assert n.scheduled() == {"d"}
    n.finish("d")
    assert n.count(c.IMPORTED_TOKENS) == 4 * BLOCK_SIZE
    assert n.count(c.BAD_OPTIONS) == 1
    assert "kvshm: receipt ignored: 'after': 12 is not what an answer has there" in lines


@pytest.mark.parametrize(
    ("tokens", "asked"),
    [
        (prompt(0), {"report": True}),  # no whole block
        (prompt(4), {"report": True, "share": False}),
    ],
)
def test_who_shows_nothing_gives_no_receipt(
    node: Callable[..., Node], tokens: list[int], asked: dict[str, bool]
) -> None:
    n = node()
    said = n.computed(tokens, extra_args={"kv_transfer_params": {"kvshm": asked}})
    assert "after" not in said["kvshm"]
    assert n.hurried == 0


def test_without_a_coordinator_there_is_no_receipt(
    node: Callable[..., Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    n = node()
    monkeypatch.setattr(CoordinatorClient, "is_member", False)
    assert "after" not in n.computed(prompt(4))["kvshm"]
