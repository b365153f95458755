"""A request whose adapter is replaced while it waits or has just begun: nothing that was computed,
hit or imported for the contents before gets into its answer.  Real schedulers, and a peer that has
the whole prompt for these contents."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm.lora.request import LoRARequest
from vllm.v1.request import Request, RequestStatus

from kvshm._engine.load_plan import LoadOrder, LoadReport

from .scheduling import BLOCK_SIZE, DrivenEngine, Make, Sent, prompt
from .several_groups import KINDS, PeerOf, Played
from .several_groups import peer_of as peer_of
from .test_adapters import load
from .test_input_contents import item

TOKENS = prompt(4)
ASYNCHRONOUS = {"seed": 1}
"""With a seed no step waits for the import."""
ASKED = LoRARequest("name 1", 1, "path")
groups = pytest.mark.parametrize(
    "specs", [(), KINDS["full and window"]], ids=["full", "full and window"]
)


@dataclass
class Importing:
    """An engine that imports a prompt for adapter 1, whose contents are "a"."""

    e: DrivenEngine
    peer: PeerOf
    rank: Played
    request: Request

    def begin(self) -> tuple[Sent, LoadOrder]:
        sent = self.e.schedule()
        (order,) = sent.metadata.loads or sent.metadata.at_once
        assert order.pieces
        return sent, order

    def assert_computed(self, contents: str) -> None:
        """The request is computed as a whole, and shared as one of these contents."""
        sent = self.e.schedule()
        assert sent.output.num_scheduled_tokens == {"r": self.request.num_tokens}
        assert not (*sent.metadata.loads, *sent.metadata.at_once)
        self.rank.run(sent)
        load(self.e, 9, contents)
        new = self.e.add("new", TOKENS, lora_request=LoRARequest("n", 9, "p"))
        assert self.request.block_hashes[:4] == new.block_hashes
        self.e.scheduler.finish_requests("new", RequestStatus.FINISHED_ABORTED)
        self.rank.finish()
        assert self.rank.is_clean()


@pytest.fixture
def importing(engine: Make, peer_of: Callable[..., PeerOf]) -> Callable[..., Importing]:
    def make(specs: Any = (), asynchronous: bool = False, **asked: Any) -> Importing:
        e = engine(asynchronous, specs=specs, enable_lora=True, max_loras=2)
        peer = peer_of(e)
        load(e, 1, "a")
        peer.hold_all(TOKENS, lora_request=ASKED)
        peer.attached()
        request = e.add("r", TOKENS, max_tokens=2, lora_request=ASKED, **asked)
        return Importing(e, peer, Played(e), request)

    return make


def in_place(e: DrivenEngine) -> None:
    load(e, 1, "b", in_place=True)


def removed_first(e: DrivenEngine) -> None:
    e.model_executor.collective_rpc("remove_lora", args=(1,))
    load(e, 1, "b")


@groups
@pytest.mark.parametrize("replace", [in_place, removed_first], ids=lambda how: how.__name__)
@pytest.mark.parametrize("ended", [False, True], ids=["under way", "has ended"])
def test_what_a_request_waits_for_is_not_used_once_its_adapter_is_another(
    importing: Callable[..., Importing], specs: Any, replace: Any, ended: bool
) -> None:
    n = importing(specs, **ASYNCHRONOUS)
    sent, order = n.begin()
    if ended:
        n.rank.run(sent, LoadReport(order.load_id, ()))
        replace(n.e)
    else:
        n.rank.run(sent)
        replace(n.e)
        n.rank.run(n.e.schedule(), LoadReport(order.load_id, ()))
    assert not n.e.ready()
    n.assert_computed("b")


@groups
def test_an_import_that_has_no_room_yet_is_not_used_either(
    importing: Callable[..., Importing], specs: Any
) -> None:
    """vLLM has looked at the request since its load has ended, and could not begin it."""
    n = importing(specs, **ASYNCHRONOUS)
    sent, order = n.begin()
    n.rank.run(sent, LoadReport(order.load_id, ()))
    manager = n.e.scheduler.kv_cache_manager
    manager.allocate_slots, allocate = lambda *_, **__: None, manager.allocate_slots
    n.rank.run(n.e.schedule())
    manager.allocate_slots = allocate
    assert n.request.num_computed_tokens == 4 * BLOCK_SIZE
    in_place(n.e)
    n.assert_computed("b")


def test_a_load_that_fails_after_its_adapter_was_replaced_changes_nothing(
    importing: Callable[..., Importing],
) -> None:
    n = importing(**ASYNCHRONOUS)
    sent, order = n.begin()
    n.rank.run(sent)
    in_place(n.e)
    n.rank.run(n.e.schedule(), LoadReport(order.load_id, order.targets[1:]))
    n.assert_computed("b")


def test_a_request_of_another_adapter_goes_on_with_its_import(
    importing: Callable[..., Importing],
) -> None:
    n = importing(**ASYNCHRONOUS)
    sent, order = n.begin()
    load(n.e, 2, "a")
    load(n.e, 2, "b", in_place=True)
    n.rank.run(sent, LoadReport(order.load_id, ()))
    sent = n.e.schedule()
    assert sent.output.num_scheduled_tokens == {"r": len(TOKENS) - 4 * BLOCK_SIZE}


# -- files that have changed: vLLM had dropped the adapter, and reads them again within a step


def read_again(e: DrivenEngine, contents: bytes = b"b") -> dict[str, Any]:
    """The rank loads adapter 1 with other contents; returns what it reports."""
    e.model_executor.loaded[1] = contents
    return {"adapters": {0: {1: contents}}, "adapter_changed": True, "weights_changed": True}


@groups
@pytest.mark.parametrize("asynchronous", [False, True], ids=["one step", "two under way"])
@pytest.mark.parametrize("way", [{}, ASYNCHRONOUS], ids=["the step waits", "before"])
def test_what_a_step_imported_for_other_contents_gets_into_no_answer(
    importing: Callable[..., Importing], specs: Any, asynchronous: bool, way: dict[str, Any]
) -> None:
    n = importing(specs, asynchronous, **way)
    sent, order = n.begin()
    ended = LoadReport(order.load_id, ())
    if way:
        n.rank.run(sent, ended)
        sent = n.e.schedule()
    flying = [n.e.schedule()] if asynchronous else []
    assert sent.output.num_scheduled_tokens == {"r": len(TOKENS) - 4 * BLOCK_SIZE}
    n.rank.run(sent, *([] if way else [ended]), **read_again(n.e))
    for more in flying:
        n.rank.run(more)
    assert n.request.num_output_tokens == 0
    assert not n.e.ready()
    n.assert_computed("b")


@pytest.mark.parametrize(("called", "contents"), [(2, "x"), (1, "b"), (1, "c")])
def test_a_call_hides_no_change_that_a_step_under_way_has_found(
    importing: Callable[..., Importing], called: int, contents: str
) -> None:
    """The ranks' answer to the call tells of both."""
    n = importing(asynchronous=True)
    sent, order = n.begin()
    report = read_again(n.e)
    load(n.e, called, contents)
    n.rank.run(sent, LoadReport(order.load_id, ()), **report)
    assert n.request.num_output_tokens == 0
    n.e.add("hit", TOKENS, max_tokens=2, lora_request=load(n.e, 9, "a"))
    n.e.scheduler.finish_requests("r", RequestStatus.FINISHED_ABORTED)
    assert n.e.schedule().output.num_scheduled_tokens == {"hit": len(TOKENS)}


