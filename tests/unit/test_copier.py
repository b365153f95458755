"""The copy thread: what becomes of copies and jobs that fail, and of what they hold."""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Iterator

import pytest

from kvshm import _native
from kvshm.errors import TransportError
from kvshm.interfaces import CopyState
from kvshm.transport.copier import BlockCopy, Copier, CopyPlan

PATIENCE = 60.0


class Memory(bytearray):
    """A bytearray that can be watched going away."""


@pytest.fixture
def copier() -> Iterator[Copier]:
    made = Copier()
    yield made
    made.close()


def plan(source: list[int], target: list[int]) -> tuple[CopyPlan, Memory]:
    memory = Memory(b"abcdefgh")
    run = (_native.address(memory), 1, 1, 8)
    return CopyPlan([run], source, [run], target, keep=(memory,)), memory


def drain(copier: Copier) -> None:
    done = threading.Event()
    copier.submit(done.set)
    assert done.wait(PATIENCE)


def test_a_copy_that_raises_has_failed_and_the_thread_goes_on(copier, caplog):
    with caplog.at_level(logging.ERROR, logger="vllm.kvshm"):
        bad = copier.begin(plan([0, 1], [2])[0])  # lists of different lengths
        good_plan, memory = plan([0], [7])
        good = copier.begin(good_plan)
        drain(copier)
    assert (bad.poll(), good.poll()) == (CopyState.FAILED, CopyState.DONE)
    assert memory == b"abcdefga"
    assert "copy of 2 blocks failed" in caplog.text


def test_a_job_that_raises_does_not_end_the_thread(copier):
    copier.submit(lambda: [].pop())
    drain(copier)


def test_a_copy_holds_its_memory_until_it_has_ended_and_no_longer(copier):
    gate = threading.Event()
    copier.submit(lambda: gate.wait(PATIENCE) and None)
    copies: list[BlockCopy] = []

    def begin() -> weakref.ref[Memory]:
        made, memory = plan([0], [1])
        copies.append(copier.begin(made))
        return weakref.ref(memory)

    memory = begin()
    assert memory() is not None
    gate.set()
    drain(copier)
    assert copies[0].poll() is CopyState.DONE
    assert memory() is None


def test_after_close_nothing_is_accepted_and_everything_has_ended(copier):
    copies = [copier.begin(plan([0], [1])[0]) for _ in range(100)]
    copier.close()
    copier.close()
    assert CopyState.PENDING not in {copy.poll() for copy in copies}
    with pytest.raises(TransportError):
        copier.submit(lambda: None)
    with pytest.raises(TransportError):
        copier.begin(plan([0], [1])[0])
