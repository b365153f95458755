"""Loggers whose lines vLLM shows, and how a line names an engine.

vLLM configures one logger, ``vllm``, and leaves the root logger at WARNING: a line logged
as ``kvshm._node.peers`` would be lost in every engine.  So kvshm logs below ``vllm``.  vLLM shows
the file of a line but not its logger, so each line begins with ``kvshm:`` for a search.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Hashable, MutableMapping
from typing import Any

from .core_lines import CoreLine
from .forks import guard_forks
from .log_format import PREFIX, PlainText
from .log_lines import FilledLine, LogLine

REPEAT_SECONDS = 60.0
MAX_KINDS = 256
"""Kinds of lines that are remembered."""

MAX_LINES = 200
"""How many lines a process of an engine logs within LIMIT_SECONDS at most."""
LIMIT_SECONDS = 60.0

OURS = "vllm.kvshm"
"""The logger above all others of kvshm."""
_PAST_LIMITS = "kvshm_past_limits"
"""Attribute of a log record that no limit counts."""


class Logger(logging.LoggerAdapter[logging.Logger]):
    """A logger whose lines begin with ``kvshm:`` and are printable, whatever they quote."""

    def line(
        self, line: LogLine, *args: object, exc_info: Any = None, level: int | None = None
    ) -> None:
        """Log a line of a component's list; ``args`` fill its placeholders.  ``level``: another
        one than the list's, where that depends on the situation."""
        severity = line.level if level is None else level
        self.log(severity, line.text, *args, exc_info=exc_info, stacklevel=2)

    def filled(self, filled: FilledLine, level: int | None = None) -> None:
        """Log a line that has its arguments, with another level if one is given."""
        severity = filled.line.level if level is None else level
        self.log(severity, filled.line.text, *filled.args, stacklevel=2)

    def process(
        self, msg: Any, kwargs: MutableMapping[str, Any]
    ) -> tuple[Any, MutableMapping[str, Any]]:
        return f"{PREFIX}{msg}", kwargs


def logger(name: str) -> Logger:
    """Return the logger of module ``name`` (its ``__name__``) below ``vllm``."""
    below = logging.getLogger("vllm." + name)
    below.addFilter(LINE_LIMIT)
    below.addFilter(_PLAIN_TEXT)
    return Logger(below, {})


def engine_name(epoch: int = 0, name: str = "", pid: int = 0) -> str:
    """Return how each line names an engine: ``vllm-7 (epoch 1f5c90e2a8b34d67, pid 7)``.  Unknown
    parts are left out."""
    about = [f"epoch {epoch:016x}"] if epoch else []
    about += [f"pid {pid}"] if pid else []
    return f"{name} ({', '.join(about)})".lstrip()


class LineLimit(logging.Filter):
    """A net below all other limits: lets ``most`` lines through in ``seconds``, and says once that
    more were left out and, with the first line after that time, how many.  Any thread."""

    def __init__(
        self,
        say: Callable[[str], object],
        most: int = MAX_LINES,
        seconds: float = LIMIT_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``say`` must log past this limit, as the function ``say`` does."""
        super().__init__()
        self._say, self._clock = say, clock
        self._most, self._seconds = most, seconds
        self.reset()

    def reset(self) -> None:
        """Count from now on."""
        self._since, self._lines, self._left_out = self._clock(), 0, 0

    def filter(self, record: logging.LogRecord) -> bool:
        if hasattr(record, _PAST_LIMITS):
            return True
        if self._clock() - self._since >= self._seconds:
            left_out = self._left_out
            self.reset()
            if left_out:
                self._say(str(CoreLine.LINES_LEFT_OUT.fill(left_out)))
        self._lines += 1
        if self._lines <= self._most:
            return True
        self._left_out += 1
        if self._left_out == 1:
            self._say(str(CoreLine.TOO_MANY_LINES.fill(self._most, self._seconds)))
        return False


def say(text: str) -> None:
    """Log a warning about the log itself, past all limits."""
    logging.getLogger(OURS).warning("%s%s", PREFIX, text, extra={_PAST_LIMITS: True})


LINE_LIMIT = LineLimit(say)
"""Of all lines of this process."""
_PLAIN_TEXT = PlainText()


class LogLimit:
    """Lets a log line through once in ``seconds``, by default a minute; ``math.inf``: once for
    good, or until ``most`` other kinds were logged.  Any thread."""

    def __init__(
        self,
        seconds: float = REPEAT_SECONDS,
        clock: Callable[[], float] = time.monotonic,
        most: int = MAX_KINDS,
    ) -> None:
        self._seconds, self._clock, self._most = seconds, clock, most
        self._last_logged: dict[tuple[Hashable, ...], float] = {}  # the oldest first
        self._lock = threading.Lock()
        guard_forks(self)

    def allows(self, line: Hashable, *about: Hashable) -> bool:
        """Whether to log ``line`` now.  ``about``: what tells apart lines that are limited each by
        itself, for example the engine that they name."""
        kind = (line, *about)
        with self._lock:
            now = self._clock()
            last = self._last_logged.pop(kind, None)
            if last is not None and now - last < self._seconds:
                self._last_logged[kind] = last
                return False
            if len(self._last_logged) >= self._most:
                del self._last_logged[next(iter(self._last_logged))]
            self._last_logged[kind] = now
            return True

    def forget(self, *lines: Hashable) -> None:
        """Let the next of these lines through, of whatever it is about."""
        with self._lock:
            for kind in [kind for kind in self._last_logged if kind[0] in lines]:
                del self._last_logged[kind]

    def forget_in_child(self) -> None:
        """A thread that the child does not have may hold the lock."""
        self._lock = threading.Lock()
