"""What every transport must do, byte for byte."""

from __future__ import annotations

import msgspec
import pytest
import xxhash

from kvshm._base.ids import Epoch
from kvshm.errors import KvshmError, StaleAttachment, TransportError
from kvshm.interfaces import Copy, CopyState, Region

from .rigs import Layout, Peer, Rig

DONE, FAILED, PENDING = CopyState.DONE, CopyState.FAILED, CopyState.PENDING
EPOCH = Epoch(0x5EED)

PLAIN = Layout((64 * 48,), (Region(0, 64, 64, 48),))
LAYERS = Layout(  # keys and values of two layers, one after the other
    (4 * 24 * 40,),
    tuple(Region(layer * 24 * 40, 40, 40, 24) for layer in range(4)),
)
INTERLEAVED = Layout(  # the same regions, but block by block, with a gap and an offset
    (100 + 64 * 200,),
    tuple(Region(100 + layer * 44, 200, 40, 64) for layer in range(4)),
)
TWO_MEMORIES = Layout(
    (16 * 32 + 8, 5 + 16 * 128),
    (Region(8, 32, 24, 16, 0), Region(5, 128, 100, 16, 1)),
)
TWO_MEMORIES_SWAPPED = Layout(
    (7 + 40 * 100, 40 * 24),
    (Region(0, 24, 24, 40, 1), Region(7, 100, 100, 40, 0)),
)

LAYOUTS = {
    "equal": (PLAIN, PLAIN),
    "other strides and counts": (LAYERS, INTERLEAVED),
    "the other way": (INTERLEAVED, LAYERS),
    "several memories": (TWO_MEMORIES, TWO_MEMORIES_SWAPPED),
}
BLOCKS = {
    "one": ([3], [5]),
    "last onto last": ([-1], [-1]),
    "consecutive": ([0, 1, 2, 3], [4, 5, 6, 7]),
    "fragmented": ([0, 9, 3, 12, 1], [7, 0, 2, 15, 4]),
    "reversed": ([4, 5, 6, 7], [7, 6, 5, 4]),
    "one source onto many": ([2, 2, 2], [0, 5, 9]),
    "none": ([], []),
}


def connect(rig: Rig, exporter: Peer, importer: Peer):
    return importer.transport.attach(exporter.transport.export(EPOCH))


def pair(rig: Rig, layout: Layout = PLAIN):
    exporter, importer = rig.peer(layout), rig.peer(layout)
    return exporter, importer, connect(rig, exporter, importer)


def block_bytes(memories: list[bytearray], layout: Layout, block: int) -> list[bytes]:
    """The bytes of a block in each region, worked out without the code under test."""
    found = []
    for region in layout.regions:
        start = region.offset + block * region.stride
        found.append(bytes(memories[region.handle][start : start + region.block_bytes]))
    return found


def expected(exporter: Peer, importer: Peer, source: list[int], target: list[int]):
    """The importer's whole memory as it must be after the copy: gaps and all."""
    theirs, mine = exporter.read(), importer.read()
    for src, dst in zip(source, target, strict=True):
        parts = block_bytes(theirs, exporter.layout, src)
        for region, part in zip(importer.layout.regions, parts, strict=True):
            start = region.offset + dst * region.stride
            mine[region.handle][start : start + region.block_bytes] = part
    return mine


def resolve(blocks: list[int], layout: Layout) -> list[int]:
    return [block % layout.num_blocks for block in blocks]


# -- bytes


