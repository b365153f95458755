"""A load like that of a model that decodes, and a cache beside it: one engine's GPU work.

A step is the matrix products of one decoding step of an 8B model, launched one by one; the next
step begins when the GPU has done it.  There are weights for a few layers only, used in turn: more
than the GPU's L2 cache holds, so that each step reads them from memory as a model does.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any

from gpu_peer import Cache, GpuPeer, answer_calls
from gpu_sizes import sized
from measurement import percentiles

WIDTH, INNER, QKV = sized((4096, 14336, 6144), (64, 128, 96))
LAYERS, OF_WEIGHTS, BATCH = 32, 4, sized(32, 2)
"""Layers of a step; layers that have weights of their own; requests."""


class Decoder:
    """Runs steps on a thread, or one at a time on the caller's."""

    def __init__(self) -> None:
        import torch

        self._torch, self._device = torch, torch.cuda.current_device()

        def make(*size: int) -> Any:
            return torch.randn(*size, device="cuda", dtype=torch.bfloat16) * size[0] ** -0.5

        self._weights = [
            (make(WIDTH, QKV), make(WIDTH, WIDTH), make(WIDTH, 2 * INNER), make(INNER, WIDTH))
            for _ in range(OF_WEIGHTS)
        ]
        self._hidden = make(BATCH, WIDTH)
        self._running = threading.Event()
        self._thread: threading.Thread | None = None
        self._failed: Exception | None = None
        self.seconds: list[float] = []
        """Of the steps so far."""

    def step(self) -> None:
        """One step, until the GPU has done it."""
        begun = time.perf_counter()
        hidden = self._hidden
        for layer in range(LAYERS):
            qkv, out, up, down = self._weights[layer % OF_WEIGHTS]
            hidden = (hidden @ qkv)[:, :WIDTH] @ out
            hidden = (hidden @ up)[:, :INNER] @ down
        self._torch.cuda.current_stream().synchronize()
        self.seconds.append(time.perf_counter() - begun)

    def start(self) -> None:
        """Run steps on a thread of their own until ``stop``."""
        if self._thread is None:
            self.seconds.clear()
            self._running.set()
            self._thread = threading.Thread(target=self._run, daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """End the thread.  Raises what a step raised."""
        self._running.clear()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._failed is not None:
            raise self._failed

    def _run(self) -> None:
        try:
            self._torch.cuda.set_device(self._device)
            while self._running.is_set():
                self.step()
        except Exception as exc:  # any: raised where the thread is stopped
            self._failed = exc

    def milliseconds(self) -> list[float]:
        """Of the steps that ended since the last call."""
        taken, self.seconds = self.seconds, []
        return [round(second * 1e3, 4) for second in taken]


class DecodingCache(Cache):
    """A cache in a process that can decode beside it; called by a GpuPeer."""

    def __init__(self, device: int) -> None:
        super().__init__(device)
        self.decoder: Decoder | None = None

    def decode(self, on: bool) -> None:
        """Begin to decode, or stop."""
        if self.decoder is None:
            self.decoder = Decoder()
            self.decoder.step()  # the first one loads kernels
        if on:
            self.decoder.start()
        else:
            self.decoder.stop()

    def steps(self) -> list[float]:
        """Milliseconds of the steps that ended since the last call."""
        assert self.decoder is not None
        return self.decoder.milliseconds()


def decoding_peer(**options: Any) -> GpuPeer:
    """A process with a DecodingCache."""
    return GpuPeer(program=__file__, **options)


class Beside:
    """Who decodes while something is measured: nobody, the exporter, the importer (this process's
    own thread), or both."""

    STATES = ("idle", "exporter", "importer", "both")

    def __init__(self, exporter: GpuPeer) -> None:
        self._exporter = exporter
        self._own = Decoder()
        self._own.step()

    def begin(self, state: str) -> None:
        if state in ("exporter", "both"):
            self._exporter.call("decode", on=True)
        if state in ("importer", "both"):
            self._own.start()

    def end(self) -> None:
        self._own.stop()
        self._exporter.call("decode", on=False)

    def taken(self, state: str) -> dict[str, list[float]]:
        """Milliseconds of the steps that ended since the last call, of each that decodes."""
        found = {}
        if state in ("exporter", "both"):
            found["exporter"] = self._exporter.call("steps")
        if state in ("importer", "both"):
            found["importer"] = self._own.milliseconds()
        return found


def together(rounds: Sequence[dict[str, list[float]]]) -> dict[str, dict[str, float]]:
    """Percentiles of each decoder's steps over several rounds; nothing for one with too few.  The
    first step of a round is left out: it began beside what ran before."""
    found = {}
    for who in {who: None for steps in rounds for who in steps}:
        every = [one for steps in rounds for one in steps.get(who, [])[1:]]
        found[who] = percentiles(every) if len(every) > 1 else {}
    return found


if __name__ == "__main__":
    answer_calls(DecodingCache)
