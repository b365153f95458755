"""A session (streaming input) imports with its first input, and goes on from there.

What kvshm publishes of a session is in test_scheduling.py and test_contents_drafts.py.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

pytest.importorskip("vllm")

from vllm.v1.request import RequestStatus

from .leftovers import assert_nothing_left
from .scheduling import BLOCK_SIZE, prompt
from .several_groups import peer_of as peer_of
from .test_twins import BLOCKS, BOTH_WAYS, Node
from .test_twins import node as node


@BOTH_WAYS
def test_it_goes_on_from_what_its_first_input_has_imported(
    node: Callable[..., Node], attached: bool
) -> None:
    n = node(attached)
    first, second = prompt(BLOCKS), prompt(2, first=700)
    n.peer.hold_all([*first, *second])
    session = n.e.add("session", first, max_tokens=2, resumable=True)
    for more in (second, None):
        for _ in range(6):
            n.step()
        assert session.status is RequestStatus.WAITING_FOR_STREAMING_REQ
        if more is not None:
            n.e.continue_session("session", more, max_tokens=1)
    assert n.filled == [("session", BLOCKS)]
    imported, computed = BLOCKS * BLOCK_SIZE, sum(n.scheduled["session"])
    assert imported + computed == session.num_computed_tokens
    n.e.scheduler.finish_requests("session", RequestStatus.FINISHED_ABORTED)
    n.step()
    assert_nothing_left(n.e)