def test_blocks_of_other_contents_are_hit_for_no_adapter_that_had_equal_ones(
    engine: Make,
) -> None:
    """They are hit in the step behind the one that has read them, before anybody knows."""
    e = engine(True, enable_lora=True, max_loras=2)
    load(e, 1, "a")
    load(e, 2, "a")
    rank = Played(e)
    e.add("one", TOKENS, max_tokens=4, lora_request=ASKED)
    first = e.schedule()
    other = e.add("other", TOKENS, max_tokens=4, lora_request=LoRARequest("name 2", 2, "else"))
    second = e.schedule()
    assert second.output.num_scheduled_tokens["other"] < len(TOKENS)
    rank.run(first, **read_again(e))
    rank.run(second)
    assert other.num_output_tokens == 0


def test_blocks_of_other_contents_are_not_hit_if_their_request_has_ended_by_then(
    engine: Make,
) -> None:
    e = engine(True, enable_lora=True, max_loras=2)
    load(e, 1, "a")
    rank = Played(e)
    e.add("one", TOKENS, max_tokens=4, lora_request=ASKED)
    sent = e.schedule()
    e.scheduler.finish_requests("one", RequestStatus.FINISHED_ABORTED)
    rank.run(sent, **read_again(e))
    load(e, 2, "a")
    e.add("other", TOKENS, max_tokens=4, lora_request=LoRARequest("name 2", 2, "else"))
    assert e.schedule().output.num_scheduled_tokens == {"other": len(TOKENS)}


@pytest.mark.parametrize("contents", [b"b", b""], ids=["other ones", "not known"])
def test_what_another_adapter_had_computed_is_not_hit_for_other_contents_either(
    engine: Make, contents: bytes
) -> None:
    """Two adapters of equal contents hit each other's blocks, which plain vLLM does not."""
    e = engine(enable_lora=True, max_loras=2)
    load(e, 1, "a")
    load(e, 2, "a")
    rank = Played(e)
    e.add("first", TOKENS, max_tokens=1, lora_request=LoRARequest("n", 2, "p"))
    rank.run(e.schedule())
    request = e.add("r", TOKENS, max_tokens=2, lora_request=ASKED)
    sent = e.schedule()
    assert sent.output.num_scheduled_tokens == {"r": len(TOKENS) - 4 * BLOCK_SIZE}
    rank.run(sent, **read_again(e, contents))
    assert request.num_output_tokens == 0
    assert e.schedule().output.num_scheduled_tokens == {"r": len(TOKENS)}


def test_a_request_with_an_image_ends_with_an_error_since_it_cannot_begin_again(
    importing: Callable[..., Importing],
) -> None:
    """vLLM sends its workers no image of an imported prefix.  (The images come late here, since not
    every vLLM takes adapters for a model of images that is as small.)"""
    n = importing(**ASYNCHRONOUS)
    sent, order = n.begin()
    n.rank.run(sent, LoadReport(order.load_id, ()))
    asked = {"lora_request": ASKED, "cache_salt": "s", "max_tokens": 9}
    computed = n.e.add("computed", TOKENS, **asked)
    sent = n.e.schedule()
    assert set(sent.output.num_scheduled_tokens) == {"r", "computed"}
    n.request.mm_features = computed.mm_features = [item()]
    n.rank.run(sent, **read_again(n.e))
    (outputs,) = n.e.outputs.values()
    said = {one.request_id: one for one in outputs.outputs}
    assert said["r"].finish_reason is not None
    assert (said["r"].new_token_ids, n.request.status) == ([], RequestStatus.FINISHED_ERROR)
    assert said["computed"].new_token_ids
    assert said["computed"].finish_reason is None
