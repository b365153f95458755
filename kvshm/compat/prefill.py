"""The two hooks of kv-marketplace and the call by which an engine joins: a mesh is a namespace, a
prefix signature is an Identity."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from .._api.arguments import whole
from ..api import Config, Identity, Node, join
from ._slots import Extra, listed, one_group
from .retrieval import finish

__all__ = ["after_prefill", "before_prefill", "join_cache"]


def join_cache(
    mesh: str, prefix_signature: Identity, *, config: Config | None = None, **more: Any
) -> Node:
    """Join the engines of this machine whose namespace is ``mesh`` and whose Identity equals
    ``prefix_signature`` in every field.  ``more``: what ``join`` takes besides.  Raises ConfigError
    for a ``mesh`` that cannot be a namespace."""
    config = replace(config or Config.from_env(os.environ), namespace=mesh)
    return join(prefix_signature, config=config, **more)


def before_prefill(
    node: Node,
    tokens: Any,
    alloc_prefix: Callable[[int], Sequence[int]],
    *,
    min_prefix: int = 0,
    salt: bytes = b"",
    extra: Extra = b"",
    timeout: float | None = None,
) -> tuple[int, list[int]] | None:
    """Load the longest prefix that other engines have, if it has ``min_prefix`` tokens.

    ``alloc_prefix`` is called with its length in tokens and returns own blocks for it, neither
    published nor in use.  Returns how many tokens they hold, which is less if a load failed, and
    the blocks; None if nothing was found: then nothing was allocated.  If the engine has to compute
    the prompt's last token, it passes the tokens without it.
    """
    found = one_group(node).lookup(node.keys(listed("tokens", tokens), salt, extra))
    if not found or found.length * node.block_size < min_prefix:
        return None
    blocks = listed("alloc_prefix's blocks", alloc_prefix(found.length * node.block_size))
    load = node.load(found, into=blocks)
    try:
        load.wait(timeout)
    finally:
        finish(load)
    return load.good * node.block_size, blocks


def after_prefill(
    node: Node,
    tokens: Any,
    kv_blocks: Sequence[int],
    length: int | None = None,
    *,
    salt: bytes = b"",
    extra: Extra = b"",
) -> int:
    """Publish the full blocks of the first ``length`` tokens (None: of all), which are computed;
    return how many tokens that were.  ``kv_blocks`` are the prompt's own blocks, from the first
    one on.  Before one is written or handed out again the engine retracts it."""
    tokens = listed("tokens", tokens)
    if length is not None:
        tokens = tokens[: whole("length", length, 0)]
    keys = one_group(node).keys(tokens, salt, extra)
    return node.publish(keys, listed("kv_blocks", kv_blocks)[: len(keys)]) * node.block_size
