"""A request that its client gives up, at each stage of its import: vLLM goes on, nothing of it is
left, and whoever comes with its prompt is served.

Here are those of which vLLM's scheduler knows.  What a rank still holds of an aborted import is in
test_cuda_runner.py, aborts among random work in test_at_once.py, clients that hang up on real
engines in test_client_texts.py.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

pytest.importorskip("vllm")

from vllm.v1.request import Request, RequestStatus

from kvshm._engine.load_plan import LoadReport
from kvshm.hooks.vllm.imports.request_import import RequestImport, Stage

from .leftovers import assert_nothing_left
from .scheduling import Sent, prompt
from .several_groups import peer_of as peer_of
from .test_twins import BLOCKS, BOTH_WAYS, Node
from .test_twins import node as node

Abort = Callable[[], None]


def report(n: Node, sent: Sent) -> None:
    loads = [*sent.metadata.loads, *sent.metadata.at_once]
    n.played.run(sent, *(LoadReport(load.load_id, load.lost) for load in loads))


def while_it_waits(n: Node, abort: Abort) -> Stage:
    """vLLM has asked what can be imported, and has admitted no prefill."""
    sent = n.e.schedule(throttled=True)
    stage = import_of(n).stage
    abort()
    report(n, sent)
    return stage


def while_it_copies(n: Node, abort: Abort) -> Stage:
    sent = n.e.schedule()
    stage = import_of(n).stage
    abort()
    report(n, sent)
    return stage


def when_it_has_landed(n: Node, abort: Abort) -> Stage:
    """The output that says so was taken in, and vLLM has scheduled nothing since."""
    report(n, n.e.schedule())
    stage = import_of(n).stage
    abort()
    return stage


def import_of(n: Node) -> RequestImport:
    found: RequestImport = n.importer.imports["first"]
    return found


@BOTH_WAYS
@pytest.mark.parametrize(
    ("moment", "stages"),
    [
        (while_it_waits, (Stage.MATCHING, Stage.LOADING)),
        (while_it_copies, (Stage.LOADING, Stage.LOADING)),
        (when_it_has_landed, (Stage.ENDED, Stage.LOADED)),
    ],
)
def test_nothing_of_it_is_left_and_its_prompt_is_served(
    node: Callable[..., Node],
    moment: Callable[[Node, Abort], Stage],
    stages: tuple[Stage, Stage],
    attached: bool,
) -> None:
    """An asynchronous import is not throttled: vLLM begins it without computing anything.  Between
    an allocation and its copy vLLM gives no one a turn."""
    n = node(attached)
    tokens = prompt(BLOCKS)
    n.peer.hold_all(tokens)
    n.e.add("runs", prompt(0), max_tokens=400)
    n.step()
    first: Request = n.e.add("first", tokens)

    def abort() -> None:
        n.e.add("second", tokens)
        n.e.scheduler.finish_requests("first", RequestStatus.FINISHED_ABORTED)

    assert moment(n, abort) is stages[0 if attached else 1]
    assert first.num_output_tokens == (moment is when_it_has_landed and attached)
    while "second" in n.e.scheduler.requests:
        n.step()
    assert n.scheduled["second"][0] == 3, "it was computed"
    n.e.scheduler.finish_requests("runs", RequestStatus.FINISHED_ABORTED)
    n.step()
    assert_nothing_left(n.e)
