"""The witness of a model's weights: a thread that looks at samples of them, again and again.

Weights can be written in ways that no hook sees: ``param.data.copy_``, an optimiser, a CUDA IPC
handle in another process.

    prepare   samples are taken, then the caller digests all weights: what is written in between
              or later differs from the samples
    watch     the digest is known: look at one part of the tensors after the other
    stop      weights will be written, or unmapped: nothing is read any more
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterable

from kvshm._base.resources import start_thread

from .samples import Samples
from .weights import Place


class WeightWitness:
    """Watches the weights of one model.  Any thread; methods wait a millisecond for a look."""

    def __init__(
        self,
        seconds: float,
        tell: Callable[[str], None],
        elsewhere: Callable[[], str] = lambda: "",
    ) -> None:
        """``seconds``: in which every tensor is looked at once.  ``tell``: called on the witness's
        thread, which stops, with the name of the first parameter that was found written.
        ``elsewhere``: names what has changed of weights that other processes hold, empty: none."""
        self._seconds = seconds
        self._tell, self._elsewhere = tell, elsewhere
        self._lock = threading.Lock()
        self._samples: Samples | None = None
        self._watching = False
        self._closed = False
        self._changed = threading.Event()
        """Set whenever the thread has to look at the fields above."""
        self._thread: threading.Thread | None = None

    def prepare(self, places: Iterable[Place], code: Callable[[], object] = lambda: None) -> None:
        """Take samples of all tensors, which must stay mapped until ``stop``, and of what ``code``
        returns, before the weights are digested.  Raises what torch raises."""
        with self._lock:
            self._watching, self._samples = False, None
            self._samples = Samples(places, random.Random().random, code)

    def watch(self, digests: dict[object, bytes]) -> None:
        """Begin to look.  ``digests``: of each tensor since ``prepare``, by ``digest_tensors``.
        Raises TransportError if no thread can be started."""
        with self._lock:
            if self._samples is None:
                return
            self._samples.digested(digests)
            self._watching = True
        if self._thread is None:
            thread = threading.Thread(target=self._run, name="kvshm-weights", daemon=True)
            start_thread(thread)
            self._thread = thread
        self._changed.set()

    def look(self) -> str:
        """Look at all tensors now; returns the name of one that was written, and stops, or empty if
        none was or nothing is watched."""
        return self._look(Samples.look_at_all)

    def stop(self) -> None:
        """Look no more, and let go of the tensors, which will be written, unmapped or exchanged."""
        with self._lock:
            self._watching, self._samples = False, None

    def close(self) -> None:
        """End the thread."""
        self.stop()
        self._closed = True
        self._changed.set()

    def _look(self, how: Callable[[Samples], str]) -> str:
        with self._lock:
            if not self._watching or self._samples is None:
                return ""
            try:
                found = self._elsewhere() or how(self._samples)
            except Exception as exc:  # any: what cannot be looked at any more may be written
                found = f"weights that cannot be read: {exc}"
            if found:
                self._watching, self._samples = False, None
            return found

    def _run(self) -> None:
        while not self._closed:
            if self._changed.wait(self._pause()):
                self._changed.clear()
            elif found := self._look(Samples.look):
                self._tell(found)

    def _pause(self) -> float | None:
        """Seconds until the next part; None while nothing is watched."""
        with self._lock:
            samples = self._samples if self._watching else None
            return self._seconds / max(1, len(samples.parts)) if samples else None
