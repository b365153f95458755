"""Loggers whose lines vLLM shows, and how a line names an engine.

vLLM configures one logger, ``vllm``, and leaves the root logger at WARNING: a line logged
as ``kvshm._node.peers`` would be lost in every engine.  So kvshm logs below ``vllm``.  vLLM shows
the file of a line but not its logger, so each line begins with ``kvshm:`` for a search.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any

REPEAT_SECONDS = 60.0
MAX_KINDS = 256
"""Kinds of lines that are remembered."""

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
    """Return how each line names an engine: ``vllm-7 (epoch 1f5c90e2a8b34d67, pid 7)``.  Unknown
    parts are left out."""
    about = [f"epoch {epoch:016x}"] if epoch else []
    about += [f"pid {pid}"] if pid else []
    return f"{name} ({', '.join(about)})".lstrip()


class RateLimit:
    """Lets a log line of one kind through once in ``seconds``, by default a minute.  ``math.inf``:
    once for good, or until MAX_KINDS other kinds were logged.  Any thread."""

    def __init__(self, clock: Callable[[], float], seconds: float = REPEAT_SECONDS) -> None:
        self._clock = clock
        self._seconds = seconds
        self._last_logged: dict[str, float] = {}

    def allows(self, text: str) -> bool:
        """Whether to log ``text`` now.  Its kind is the part before the colon."""
        kind, now = text.partition(":")[0], self._clock()
        if now - self._last_logged.get(kind, -self._seconds) < self._seconds:
            return False
        if len(self._last_logged) >= MAX_KINDS:
            self._last_logged.clear()
        self._last_logged[kind] = now
        return True


def set_level(level: str) -> None:
    """Log lines of this severity and above (KVSHM_LOG_LEVEL), whatever vLLM's own level is.

    vLLM's handlers have levels too; lines below those levels go through handlers of kvshm.
    """
    ours = logging.getLogger(_OURS)
    ours.setLevel(level)
    for old in [h for h in ours.handlers if isinstance(h, _LowerLevel)]:
        ours.removeHandler(old)
    for handler in logging.getLogger("vllm").handlers:
        if isinstance(handler, logging.StreamHandler) and handler.level > ours.level:
            ours.addHandler(_LowerLevel(handler))


@contextmanager
def shown_on_stderr(level: str) -> Iterator[None]:
    """A context in which kvshm's lines are shown on stderr, as vLLM would show them: for a program
    without vLLM."""
    handler, logger = logging.StreamHandler(), logging.getLogger(_OURS)
    handler.setFormatter(logging.Formatter("%(levelname)s %(asctime)s %(message)s"))
    before = logger.level, logger.propagate
    logger.addHandler(handler)
    logger.setLevel(level)
    logger.propagate = False
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before[0])
        logger.propagate = before[1]


class _LowerLevel(logging.StreamHandler):  # type: ignore[type-arg]  # vLLM's stream has any type
    """A handler that shows only the lines below the level of another handler."""

    def __init__(self, other: logging.StreamHandler) -> None:  # type: ignore[type-arg]
        super().__init__(other.stream)
        self._other = other
        self.setFormatter(other.formatter)

    def filter(self, record: logging.LogRecord) -> bool:
        return record.levelno < self._other.level
