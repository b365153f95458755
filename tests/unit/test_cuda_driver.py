"""What the transport relies on in a CUDA driver: the same tests over the fake and the real one,
and over the real calls into a driver library that is played (tests/played_cuda)."""

from __future__ import annotations

import ctypes
import os
import random
import threading
import time
from array import array
from functools import partial
from typing import Any

import pytest
from gpu_memory import held, no_gpu

from kvshm import _native
from kvshm.transport.cuda.copy_stream import copy_each
from kvshm.transport.cuda.driver import CudaError, Driver, RegionRow, RegionTable, write
from kvshm.transport.cuda.probe import upload
from kvshm.transport.cuda.transport import current_driver
from kvshm.transport.memory import KVMemory, map_read_only

from ..doubles.cuda_fake import FakeDriver, FakeMachine


@pytest.fixture(params=["fake", "played", pytest.param("real", marks=pytest.mark.gpu)])
def driver(request: pytest.FixtureRequest) -> Driver:
    if request.param == "fake":
        return FakeMachine().process()
    if request.param == "played":
        return played_driver(request)
    if (reason := no_gpu()) is not None:
        pytest.skip(reason)
    return current_driver()


def played_driver(request: pytest.FixtureRequest) -> Driver:
    """The real calls, ending in a library of ours: it comes first, for this whole process."""
    if no_gpu() is None:
        pytest.skip("this process has a real driver")
    ctypes.CDLL(request.getfixturevalue("played_cuda"), ctypes.RTLD_GLOBAL)
    from kvshm.transport.cuda.nvidia import NvidiaDriver

    return NvidiaDriver(0)


def read(driver: Driver, address: int, nbytes: int) -> bytes:
    buffer, stream = driver.host_allocate(nbytes), driver.new_stream()
    driver.copy(buffer.address, address, nbytes, stream)
    driver.synchronize(stream)
    found = bytes(buffer.view)
    driver.host_free(buffer)
    return found


def filled(driver: Driver, nbytes: int, seed: int) -> tuple[int, bytes]:
    packed = random.Random(seed).randbytes(nbytes)
    address = driver.allocate(nbytes)
    write(driver, address, packed, driver.new_stream())
    return address, packed


def ended(driver: Driver, event: Any) -> None:
    deadline = time.monotonic() + 30
    while not driver.done(event):
        assert time.monotonic() < deadline


def test_what_is_written_is_read(driver: Driver) -> None:
    address, packed = filled(driver, 5000, seed=1)
    assert read(driver, address, 5000) == packed
    driver.free(address)


def test_registered_host_memory_is_read_and_written_by_the_gpu(driver: Driver) -> None:
    """Twice, as two caches in one memory are, and as long as one of them is registered."""
    memory, stream = KVMemory.create(1 << 20), driver.new_stream()
    address, packed = filled(driver, 5000, seed=1)
    reached = [driver.host_register(memory.address, 1 << 20, read_only=False) for _ in range(2)]
    assert reached[0] == reached[1]
    driver.copy(reached[0] + 4096, address, 5000, stream)
    driver.synchronize(stream)
    assert bytes(memory.buffer[4096 : 4096 + 5000]) == packed
    driver.host_unregister(memory.address)
    memory.buffer[:5000] = packed[::-1]
    driver.copy(address, reached[1], 5000, stream)
    driver.synchronize(stream)
    assert read(driver, address, 5000) == packed[::-1]
    driver.host_unregister(memory.address)
    driver.free(address)


def test_host_memory_that_is_mapped_for_reading_is_registered_for_reading(driver: Driver) -> None:
    memory = KVMemory.create(1 << 20)
    memory.buffer[:4] = b"kept"
    pages = map_read_only(memory.read_only_fd())
    own, stream = _native.address(pages), driver.new_stream()
    reached = driver.host_register(own, len(pages), read_only=True)
    address = driver.allocate(4)
    driver.copy(address, reached, 4, stream)
    driver.synchronize(stream)
    assert read(driver, address, 4) == b"kept"
    driver.host_unregister(own)
    driver.free(address)


def test_an_allocation_knows_its_range_from_any_address_in_it(driver: Driver) -> None:
    base = driver.allocate_shared(1 << 21)
    found, nbytes = driver.address_range(base + 12345)
    assert found == base
    assert nbytes >= 1 << 21


def test_a_handle_has_64_bytes_and_cannot_be_opened_where_it_was_made(driver: Driver) -> None:
    handle = driver.ipc_handle(driver.allocate_shared(1 << 21))
    assert len(handle) == 64
    try:
        opened = driver.ipc_open(handle, "")
    except CudaError:
        return
    assert no_gpu() is None, "the played drivers refuse, as CUDA's documentation says"
    driver.ipc_close(opened, "")
    pytest.skip("this driver opens handles where they were made; nothing relies on that")


def test_memory_of_the_pool_has_no_handle(driver: Driver) -> None:
    base, _ = driver.address_range(driver.allocate(1 << 20))
    with pytest.raises(CudaError):
        driver.ipc_handle(base)


def test_vmm_memory_has_no_handle_but_a_descriptor(driver: Driver) -> None:
    address, nbytes = driver.vmm_allocate(1 << 20, fabric=False)
    with pytest.raises(CudaError):
        driver.ipc_handle(address)
    assert driver.address_range(address + 12345) == (address, nbytes)
    os.close(driver.vmm_descriptor(address + 12345))
    with pytest.raises(CudaError):
        driver.vmm_descriptor(driver.allocate_shared(1 << 21))


