"""Loggers whose lines vLLM shows.

vLLM configures one logger, ``vllm``, and leaves the root logger at WARNING: a line logged
as ``kvshm.peers`` would be lost in every engine.  So kvshm logs below ``vllm``.
"""

from __future__ import annotations

import logging

_OURS = "vllm.kvshm"


def logger(name: str) -> logging.Logger:
    """Return the logger of module ``name`` (its ``__name__``) below ``vllm``."""
    return logging.getLogger("vllm." + name)


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
