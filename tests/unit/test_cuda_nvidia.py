"""The real calls of the driver, ending in a library that is played (tests/played_cuda): contexts,
what a driver refuses, and what is given back."""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from kvshm.transport.cuda.driver import CudaError, RegionRow, RegionTable
from kvshm.transport.cuda.probe import upload

from ..descriptors import left_open, open_files
from .test_cuda_driver import filled, played_driver, submit


def test_a_driver_that_tells_ranges_only_as_attributes_is_asked_for_these(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """cuMemGetAddressRange is documented for memory of this process only."""
    driver = played_driver(request)
    monkeypatch.setenv("PLAYED_CUDA_NO_RANGE", "1")
    base = driver.allocate_shared(3 << 21)
    assert driver.address_range(base + 12345) == (base, 3 << 21)
    with pytest.raises(CudaError, match="cuPointerGetAttribute"):
        driver.address_range(12345)


def test_shared_memory_shares_no_page_of_the_gpu(request: pytest.FixtureRequest) -> None:
    """A handle opens whole pages, and each of them once."""
    driver = played_driver(request)
    assert driver.address_range(driver.allocate_shared(960))[1] == 2 << 20


def test_a_gpu_without_memory_pools_is_refused_by_name(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    played_driver(request)
    from kvshm.transport.cuda import nvidia

    monkeypatch.setattr(nvidia, "_pools", {})
    monkeypatch.setenv("PLAYED_CUDA_NO_POOLS", "1")
    with pytest.raises(CudaError, match="NOT_SUPPORTED: this GPU has no memory pools"):
        nvidia.NvidiaDriver(0)


def test_bindings_that_keep_pythons_lock_are_refused_by_name(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 12.8.0 and 12.9.0: who waits for the GPU stops the thread that runs the model."""
    played_driver(request)
    from kvshm.transport.cuda import nvidia

    monkeypatch.setattr("cuda.bindings.__version__", "12.9.0")
    with pytest.raises(CudaError, match=r"cuda-bindings: 12\.9\.0 would stop .* install 12\.9\.1"):
        nvidia.NvidiaDriver(0)


def test_a_handle_of_a_process_with_the_same_pid_is_refused_with_the_remedy(
    request: pytest.FixtureRequest,
) -> None:
    """In another PID namespace; here, of this very process, which CUDA tells by its PID as well."""
    driver = played_driver(request)
    handle = driver.ipc_handle(driver.allocate_shared(1 << 21))
    with pytest.raises(CudaError, match=rf"PID \({os.getpid()}\) in another PID namespace; give"):
        driver.ipc_open(handle, "")


def test_the_error_that_ended_a_mapping_is_the_one_that_is_reported(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = played_driver(request)
    from cuda.bindings import driver as cu

    address, nbytes = driver.vmm_allocate(1 << 20, fabric=False)
    descriptor = driver.vmm_descriptor(address)
    for name in ("cuMemSetAccess", "cuMemUnmap", "cuMemAddressFree"):
        monkeypatch.setattr(cu, name, refusal(name))
    with pytest.raises(CudaError, match=r"^cuMemSetAccess: CUDA_ERROR_UNKNOWN"):
        driver.vmm_map(descriptor, nbytes)
    os.close(descriptor)


def refusal(name: str) -> Any:
    from cuda.bindings import driver as cu

    def call(*_: object) -> tuple[Any]:
        return (cu.CUresult.CUDA_ERROR_UNKNOWN,)

    call.__name__ = name
    return call


def test_a_thread_that_was_entered_pushes_no_context(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = played_driver(request)
    from kvshm.transport.cuda.nvidia import NvidiaDriver

    pushed: list[str] = []
    push = NvidiaDriver._pushed
    monkeypatch.setattr(
        NvidiaDriver,
        "_pushed",
        lambda self, context: pushed.append(threading.current_thread().name) or push(self, context),
    )

    def use(enter: bool) -> None:
        if enter:
            driver.enter_thread()
        driver.free(filled(driver, 4096, 1)[0])

    for enter in (True, False):
        thread = threading.Thread(target=use, args=(enter,), name=f"entered: {enter}")
        thread.start()
        thread.join()
    assert set(pushed) == {"entered: False"}


def test_bindings_without_the_batched_copy_say_so(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As an error of the driver, which makes the transport use another way."""
    driver = played_driver(request)
    (source, _), (target, _) = filled(driver, 4096, 8), filled(driver, 4096, 9)
    stream = driver.new_stream()
    table = upload(driver, [RegionRow(source, target, 64, 64, 64)], stream)
    monkeypatch.delattr("cuda.bindings.driver.CUmemcpyAttributes_v1")
    with pytest.raises(CudaError, match="older than"):
        submit(driver, "batch", table, [1], [1], stream)


def test_without_triton_the_kernel_is_refused_by_name(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = played_driver(request)
    monkeypatch.setitem(sys.modules, "kvshm.transport.cuda.kernel", None)
    table = RegionTable((RegionRow(0, 0, 16, 16, 16),), 0)
    with pytest.raises(CudaError, match="triton: the copy kernel cannot be compiled"):
        driver.prepare_kernel(table)


def mapped_as(address: int) -> str:
    lines = Path("/proc/self/maps").read_text().splitlines()
    return next((line.split()[1] for line in lines if line.startswith(f"{address:x}-")), "")


@pytest.mark.parametrize(("refused", "rights"), [(False, "r--s"), (True, "rw-s")])
def test_foreign_vmm_memory_is_mapped_read_only_where_the_driver_can(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, refused: bool, rights: str
) -> None:
    driver = played_driver(request)
    if refused:
        monkeypatch.setenv("PLAYED_CUDA_NO_READ_ONLY", "1")
    address, nbytes = driver.vmm_allocate(1 << 20, fabric=False)
    descriptor = driver.vmm_descriptor(address)
    mapped = driver.vmm_map(descriptor, nbytes)
    os.close(descriptor)
    assert mapped_as(mapped) == rights
    driver.vmm_unmap(mapped, nbytes)


def test_what_was_mapped_and_unmapped_leaves_no_descriptor_and_no_addresses(
    request: pytest.FixtureRequest,
) -> None:
    driver = played_driver(request)
    address, nbytes = driver.vmm_allocate(1 << 20, fabric=False)
    descriptor = driver.vmm_descriptor(address)
    before = open_files()
    mapped = driver.vmm_map(descriptor, nbytes)
    assert mapped_as(mapped)
    driver.vmm_unmap(mapped, nbytes)
    assert not mapped_as(mapped)
    assert not left_open(before)
    os.close(descriptor)


def test_another_gpu_s_context_is_current_inside_and_the_own_one_again_afterwards(
    request: pytest.FixtureRequest,
) -> None:
    driver: Any = played_driver(request)
    from cuda.bindings import driver as cu

    def current() -> int:
        return int(cu.cuCtxGetCurrent()[1])

    other = driver._context_of("a1" * 16)
    with driver.in_context():
        own = current()
        with driver.in_context(other):
            assert current() == int(other) != own
        assert current() == own
