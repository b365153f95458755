"""Peers' GPU memory mapped into this process: each allocation once, and let go in time."""

from __future__ import annotations

import msgspec
import pytest

from kvshm.errors import StaleAttachment, TransportError
from kvshm.interfaces import CopyState
from kvshm.terms import BlockId, Epoch

from .cuda_ranks import BLOCK, EPOCH, Node, assert_only_own_memory, copied, settled, wire


def test_an_allocation_is_opened_once_and_closed_with_its_last_user(node: Node) -> None:
    one, two = node.rank(), node.rank()
    descriptor = wire(one.transport.export(EPOCH))
    attachments = [two.transport.attach(descriptor) for _ in range(3)]
    assert node.machine.opens == 2
    for attachment in attachments[:2]:
        attachment.close()
        attachment.close()
    assert copied(attachments[2]) is CopyState.DONE
    attachments[2].close()
    two.transport._closer.close()
    assert len(two.transport.mappings) == 0
    assert_only_own_memory(two)


def test_a_mapping_outlives_copies_begun_before_the_close(node: Node) -> None:
    one, two = node.rank(), node.rank()
    attachment = two.transport.attach(wire(one.transport.export(EPOCH)))
    stream = two.transport.engine.stream
    first = attachment.begin_copy([BlockId(0)], [BlockId(0)])
    stream.owner.run()
    with two.driver.hold(stream):
        second = attachment.begin_copy([BlockId(1)], [BlockId(1)])
        attachment.close()
        assert first.poll() is CopyState.DONE
        settled(two.transport)
        assert len(two.transport.mappings) == 2
        assert second.poll() is CopyState.PENDING
    assert second.poll() is CopyState.DONE
    assert two.cache[BLOCK] == 1
    settled(two.transport)
    assert len(two.transport.mappings) == 0


def test_many_attachments_leave_nothing_behind(node: Node) -> None:
    one, two = node.rank(), node.rank()
    descriptor = wire(one.transport.export(EPOCH))
    for _ in range(1000):
        two.transport.attach(descriptor).close()
    two.transport._closer.close()
    assert_only_own_memory(two)
    assert len(two.driver.mapped) < 20


def test_equal_handles_of_two_lives_are_never_confused(node: Node) -> None:
    one, two = node.rank(), node.rank()
    first = wire(one.transport.export(EPOCH))
    attachment = two.transport.attach(first)
    details = dict(first.details, life=first.details["life"] + 1)
    reborn = msgspec.structs.replace(first, details=details)
    with pytest.raises(TransportError, match="earlier life"):
        two.transport.attach(reborn)
    attachment.close()
    two.transport._closer.close()
    assert len(two.transport.mappings) == 0


def test_another_epoch_of_unchanged_memory_uses_the_mapping_that_is_there(node: Node) -> None:
    one, two = node.rank(), node.rank()
    first = wire(one.transport.export(EPOCH))
    two.transport.attach(first)
    one.transport.export(Epoch(0))
    second = wire(one.transport.export(Epoch(2)))
    assert second.details == first.details
    assert two.transport.attach(second).epoch == 2
    assert node.machine.opens == 2


def test_vmm_memory_described_anew_has_another_life(node: Node) -> None:
    one, two = node.rank(kind="fd"), node.rank(kind="fd")
    before = wire(one.transport.export(EPOCH))
    one.transport.export(Epoch(0))
    after = wire(one.transport.export(EPOCH))
    assert after.details["life"] != before.details["life"]
    with pytest.raises(StaleAttachment):
        two.transport.attach(before)
    assert copied(two.transport.attach(after)) is CopyState.DONE