@pytest.mark.parametrize("layouts", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_exactly_the_named_blocks_change(rig, layouts):
    exporter, importer = rig.peer(layouts[0]), rig.peer(layouts[1])
    attachment = connect(rig, exporter, importer)
    assert attachment.epoch == EPOCH
    for seed, (name, blocks) in enumerate(BLOCKS.items()):
        exporter.fill(seed=1000 + seed)
        source, target = resolve(blocks[0], layouts[0]), resolve(blocks[1], layouts[1])
        wanted, untouched = expected(exporter, importer, source, target), exporter.read()
        assert rig.finish(attachment.begin_copy(source, target)) == [DONE], name
        assert importer.read() == wanted, name
        assert exporter.read() == untouched, name


def test_every_block_of_a_cache_can_travel_in_one_copy(rig):
    exporter, importer = rig.peer(LAYERS), rig.peer(INTERLEAVED)
    source = list(range(LAYERS.num_blocks))
    target = [(7 * block + 3) % 64 for block in source]
    wanted = expected(exporter, importer, source, target)
    assert rig.finish(connect(rig, exporter, importer).begin_copy(source, target)) == [DONE]
    assert importer.read() == wanted


def test_bytes_are_read_when_the_copy_runs_and_not_before(rig):
    exporter, importer, attachment = pair(rig)
    with rig.hold(importer):
        copy = attachment.begin_copy([1], [2])
        exporter.fill(seed=99)
    rig.finish(copy)
    assert block_bytes(importer.read(), PLAIN, 2) == block_bytes(exporter.read(), PLAIN, 1)


def test_checksum_is_xxh3_over_all_regions_in_order(rig):
    peer = rig.peer(INTERLEAVED)
    sums = peer.transport.checksum([5, 0, 63])
    for block, checksum in zip([5, 0, 63], sums, strict=True):
        chained = b"".join(block_bytes(peer.read(), INTERLEAVED, block))
        assert checksum == xxhash.xxh3_64_intdigest(chained)
    assert peer.transport.checksum([]) == []


def test_checksums_agree_after_a_copy_between_different_layouts(rig):
    exporter, importer = rig.peer(LAYERS), rig.peer(INTERLEAVED)
    rig.finish(connect(rig, exporter, importer).begin_copy([4, 8], [60, 2]))
    assert exporter.transport.checksum([4, 8]) == importer.transport.checksum([60, 2])


def test_two_engines_attach_each_other(rig):
    one, two = rig.peer(PLAIN), rig.peer(PLAIN)
    there, back = connect(rig, one, two), connect(rig, two, one)
    wanted = expected(one, two, [0], [10]), expected(two, one, [1], [20])
    assert rig.finish(there.begin_copy([0], [10]), back.begin_copy([1], [20])) == [DONE, DONE]
    assert (two.read(), one.read()) == wanted


def test_two_exporters_with_equal_block_ids_never_mix(rig):
    one, two, importer = rig.peer(PLAIN), rig.peer(PLAIN), rig.peer(PLAIN)
    first = importer.transport.attach(one.transport.export(Epoch(1)))
    second = importer.transport.attach(two.transport.export(Epoch(2)))
    assert rig.finish(second.begin_copy([7], [0]), first.begin_copy([7], [1])) == [DONE, DONE]
    found = importer.read()
    assert block_bytes(found, PLAIN, 0) == block_bytes(two.read(), PLAIN, 7)
    assert block_bytes(found, PLAIN, 1) == block_bytes(one.read(), PLAIN, 7)


# -- time


def test_copies_overlap_and_all_end(rig):
    exporter, importer, attachment = pair(rig)
    ways = [([b], [47 - b]) for b in range(20)]
    wanted = expected(exporter, importer, [s for (s,), _ in ways], [t for _, (t,) in ways])
    with rig.hold(importer):
        copies = [attachment.begin_copy(*way) for way in ways]
        assert {copy.poll() for copy in copies} == {PENDING}
    assert set(rig.finish(*copies)) == {DONE}
    assert importer.read() == wanted


def test_a_pending_copy_stays_pending_until_it_ends_and_then_never_changes(rig):
    _, importer, attachment = pair(rig)
    before = importer.read()
    with rig.hold(importer):
        copy = attachment.begin_copy([0, 1], [2, 3])
        assert [copy.poll() for _ in range(100)] == [PENDING] * 100
        assert importer.read() == before
    assert rig.finish(copy) == [DONE]
    copy.cancel()
    assert copy.poll() is DONE


def test_a_copy_cancelled_before_it_began_writes_nothing(rig):
    exporter, importer, attachment = pair(rig)
    before, wanted = importer.read(), expected(exporter, importer, [0, 1], [2, 3])
    with rig.hold(importer):
        copy = attachment.begin_copy([0, 1], [2, 3])
        copy.cancel()
        copy.cancel()
    assert rig.finish(copy) == [FAILED]
    assert importer.read() == (before if rig.skips(attachment) else wanted)


@pytest.mark.parametrize("keep_going", [False, True])
def test_who_waits_copies_everything_or_has_ended_the_copy(rig, keep_going):
    """Or leaves it to a device, which no one on this thread can help."""
    exporter, importer, attachment = pair(rig)
    before, wanted = importer.read(), expected(exporter, importer, [0, 1], [2, 3])
    with rig.hold(importer):
        copy = attachment.begin_copy([0, 1], [2, 3], lambda: keep_going)
        waited = copy.poll()
    assert waited in ((PENDING, DONE) if keep_going else (PENDING, FAILED))
    (state,) = rig.finish(copy)
    assert state is (DONE if waited is PENDING else waited)
    assert importer.read() == (wanted if state is DONE else before)


def test_cancelling_one_copy_leaves_the_others_alone(rig):
    exporter, importer, attachment = pair(rig)
    kept = [0, 2] if rig.skips(attachment) else [0, 1, 2]
    wanted = expected(exporter, importer, kept, [block + 10 for block in kept])
    with rig.hold(importer):
        copies: list[Copy] = [attachment.begin_copy([b], [b + 10]) for b in range(3)]
        copies[1].cancel()
    assert rig.finish(*copies) == [DONE, FAILED, DONE]
    assert importer.read() == wanted


# -- a source that goes away


def test_another_epoch_makes_old_descriptors_stale_and_leaves_copies_running(rig):
    exporter, importer, attachment = pair(rig)
    old = exporter.transport.export(EPOCH)
    wanted = expected(exporter, importer, [1], [2])
    with rig.hold(importer):
        copy = attachment.begin_copy([1], [2])
        new = exporter.transport.export(Epoch(77))
        with pytest.raises(StaleAttachment):
            importer.transport.attach(old)
        assert importer.transport.attach(new).epoch == 77
    assert rig.finish(copy) == [DONE]
    assert importer.read() == wanted


def test_an_exporter_may_close_while_its_blocks_are_copied(rig):
    exporter, importer, attachment = pair(rig)
    descriptor = exporter.transport.export(EPOCH)
    wanted = expected(exporter, importer, [1, 2], [3, 4])
    with rig.hold(importer):
        copy = attachment.begin_copy([1, 2], [3, 4])
        exporter.transport.close()
    assert rig.finish(copy) == [DONE]
    assert importer.read() == wanted
    with pytest.raises(KvshmError):
        importer.transport.attach(descriptor)


def test_memory_outlives_its_exporter(rig):
    """Of a GPU that is not known: there the rank's pulse says that nothing counts any more."""
    exporter, importer, attachment = pair(rig)
    assert not attachment.ended
    if importer.transport.name == "cuda_ipc":
        return
    wanted = expected(exporter, importer, [1, 2], [3, 4])
    rig.end(exporter)
    assert rig.finish(attachment.begin_copy([1, 2], [3, 4])) == [DONE]
    assert importer.read() == wanted


def test_an_attachment_closed_under_a_copy_lets_it_end(rig):
    exporter, importer, attachment = pair(rig)
    wanted = expected(exporter, importer, [1, 2], [3, 4])
    with rig.hold(importer):
        copy = attachment.begin_copy([1, 2], [3, 4])
        attachment.close()
        attachment.close()
        with pytest.raises(TransportError):
            attachment.begin_copy([0], [0])
    assert rig.finish(copy) == [DONE]
    assert importer.read() == wanted


def test_after_the_importers_close_nothing_is_written(rig):
    _, importer, attachment = pair(rig)
    copies = [attachment.begin_copy(list(range(48)), list(range(48))) for _ in range(50)]
    importer.transport.close()
    states = [copy.poll() for copy in copies]
    assert PENDING not in states
    after = importer.read()
    assert [copy.poll() for copy in copies] == states
    assert importer.read() == after
    importer.transport.close()
    attachment.close()
    with pytest.raises(TransportError):
        attachment.begin_copy([0], [0])


# -- what is refused


NOWHERE = (
    ([48], [0]), ([0], [48]), ([-1], [0]), ([0], [-1]), ([0, 1 << 40], [0, 1]), ([0, 1], [0]),
)  # fmt: skip


def test_blocks_that_do_not_exist_are_refused_before_the_first_byte(rig):
    _, importer, attachment = pair(rig)
    before = importer.read()
    for source, target in NOWHERE:
        with pytest.raises(TransportError):
            attachment.begin_copy(source, target)
        rig.finish()
        assert importer.read() == before, (source, target)


def test_block_counts_of_both_sides_bound_the_copy(rig):
    small, large = rig.peer(LAYERS), rig.peer(INTERLEAVED)
    with pytest.raises(TransportError, match="24"):
        connect(rig, small, large).begin_copy([24], [24])
    with pytest.raises(TransportError, match="24"):
        connect(rig, large, small).begin_copy([24], [24])
    with pytest.raises(TransportError):
        small.transport.checksum([24])


OTHER_BLOCK = Layout((64 * 48,), (Region(0, 64, 63, 48),))


@pytest.mark.parametrize(
    ("theirs", "complaint"), [(LAYERS, "regions"), (OTHER_BLOCK, "63 bytes at the peer, 64 here")]
)
def test_layouts_that_differ_are_refused_at_attach(rig, theirs, complaint):
    exporter, importer = rig.peer(theirs), rig.peer(PLAIN)
    with pytest.raises(TransportError, match=complaint):
        connect(rig, exporter, importer)


@pytest.mark.parametrize(
    "region",
    [
        Region(1, 64, 64, 48),
        Region(0, 64, 64, 49),
        Region(0, 65, 64, 48),
        Region(0, 1 << 62, 64, 2),
        Region(-1, 64, 64, 1),
        Region(0, 63, 64, 2),
        Region(0, -64, 64, 2),
        Region(0, 64, 64, 0),
        Region(0, 64, 64, 1, handle=1),
        Region(0, 64, 64, 1, handle=-1),
    ],
)
def test_regions_outside_their_memory_are_refused(rig, region):
    with pytest.raises(TransportError):
        rig.peer(Layout(PLAIN.sizes, (region,)))
    exporter, importer = rig.peer(PLAIN), rig.peer(PLAIN)
    honest = exporter.transport.export(EPOCH)
    with pytest.raises(TransportError):
        importer.transport.attach(msgspec.structs.replace(honest, regions=[region]))


def test_a_closed_transport_refuses_everything(rig):
    exporter, importer = rig.peer(PLAIN), rig.peer(PLAIN)
    descriptor = exporter.transport.export(EPOCH)
    importer.transport.close()
    with pytest.raises(TransportError):
        importer.transport.export(EPOCH)
    with pytest.raises(TransportError):
        importer.transport.attach(descriptor)


# -- faults on purpose: each is a real wrong copy, and only where it says


@pytest.mark.parametrize(
    ("fault", "source", "as_if"),
    [
        ("wrong-block", [3, 9, 5], [9, 3, 3]),
        ("wrong-block", [3], [4]),
        ("shift", [3, 47], [4, 0]),
    ],
)
def test_a_misdirecting_fault_copies_other_blocks(rig, fault, source, as_if):
    exporter, importer = rig.peer(PLAIN), rig.peer(PLAIN, fault=fault)
    target = list(range(len(source)))
    wanted = expected(exporter, importer, as_if, target)
    assert rig.finish(connect(rig, exporter, importer).begin_copy(source, target)) == [DONE]
    assert importer.read() == wanted
    assert importer.transport.checksum(target) != exporter.transport.checksum(source)


def test_the_zero_fault_writes_zeros(rig):
    exporter, importer = rig.peer(LAYERS), rig.peer(LAYERS, fault="zero")
    assert rig.finish(connect(rig, exporter, importer).begin_copy([3, 4], [5, 6])) == [DONE]
    for block in (5, 6):
        assert block_bytes(importer.read(), LAYERS, block) == [bytes(40)] * 4


def test_an_unknown_fault_is_refused(rig):
    with pytest.raises(TransportError, match="no fault 'sabotage'"):
        rig.peer(PLAIN, fault="sabotage")