@pytest.mark.parametrize("kind", ["descriptor", "fabric handle"])
@pytest.mark.parametrize("read_only", [True, False])
def test_vmm_memory_is_mapped_anew_by_what_was_exported(
    driver: Driver, kind: str, read_only: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also by a driver that maps nothing read-only, as is known of memory pools."""
    if not read_only:
        monkeypatch.setenv("PLAYED_CUDA_NO_READ_ONLY", "1")
    try:
        address, nbytes = driver.vmm_allocate(1 << 20, fabric=kind == "fabric handle")
    except CudaError as exc:
        pytest.skip(f"no memory for a {kind} here: {exc}")
    packed = random.Random(1).randbytes(5000)
    write(driver, address, packed, driver.new_stream())
    if kind == "descriptor":
        exported: int | bytes = driver.vmm_descriptor(address)
    else:
        exported = driver.vmm_fabric_handle(address)
    mapped = driver.vmm_map(exported, nbytes)
    if isinstance(exported, int):
        os.close(exported)
    assert mapped != address
    assert read(driver, mapped, 5000) == packed
    driver.vmm_unmap(mapped, nbytes)


def test_waiting_for_a_stream_leaves_no_event_behind(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Any] = []
    monkeypatch.setattr(driver, "new_event", noted(driver.new_event, made, 1))
    monkeypatch.setattr(driver, "free_event", noted(driver.free_event, made, -1))
    first, second = driver.new_stream(), driver.new_stream()
    for _ in range(3):
        thread = threading.Thread(target=driver.wait, args=(first, second))
        thread.start()
        thread.join()
    assert sum(made) == 0


def noted(function: Any, into: list[Any], number: int) -> Any:
    return lambda *arguments: into.append(number) or function(*arguments)


def test_a_thread_that_waits_for_an_event_lets_others_run_until_it_is_reached(
    driver: Driver,
) -> None:
    stream, event, ended = driver.new_stream(), driver.new_event(), threading.Event()
    hold = driver.hold if isinstance(driver, FakeDriver) else partial(held, driver)

    def wait() -> None:
        driver.synchronize_event(event)
        ended.set()

    with hold(stream):
        driver.record(event, stream)
        thread = threading.Thread(target=wait)
        thread.start()
        assert not driver.done(event)
        assert not ended.is_set()
    assert ended.wait(30)
    assert driver.done(event)
    thread.join()


def test_a_stream_runs_after_what_another_had_before(driver: Driver) -> None:
    (a, _), (b, _) = filled(driver, 1 << 20, 2), filled(driver, 1 << 20, 3)
    first, second = driver.new_stream(), driver.new_stream()
    out, packed = driver.allocate(1 << 20), read(driver, a, 1 << 20)
    driver.copy(b, a, 1 << 20, first)
    driver.wait(second, first)
    driver.copy(out, b, 1 << 20, second)
    event = driver.new_event()
    driver.record(event, second)
    ended(driver, event)
    assert read(driver, out, 1 << 20) == packed


@pytest.mark.parametrize("way", ["kernel", "batch", "loop"])
@pytest.mark.parametrize(
    ("nbytes", "stride", "offset"),
    [(64, 64, 0), (4096, 4160, 16), (36, 44, 4), (63, 70, 5), (40000, 40016, 32)],
)
def test_every_way_copies_the_same_fragments(
    driver: Driver, way: str, nbytes: int, stride: int, offset: int
) -> None:
    count = 9
    source, packed = filled(driver, count * stride + offset, 4)
    target, before = filled(driver, count * stride + offset, 5)
    row = RegionRow(source + offset, target + offset, stride, stride, nbytes)
    stream = driver.new_stream()
    table = upload(driver, [row, row], stream)
    sources, targets = [3, 8, 3], [0, 5, 7]
    wanted = bytearray(before)
    for one, other in zip(sources, targets, strict=True):
        here, there = offset + one * stride, offset + other * stride
        wanted[there : there + nbytes] = packed[here : here + nbytes]
    submit(driver, way, table, sources, targets, stream)
    driver.synchronize(stream)
    assert read(driver, target, len(before)) == wanted


def submit(
    driver: Driver,
    way: str,
    table: RegionTable,
    sources: list[int],
    targets: list[int],
    stream: Any,
    stopped: bool = False,
) -> None:
    one, other = array("q", sources), array("q", targets)
    if way == "batch":
        driver.copy_batch(table, memoryview(one).cast("B"), memoryview(other).cast("B"), stream)
        return
    if way == "loop":
        copy_each(driver, table, sources, targets, stream)
        return
    ids = driver.allocate(len(sources) * 16)
    write(driver, ids, (one + other).tobytes(), stream)
    stop = driver.allocate(4)
    write(driver, stop, int(stopped).to_bytes(4, "little"), stream)
    driver.copy_kernel(table, ids, stop, len(sources), stream, 3)


def test_a_kernel_that_was_stopped_before_it_began_does_nothing(driver: Driver) -> None:
    (source, _), (target, before) = filled(driver, 4096, 6), filled(driver, 4096, 7)
    stream = driver.new_stream()
    table = upload(driver, [RegionRow(source, target, 1024, 1024, 1024)], stream)
    submit(driver, "kernel", table, [0], [1], stream, stopped=True)
    driver.synchronize(stream)
    assert read(driver, target, 4096) == before


@pytest.mark.parametrize(
    ("numbers", "word"), [((16, 32, 48), 16), ((8, 32, 48), 4), ((4, 8, 12), 4), ((16, 32, 63), 1)]
)
def test_the_widest_access_divides_everything(numbers: tuple[int, int, int], word: int) -> None:
    stride, address, nbytes = numbers
    assert RegionTable((RegionRow(address, address, stride, stride, nbytes),), 0).word == word
