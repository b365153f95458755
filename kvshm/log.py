"""Loggers whose lines vLLM shows, and how a line names an engine.

vLLM configures one logger, ``vllm``, and leaves the root logger at WARNING: a line logged
as ``kvshm.node.peers`` would be lost in every engine.  So kvshm logs below ``vllm``.  vLLM shows
the name of a line's file but not of its logger, so each line begins with ``kvshm:`` to be found.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, MutableMapping
from typing import Any

SAY_AGAIN_SECONDS = 60.0
MAX_KINDS = 256
"""Kinds that are remembered."""

_OURS = "vllm.kvshm"


class Logger(logging.LoggerAdapter[logging.Logger]):
    """A logger whose lines begin with ``kvshm:``."""

    def process(
        self, msg: Any, kwargs: MutableMapping[str, Any]
    ) -> tuple[Any, MutableMapping[str, Any]]:
        return f"kvshm: {msg}", kwargs


def logger(name: str) -> Logger:
    """Return the logger of module ``name`` (its ``__name__``) below ``vllm``."""
    return Logger(logging.getLogger("vllm." + name), {})


def engine_name(epoch: int = 0, name: str = "", pid: int = 0) -> str:
    """Return how each line names an engine: ``vllm-7 (epoch 1f5c90e2a8b34d67, pid 7)``, without
    what is not known."""
    about = [f"epoch {epoch:016x}"] if epoch else []
    about += [f"pid {pid}"] if pid else []
    return f"{name} ({', '.join(about)})".lstrip()


class Seldom:
    """Lets a complaint of one kind pass now and then, not each time.  Any thread."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._said: dict[str, float] = {}

    def passes(self, text: str) -> bool:
        """Whether to log ``text`` now.  Its kind is what stands before the colon."""
        kind, now = text.partition(":")[0], self._clock()
        if now - self._said.get(kind, -SAY_AGAIN_SECONDS) < SAY_AGAIN_SECONDS:
            return False
        if len(self._said) >= MAX_KINDS:
            self._said.clear()
        self._said[kind] = now
        return True


def set_level(level: str) -> None:
    """Log what is at least this severe (KVSHM_LOG_LEVEL), whatever vLLM's own level is.

    vLLM's handler has a level too; what lies below it goes through handlers of ours.
    """
    ours = logging.getLogger(_OURS)
    ours.setLevel(level)
    for old in [h for h in ours.handlers if isinstance(h, _Finer)]:
        ours.removeHandler(old)
    for handler in logging.getLogger("vllm").handlers:
        if isinstance(handler, logging.StreamHandler) and handler.level > ours.level:
            ours.addHandler(_Finer(handler))


class _Finer(logging.StreamHandler):  # type: ignore[type-arg]  # whatever stream vLLM's has
    """Shows what another handler leaves out for its level, and nothing else."""

    def __init__(self, coarse: logging.StreamHandler) -> None:  # type: ignore[type-arg]
        super().__init__(coarse.stream)
        self._coarse = coarse
        self.setFormatter(coarse.formatter)

    def filter(self, record: logging.LogRecord) -> bool:
        return record.levelno < self._coarse.level
