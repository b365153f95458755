"""Which engines there are: asked on a thread of its own, since an engine that does not answer takes
a second each time."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import NamedTuple

from kvshm._base.resources import start_thread
from kvshm.api import Config, EngineLayout, EngineView, Reader

LOOK_SECONDS = 1.0
"""Between two looks."""


class Look(NamedTuple):
    """The engines that have answered, keepers left out."""

    engines: list[EngineView]
    layouts: Mapping[str, EngineLayout]
    """By fingerprint, as far as engines say how their blocks are made up."""


class Looks:
    """Looks again and again, until it is closed."""

    def __init__(self, config: Config) -> None:
        """Raises TransportError if there can be no thread."""
        self._reader = Reader(config)
        self._ended = threading.Event()
        self._lock = threading.Lock()
        self._latest: Look | None = None
        self._layouts: dict[str, EngineLayout] = {}
        self._failed: Exception | None = None
        start_thread(threading.Thread(target=self._run, name="kvshm-looks", daemon=True))

    def latest(self) -> Look | None:
        """Return the look that has ended since the last call, if one has.  Does not block.  Raises
        what has ended the thread."""
        with self._lock:
            if self._failed is not None:
                raise self._failed
            latest, self._latest = self._latest, None
            return latest

    def close(self) -> None:
        """End the thread; does not wait for engines that do not answer."""
        self._ended.set()

    def _run(self) -> None:
        try:
            while not self._ended.is_set():
                look = self._look()
                with self._lock:
                    self._latest = look
                self._ended.wait(LOOK_SECONDS)
        except Exception as exc:  # any, else the keeper would go on and hear of nobody: see latest
            with self._lock:
                self._failed = exc
        finally:
            self._reader.close()

    def _look(self) -> Look:
        engines = [view for view in self._reader.engines() if view.alive and not view.keeps]
        layouts = {}
        for view in engines:
            layout = self._layouts.get(view.fingerprint) or self._reader.layout(view.epoch)
            if layout is not None:
                layouts[view.fingerprint] = layout
        self._layouts = layouts
        return Look(engines, layouts)
