"""The copy thread: what becomes of copies and jobs that fail, and of what they hold."""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Iterator

import pytest

from kvshm import _native
from kvshm._base.ids import Epoch
from kvshm.errors import TransportError
from kvshm.interfaces import CopyState, Region
from kvshm.transport import copier as copier_module
from kvshm.transport.copier import BlockCopy, Copier, CopyPlan
from kvshm.transport.jobs import JobThread
from kvshm.transport.posix_shm import PosixShmTransport

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


@pytest.mark.parametrize("cancelled", [False, True])
def test_who_waits_stops_when_asked_to_and_copies_all_else(monkeypatch, cancelled):
    monkeypatch.setattr(copier_module, "PART_BYTES", 2)
    made, memory = plan([0, 1, 2, 3], [4, 5, 6, 7])
    copy = BlockCopy(made)
    left = 2

    def keep_going() -> bool:
        nonlocal left
        left -= 1
        if cancelled and left == 0:
            copy.cancel()
        return cancelled or left > 0

    copy.run(keep_going)
    assert copy.poll() is CopyState.FAILED
    assert memory == b"abcdabgh"
    copy.run(lambda: True)
    copy.run()
    assert memory == b"abcdabgh", "an ended copy writes nothing any more"


def test_who_waits_and_is_not_stopped_copies_everything_past_the_queue(monkeypatch, copier):
    monkeypatch.setattr(copier_module, "PART_BYTES", 3)
    made, memory = plan([0, 1, 2, 3], [4, 5, 6, 7])
    gate = threading.Event()
    copier.submit(lambda: gate.wait(PATIENCE) and None)
    copy = copier.copy_now(made, lambda: True)
    gate.set()
    assert copy.poll() is CopyState.DONE
    assert memory == b"abcdabcd"


def test_who_waits_for_a_copy_out_of_shared_memory_makes_it_itself(tmp_path):
    regions = [Region(0, 4096, 4096, 4)]
    own, peer = (
        PosixShmTransport(PosixShmTransport.allocate(4 * 4096), regions, 0, tmp_path / name)
        for name in ("own", "peer")
    )
    attachment = own.attach(peer.export(Epoch(7)))
    gate, threads = threading.Event(), []
    own.copier.submit(lambda: gate.wait(PATIENCE) and None)
    copy = attachment.begin_copy([0, 1], [2, 3], lambda: not threads.append(threading.get_ident()))
    state = copy.poll()
    gate.set()
    attachment.close()
    own.close()
    peer.close()
    assert state is CopyState.DONE
    assert set(threads) == {threading.get_ident()}


def test_who_waits_is_asked_again_every_few_megabytes():
    block, count = 1 << 20, 16
    source, target = Memory(block), Memory(block)
    runs = [[(_native.address(memory), 0, block, count)] for memory in (source, target)]
    blocks = list(range(count))
    made = CopyPlan(runs[0], blocks, runs[1], blocks, keep=(source, target))
    asked = 0

    def keep_going() -> bool:
        nonlocal asked
        asked += 1
        return True

    copy = BlockCopy(made)
    copy.run(keep_going)
    assert copy.poll() is CopyState.DONE
    assert asked >= 4, "a step does not wait for all 16 MiB once its time is up"


def test_after_close_nothing_is_accepted_and_everything_has_ended(copier):
    copies = [copier.begin(plan([0], [1])[0]) for _ in range(100)]
    copier.close()
    copier.close()
    assert CopyState.PENDING not in {copy.poll() for copy in copies}
    with pytest.raises(TransportError):
        copier.submit(lambda: None)
    with pytest.raises(TransportError):
        copier.begin(plan([0], [1])[0])


def test_a_thread_whose_first_act_fails_does_its_jobs(caplog: pytest.LogCaptureFixture) -> None:
    def refuse() -> None:
        raise TransportError("no context")

    thread, done = JobThread("kvshm-test", refuse), threading.Event()
    thread.submit(done.set)
    assert done.wait(PATIENCE)
    thread.close()
    assert "no context" in caplog.text


def test_a_job_may_close_its_own_thread(caplog: pytest.LogCaptureFixture) -> None:
    thread, done = JobThread("kvshm-test"), threading.Event()

    def close() -> None:
        thread.close()
        done.set()

    thread.submit(close)
    assert done.wait(PATIENCE)
    thread.close()
    assert not caplog.records
    with pytest.raises(TransportError, match="closed"):
        thread.submit(done.set)
