"""copy_blocks: what is copied where, what is refused, and how a copy is stopped."""

from __future__ import annotations

import mmap
import threading

import pytest

from kvshm import _native

BLOCK = 8


class Cache:
    def __init__(
        self, blocks: int, *, regions: int = 2, stride: int = 12, block: int = BLOCK
    ) -> None:
        self.memory = bytearray(regions * blocks * stride)
        self.stride, self.blocks, self.block = stride, blocks, block
        base = _native.address(self.memory)
        self.regions = [(base + r * blocks * stride, stride, block, blocks) for r in range(regions)]

    def at(self, region: int, block: int) -> slice:
        start = (region * self.blocks + block) * self.stride
        return slice(start, start + self.block)

    def fill(self) -> Cache:
        for region in range(len(self.regions)):
            for block in range(self.blocks):
                self.memory[self.at(region, block)] = bytes([region * 100 + block + 1]) * self.block
        return self


def test_blocks_are_copied_pairwise_in_every_region() -> None:
    source, target = Cache(6).fill(), Cache(9, stride=8)
    assert _native.copy_blocks(source.regions, target.regions, [5, 0, 3], (8, 1, 2), None) == 3
    wanted = Cache(9, stride=8)
    for region in range(2):
        for one, other in [(5, 8), (0, 1), (3, 2)]:
            wanted.memory[wanted.at(region, other)] = source.memory[source.at(region, one)]
    assert target.memory == wanted.memory, "and nothing else is touched"


def test_nothing_to_copy() -> None:
    source, target = Cache(2).fill(), Cache(2)
    assert _native.copy_blocks(source.regions, target.regions, [], [], None) == 0
    assert _native.copy_blocks([], [], [1], [1], None) == 1
    assert not any(target.memory)


def test_stop_ends_a_copy_before_its_next_block() -> None:
    source, target = Cache(2).fill(), Cache(2)
    stop = bytearray(b"\1\0\0\0")
    assert _native.copy_blocks(source.regions, target.regions, [0], [0], stop) == 0
    assert not any(target.memory)


def test_bad_ids_are_refused_before_the_first_byte(subtests: pytest.Subtests) -> None:
    for source_ids, target_ids, error in [
        ([6], [0], IndexError),
        ([0, -1], [0, 1], IndexError),
        ([0, 1], [0, 9], IndexError),
        ([0, 2**32], [0, 1], IndexError),
        ([0, 1], [0], ValueError),
        (["0"], [0], TypeError),
    ]:
        with subtests.test(source_ids=source_ids, target_ids=target_ids, error=error):
            source, target = Cache(6).fill(), Cache(9)
            with pytest.raises(error):
                _native.copy_blocks(source.regions, target.regions, source_ids, target_ids, None)
            assert not any(target.memory)


def test_regions_that_differ_are_refused() -> None:
    source = Cache(6).fill()
    for other in (Cache(6, block=7), Cache(6, regions=1), Cache(6, regions=3)):
        with pytest.raises(ValueError, match="regions"):
            _native.copy_blocks(source.regions, other.regions, [0], [0], None)
        assert not any(other.memory)


@pytest.mark.parametrize("region", [(0, 1, 1), [0, 1, 1, 1], None, "abcd"])
def test_what_is_no_region_is_refused(region: object) -> None:
    with pytest.raises(TypeError):
        _native.copy_blocks([region], [(0, 1, 1, 1)], [0], [0], None)  # type: ignore[list-item]


def test_a_region_that_wraps_around_memory_is_refused() -> None:
    huge = (4096, 2**60, 8, 2**32)
    with pytest.raises(ValueError, match="regions"):
        _native.copy_blocks([huge], [huge], [2**31], [0], None)


@pytest.mark.parametrize("stop", [b"", b"\0\0\0", bytes(8)])
def test_stop_is_four_bytes(stop: bytes) -> None:
    with pytest.raises(ValueError, match="stop"):
        _native.copy_blocks([], [], [], [], stop)


def test_other_threads_run_during_a_copy_and_can_stop_it() -> None:
    size, times = 1 << 16, 1_500_000
    source, target = mmap.mmap(-1, size), mmap.mmap(-1, size)
    source.write(b"\1" * size)
    stop = bytearray(4)

    def stop_once_it_runs() -> None:
        while not target[size - 1]:
            pass
        stop[0] = 1

    watcher = threading.Thread(target=stop_once_it_runs)
    watcher.start()
    regions = [[(_native.address(m), size, size, 1)] for m in (source, target)]
    ids = [0] * times
    copied = _native.copy_blocks(regions[0], regions[1], ids, ids, stop)
    watcher.join()
    assert 0 < copied < times
