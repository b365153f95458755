"""What blocks hold: their names, and where they stand in their prefixes."""

from __future__ import annotations

from typing import NamedTuple


class BlockName(NamedTuple):
    """What names the contents of a block."""

    key: bytes
    """Of the prefix that ends with it."""
    group: int
    """Number of its KV cache group."""


class BlockContent(NamedTuple):
    """What a block holds, and where it stands in its prefix."""

    key: bytes
    """Of the prefix that ends with it."""
    parent: bytes
    """The first 8 bytes of the key of the block before it; zeros for a prefix's first block."""
    depth: int
    """Index in its prefix, in blocks."""
    group: int
    """Number of its KV cache group."""

    @property
    def name(self) -> BlockName:
        """What names it."""
        return BlockName(self.key, self.group)
