"""Loggers whose lines vLLM shows.

vLLM configures one logger, ``vllm``, and leaves the root logger at WARNING: a line logged
as ``kvshm.peers`` would be lost in every engine.  So kvshm logs below ``vllm``.
"""

from __future__ import annotations

import logging


def logger(name: str) -> logging.Logger:
    """Return the logger of module ``name`` (its ``__name__``) below ``vllm``."""
    return logging.getLogger("vllm." + name)
