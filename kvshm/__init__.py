"""kvshm: one prefix cache per node, shared in place by the vLLM engines on it."""

from .version import __version__

__all__ = ["__version__"]
