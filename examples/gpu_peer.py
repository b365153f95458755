"""One process with a KV cache in GPU memory, told what to do line by line.

GPU tests, examples and benchmarks need several processes with a CUDA context each.  A
``GpuPeer`` starts this file as a program and calls methods of the ``Cache`` in it; every call
is one JSON line each way::

    with GpuPeer() as a, GpuPeer() as b:
        a.call("make", seed=1), b.call("make", seed=2)
        b.call("attach", descriptor=a.call("export", epoch=7))
        b.call("copy", source=[3], target=[5])
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Self

from gpu_allocators import ForeignMemory, cumem_allocate
from gpu_node import hand_out, own_socket, shared_directory, table_of

from kvshm._base.ids import BlockId, Epoch, Rank

CALL_TIMEOUT_S = 120.0
END_TIMEOUT_S = 20.0
"""For a process to end by itself before it is killed."""
CONNECTIONS = {"CUDA_DEVICE_MAX_CONNECTIONS": "32"}
"""Hardware queues of a process: of 8, the default, a stream that waits may share one with a stream
that it waits for."""


class PeerError(RuntimeError):
    """A call failed in the other process; says how."""


class GpuPeer:
    """Another process with a cache; a context manager."""

    def __init__(
        self,
        device: int = 0,
        visible: str | None = None,
        program: str = __file__,
        environment: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """``visible`` sets CUDA_VISIBLE_DEVICES for it; ``program`` answers by ``answer_calls``
        and is given the device's number."""
        directory = {"GPU_PEER_DIR": str(shared_directory())}
        environment = {**CONNECTIONS, **os.environ, "GPU_PEER": "1", **directory, **environment}
        if visible is not None:
            environment["CUDA_VISIBLE_DEVICES"] = visible
        self.process = subprocess.Popen(
            [sys.executable, program, str(device)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment,
        )  # fmt: skip

    def call(self, method: str, **arguments: Any) -> Any:
        """Call a method of its Cache and return the answer.  Raises PeerError."""
        self.send(method, **arguments)
        return self.answer()

    def send(self, method: str, **arguments: Any) -> None:
        """Call a method without waiting; ``answer`` waits."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps([method, arguments]) + "\n")
        self.process.stdin.flush()

    def answer(self) -> Any:
        """What the oldest unanswered call returned; PeerError if it raised or the process died
        or does not answer."""
        assert self.process.stdout is not None
        timer = threading.Timer(CALL_TIMEOUT_S, self.process.kill)
        timer.start()
        try:
            line = self.process.stdout.readline()
        finally:
            timer.cancel()
        if not line:
            raise PeerError(f"the process ended with status {self.process.wait()}")
        ok, value = json.loads(line)
        if not ok:
            raise PeerError(value)
        return value

    def kill(self) -> None:
        """End it as a crash would."""
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        with contextlib.suppress(OSError):
            self.process.stdin.close()
        try:
            self.process.wait(timeout=END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.kill()
        self.process.stdout.close()


class Cache:
    """What runs in the other process: a cache of random bytes and its transport."""

    def __init__(self, device: int) -> None:
        import torch

        self.torch = torch
        torch.cuda.set_device(device)
        self.copies: dict[int, Any] = {}
        self.attachments: list[Any] = []
        self.busy = threading.Event()

    # -- memory

    def make(
        self,
        seed: int,
        layers: int = 4,
        blocks: int = 64,
        block_bytes: int = 65536,
        outermost: str = "layer",
        kind: str = "caching",
        lead: int = 0,
        **options: Any,
    ) -> int:
        """Make the cache and its transport; return its address.

        ``outermost``: "layer" or "block".  ``kind``: "caching" (torch's allocator), "fd" or
        "fabric" (VMM), "cumem" (VMM as vLLM makes it), "pool" (cudaMallocAsync).  ``lead``:
        bytes between the beginning of the allocation and the cache.
        """
        from kvshm.interfaces import Region
        from kvshm.transport.cuda.export import DeviceMemory
        from kvshm.transport.cuda.transport import CudaIpcTransport

        nbytes = layers * blocks * block_bytes
        self.tensor = self._memory(nbytes + lead, kind)[lead:]
        self.layers, self.blocks, self.block_bytes = layers, blocks, block_bytes
        self.outermost = outermost
        step = blocks if outermost == "layer" else 1
        stride = block_bytes if outermost == "layer" else layers * block_bytes
        regions = [
            Region(layer * step * block_bytes, stride, block_bytes, blocks)
            for layer in range(layers)
        ]
        self.fill(seed)
        self.transport = CudaIpcTransport(
            DeviceMemory(self.tensor.data_ptr(), nbytes, self.tensor), regions, 0,
            own_socket(), **options,
        )  # fmt: skip
        return int(self.tensor.data_ptr())

    def _memory(self, nbytes: int, kind: str) -> Any:
        from kvshm.transport.cuda.transport import current_driver

        torch = self.torch
        if kind == "caching":
            return torch.empty(nbytes, dtype=torch.uint8, device="cuda")
        driver = current_driver()
        if kind == "pool":
            address = driver.allocate(nbytes)
        elif kind == "cumem":
            address = cumem_allocate(driver, nbytes)
        else:
            address, self.vmm_bytes = driver.vmm_allocate(nbytes, fabric=kind == "fabric")
        return torch.as_tensor(ForeignMemory(address, nbytes), device="cuda")

    def contents(self, seed: int, blocks: int) -> Any:
        """What a cache of so many blocks is filled with, as [block, layer, byte] on the host."""
        torch = self.torch
        generator, count = (
            torch.Generator().manual_seed(seed),
            blocks * self.layers * self.block_bytes,
        )
        # Eight bytes at a time: tests fill and compare gigabytes.
        words = torch.randint(-(1 << 63), (1 << 63) - 1, (count // 8 + 1,), generator=generator)
        return words.view(torch.uint8)[:count].view(blocks, self.layers, self.block_bytes)

    def view(self) -> Any:
        """The cache as [block, layer, byte], whatever its layout."""
        if self.outermost == "layer":
            return self.tensor.view(self.layers, self.blocks, self.block_bytes).transpose(0, 1)
        return self.tensor.view(self.blocks, self.layers, self.block_bytes)

    def fill(self, seed: int) -> None:
        self.view().copy_(self.contents(seed, self.blocks))
        self.torch.cuda.synchronize()

    def blank(self) -> None:
        """Overwrite the whole cache, faster than ``fill``."""
        self.tensor.zero_()
        self.torch.cuda.synchronize()

    def wrong(
        self, own: int, peer: int, peer_blocks: int, source: list[int], target: list[int]
    ) -> int:
        """How many bytes of the whole cache differ from what it must hold after it was filled
        with seed ``own`` and these blocks were copied from a cache of seed ``peer``."""
        wanted = self.contents(own, self.blocks)
        wanted[target] = self.contents(peer, peer_blocks)[source]
        return int((self.view().cpu() != wanted).sum())

    # -- transport

    def export(self, epoch: Epoch) -> str:
        import msgspec

        return msgspec.msgpack.encode(self.transport.export(epoch)).hex()

    def attach(self, descriptor: str) -> dict[str, Any]:
        """Attach a peer; the route, and how long it took."""
        import msgspec

        from kvshm.interfaces import MemoryDescriptor

        found = msgspec.msgpack.decode(bytes.fromhex(descriptor), type=MemoryDescriptor)
        begun = time.perf_counter()
        self.attachments.append(self.transport.attach(found))
        seconds = time.perf_counter() - begun
        return {"route": self.attachments[-1].route.value, "seconds": seconds}

    def detach(self) -> None:
        """Close all attachments, and wait until their memory is unmapped."""
        while self.attachments:
            self.attachments.pop().close()
        deadline = time.monotonic() + 30
        while len(self.transport.mappings):
            assert time.monotonic() < deadline, "mappings stay open"
            time.sleep(0.001)

    def cycle(self, descriptor: str, times: int) -> None:
        for _ in range(times):
            self.attach(descriptor)
            self.detach()

    def begin(self, source: list[BlockId], target: list[BlockId]) -> None:
        """Begin a copy of the last attachment."""
        self.copies[0] = self.attachments[-1].begin_copy(source, target)

    def finish(self) -> str:
        """Wait for the copy that was begun."""
        from kvshm.interfaces import CopyState

        deadline = time.monotonic() + 60
        while (state := self.copies[0].poll()) is CopyState.PENDING:
            assert time.monotonic() < deadline, "the copy does not end"
        return str(state.value)

    def copy(self, source: list[BlockId], target: list[BlockId]) -> str:
        self.begin(source, target)
        return self.finish()

    def checksum(self, blocks: list[BlockId]) -> list[int]:
        return list(self.transport.checksum(blocks))

    # -- with slots: an exporter that reuses its blocks while others copy them

    def publish_all(self, epoch: Epoch) -> None:
        """Create a slot table, publish all blocks and hand the table out (``table_of``)."""
        from kvshm._base.ids import Fingerprint
        from kvshm._shm.own_slot_table import OwnSlotTable, RankSlotTable, TableSpec

        spec = TableSpec("gpu", "a", self.blocks, 16, 1, Fingerprint(b"f" * 32))
        self.table = OwnSlotTable.create(spec, epoch)
        self.of_rank = RankSlotTable.from_fd(self.table.name, self.table.descriptor(True))
        self.of_rank.set_life(Rank(0))
        for block in block_ids(self.blocks):
            self._publish(block)
        self.handout = hand_out(self.table)

    def serve(self, epoch: Epoch) -> None:
        """Publish all blocks and rewrite them at random until ``rest``."""
        self.publish_all(epoch)
        self._churner = threading.Thread(target=self._churn, daemon=True)
        self.busy.set()
        self._churner.start()

    def _publish(self, block: BlockId) -> None:
        from kvshm._base.ids import BlockHash, Generation
        from kvshm._shm.layout import BlockRecord, pack_records

        self.view()[block] = self.torch.randint(
            0, 256, (self.layers, self.block_bytes), dtype=self.torch.uint8, device="cuda"
        )
        self.of_rank.set_checksum(Rank(0), block, self.transport.checksum([block])[0])
        digest = BlockHash(random.randbytes(32))
        record = BlockRecord(digest, block, Generation(0), 0)
        assert self.table.publish(pack_records([record]), bytes(8))

    def _churn(self) -> None:
        """Retract, free, rewrite on the GPU, and publish when the GPU has done it."""
        self.torch.cuda.set_device(self.tensor.device)
        while self.busy.is_set():
            block = BlockId(random.randrange(self.blocks))
            _, draining = self.table.retract([block])
            if draining:
                self.table.force(draining)
            self._publish(block)

    def rest(self) -> None:
        """End the rewriting and hand the table out no more."""
        self.busy.clear()
        self._churner.join()
        self.unpublish()

    def unpublish(self) -> None:
        """Hand the table out no more."""
        self.handout.close()
        self.of_rank.close()
        self.table.close()

    def judge(self, epoch: Epoch, seconds: float) -> dict[str, int]:
        """Copy published blocks, re-check, and compare what was accepted: how many were
        delivered, discarded because they had been reused meanwhile, and delivered wrongly."""
        from kvshm._shm.layout import RECORD_BYTES

        slots = table_of(epoch)
        seen = {"delivered": 0, "discarded": 0, "wrong": 0, "failed": 0}
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            records = slots.scan()[: 8 * RECORD_BYTES]
            self._judge(slots, records, seen)
        slots.close()
        return seen

    def _judge(self, slots: Any, packed: bytes, seen: dict[str, int]) -> None:
        from kvshm._shm.layout import unpack_records

        records = list(unpack_records(packed))
        targets = block_ids(len(records))
        if self.copy([r.block_id for r in records], targets) != "done":
            seen["failed"] += 1
            return
        wanted = [slots.checksum(0, r.block_id) for r in records]
        good = slots.recheck(0, packed)
        found = self.transport.checksum(targets)
        for ok, want, have in zip(good, wanted, found, strict=True):
            seen["delivered" if ok else "discarded"] += 1
            seen["wrong"] += ok and want != have

    # -- the device

    def burn(self, on: bool) -> None:
        """Keep the GPU busy with matrix products, or stop."""
        self.burning = on
        if on:
            self._burner = threading.Thread(target=self._burn, daemon=True)
            self._burner.start()
        else:
            self._burner.join()

    def _burn(self) -> None:
        torch = self.torch
        torch.cuda.set_device(self.tensor.device)
        square = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
        while self.burning:
            for _ in range(10):
                torch.mm(square, square)
            torch.cuda.current_stream().synchronize()

    def memory_used(self) -> int:
        """Bytes in use on the whole device."""
        free, total = self.torch.cuda.mem_get_info()
        return int(total - free)

    def healthy(self) -> bool:
        """Whether this process's context still works."""
        probe = self.torch.ones(1024, device="cuda").sum()
        self.torch.cuda.synchronize()
        return bool(probe.item() == 1024)

    def close(self) -> None:
        self.transport.close()


def block_ids(count: int) -> list[BlockId]:
    """The first so many."""
    return [BlockId(block) for block in range(count)]


def answer_calls(make: Callable[[int], Any]) -> None:
    """Be the program of a GpuPeer: call methods of what ``make(device)`` returns."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    called = make(int(sys.argv[1]))
    for line in sys.stdin:
        method, arguments = json.loads(line)
        try:
            reply = [True, getattr(called, method)(**arguments)]
        except Exception as exc:
            reply = [False, f"{type(exc).__name__}: {exc}"]
        print(json.dumps(reply), file=answers, flush=True)


if __name__ == "__main__":
    answer_calls(Cache)
