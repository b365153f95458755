"""Loggers whose lines vLLM shows, and how a line names an engine.

vLLM configures one logger, ``vllm``, and leaves the root logger at WARNING: a line logged
as ``kvshm._node.peers`` would be lost in every engine.  So kvshm logs below ``vllm``.  vLLM shows
the file of a line but not its logger, so each line begins with ``kvshm:`` for a search.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, MutableMapping
from typing import Any

from .log_format import PREFIX, PlainText
from .log_lines import LogLine

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

    def line(self, line: LogLine, *args: object, exc_info: Any = None) -> None:
        """Log a line of a component's list; ``args`` fill its placeholders."""
        self.log(line.level, line.text, *args, exc_info=exc_info)

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
                self._say(f"{left_out} lines were left out, because there were too many at once")
        self._lines += 1
        if self._lines <= self._most:
            return True
        self._left_out += 1
        if self._left_out == 1:
            self._say(
                f"more than {self._most} lines in {self._seconds:.0f} s: further ones are left out "
                "until this time is over"
            )
        return False


def say(text: str) -> None:
    """Log a warning about the log itself, past all limits."""
    logging.getLogger(OURS).warning("%s%s", PREFIX, text, extra={_PAST_LIMITS: True})


LINE_LIMIT = LineLimit(say)
"""Of all lines of this process."""
_PLAIN_TEXT = PlainText()


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
