"""What LMCache's engine offers, in tokens, masks and slot mappings.  Any thread; the calls block
where the Node's calls that they make block.

Tokens, masks and slot mappings are sequences of numbers, arrays or tensors.  ``salt`` and ``extra``
are those of ``Node.keys``.  Only full blocks are shared, so the tokens behind a prompt's last full
block never are.  The Node has one KV cache group, of full attention.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from ..api import Held, Load, LoadState, MisuseError, Node
from ._slots import (
    Extra,
    MaskError,
    SlotMappingError,
    blocks_at,
    deadline,
    listed,
    one_group,
    refuse_doubles,
    wanted_runs,
)

__all__ = ["CopyRefused", "MaskError", "Place", "Retrieval", "SlotMappingError"]


class CopyRefused(MisuseError):
    """store() was asked to copy; nothing is copied at export."""


class Place(NamedTuple):
    """Where consecutive tokens of a prefix lie."""

    owner: str
    """The engine's name, "" for this one."""
    tier: str
    """The transport by which they would come, "own" if none has to."""
    num_tokens: int


class Retrieval:
    """The calls, on one Node."""

    def __init__(self, node: Node) -> None:
        self._node = one_group(node)
        self._block_size = node.block_size
        self._lock = threading.Lock()
        self._counts = Counter[str]()

    def contains(self, tokens: Any, salt: bytes = b"", extra: Extra = b"") -> tuple[Place, ...]:
        """Return where the prefix lies, from its first token on: this engine's own published
        blocks first, then those of others.  No RPC, no lease: a hint."""
        keys = self._node.keys(listed("tokens", tokens), salt, extra)
        return self._places(keys)

    def _places(self, keys: Sequence[bytes]) -> tuple[Place, ...]:
        kinds = self._node.contains(keys)
        own = next((i for i, kind in enumerate(kinds) if kind is not Held.OWN), len(keys))
        found = self._node.lookup(keys, start=own)
        here = [Place("", "own", own * self._block_size)] if own else []
        there = [Place(o.name, o.transport, o.num_blocks * self._block_size) for o in found.owners]
        return (*here, *there)

    def lookup(self, tokens: Any, salt: bytes = b"", extra: Extra = b"") -> int:
        """Return how many tokens of the prefix this engine has published itself or can load."""
        return self.lookup_batch([tokens], salt, extra)[0]

    def lookup_batch(
        self, prompts: Iterable[Any], salt: bytes = b"", extra: Extra = b""
    ) -> list[int]:
        """``lookup`` of each prompt."""
        prompts = [listed("tokens", tokens) for tokens in prompts]
        chains = self._node.keys_batch(prompts, salt, extra)
        hits = [sum(place.num_tokens for place in self._places(keys)) for keys in chains]
        self._count(lookups=len(hits), lookup_tokens=sum(map(len, prompts)), hit_tokens=sum(hits))
        return hits

    def retrieve(
        self,
        tokens: Any,
        mask: Any = None,
        slot_mapping: Any = (),
        *,
        salt: bytes = b"",
        extra: Extra = b"",
        timeout: float | None = None,
    ) -> list[bool]:
        """Load other engines' blocks into the slots; return for each token whether its slot now
        holds its KV.

        ``mask`` is True for the tokens to load and False for those that the caller has, in whole
        blocks; it may have holes, because a block's KV depends on the tokens before it and not on
        where they were loaded from.  Loading ends at the first block that no engine has: what is
        True in the result and False in ``mask`` together is a prefix.  Slots that are not loaded
        into keep their bytes, unless a load failed; those of other tokens are not looked at.  The
        blocks of the tokens to load are retracted first, as either the load or the engine will
        write them; only ``store`` publishes them.  Blocks until the loads have ended; after
        ``timeout`` seconds what has not arrived counts as not there.
        """
        request = (tokens, mask, slot_mapping)
        return self.retrieve_batch([request], salt=salt, extra=extra, timeout=timeout)[0]

    def retrieve_batch(
        self,
        requests: Iterable[tuple[Any, Any, Any]],
        *,
        salt: bytes = b"",
        extra: Extra = b"",
        timeout: float | None = None,
    ) -> list[list[bool]]:
        """``retrieve`` of several (tokens, mask, slot_mapping) at once.  Nothing is loaded if one
        of them is refused."""
        until = deadline(timeout)
        prompts = [(listed("tokens", tokens), mask, slots) for tokens, mask, slots in requests]
        asked = [self._targets(len(tokens), mask, slots) for tokens, mask, slots in prompts]
        targets = [block for runs in asked for _, blocks in runs for block in blocks]
        refuse_doubles(targets)
        chains = self._node.keys_batch([tokens for tokens, _, _ in prompts], salt, extra)
        self._node.retract(targets)  # raises if one is not ours: nothing has been loaded yet
        begun: list[list[tuple[int, int, Load]]] = [[] for _ in prompts]
        try:
            for keys, runs, loads in zip(chains, asked, begun, strict=True):
                self._begin(keys, runs, loads)
            for _, _, load in (load for loads in begun for load in loads):
                load.wait(until - time.monotonic())
        finally:
            for _, _, load in (load for loads in begun for load in loads):
                finish(load)
        pairs = zip(prompts, begun, strict=True)
        results = [self._loaded(len(tokens), loads) for (tokens, _, _), loads in pairs]
        wanted, loaded = len(targets) * self._block_size, sum(map(sum, results))
        self._count(retrieves=len(results), retrieve_tokens=wanted, retrieved_tokens=loaded)
        return results

    def _targets(self, num_tokens: int, mask: Any, slots: Any) -> list[tuple[int, list[int]]]:
        """Return for each run that is wanted its first block and the own blocks to load into."""
        size, slots = self._block_size, listed("slot_mapping", slots, SlotMappingError)
        runs = wanted_runs(mask, num_tokens, size)
        return [(a, blocks_at(slots, a * size, b * size, size)) for a, b in runs]

    def _begin(
        self,
        keys: Sequence[bytes],
        runs: list[tuple[int, list[int]]],
        loads: list[tuple[int, int, Load]],
    ) -> None:
        """Begin the loads of one prompt: (first block, behind the last wanted one, load)."""
        for start, targets in runs:
            found = self._node.lookup(keys[: start + len(targets)], start=start)
            if found:
                load = self._node.load(found, into=targets[: found.num_blocks])
                loads.append((start, start + len(targets), load))
            if found.length < start + len(targets):
                return

    def _loaded(self, num_tokens: int, loads: list[tuple[int, int, Load]]) -> list[bool]:
        result = [False] * num_tokens
        for start, stop, load in loads:
            size, good = self._block_size, load.good
            result[start * size : (start + good) * size] = [True] * (good * size)
            if start + good < stop:
                break
        return result

    def store(
        self,
        tokens: Any,
        mask: Any = None,
        slot_mapping: Any = None,
        *,
        kv: Any = None,
        salt: bytes = b"",
        extra: Extra = b"",
    ) -> int:
        """Publish the full blocks in which the slots hold the tokens' KV, where they are; return
        how many tokens others can read since.  ``mask``: as of ``retrieve``, without holes.  The KV
        must be complete, on the device as well; before the engine writes a block again it calls
        ``clear`` or ``Node.retract``.  Raises CopyRefused if KV is handed over: nothing is copied
        at export."""
        if kv is not None or slot_mapping is None:
            raise CopyRefused(
                "nothing is copied at export: store() publishes the blocks where the engine "
                "computed them, in the memory that it joined with; name them by slot_mapping"
            )
        tokens = listed("tokens", tokens)
        runs = self._targets(len(tokens), mask, slot_mapping)
        if len(runs) > 1:
            raise MaskError("the mask has a hole: store() publishes one run, call it for each")
        refuse_doubles([block for _, blocks in runs for block in blocks])
        keys = self._node.keys(tokens, salt, extra)
        stored = sum(
            self._node.publish(keys[: a + len(blocks)], blocks, start=a) for a, blocks in runs
        )
        self._count(stores=1, stored_tokens=stored * self._block_size)
        return stored * self._block_size

    def clear(self, tokens: Any = None, slot_mapping: Any = None) -> None:
        """Withdraw what this engine has published: the blocks that the slots of the tokens
        address, or everything (a new epoch begins).  Other engines keep their blocks.  Blocks for
        the drain budget at most."""
        if tokens is None:
            self._node.reset()
            return
        if slot_mapping is None:
            raise MisuseError("clear(tokens) needs slot_mapping: where their blocks are")
        runs = self._targets(len(listed("tokens", tokens)), None, slot_mapping)
        self._node.retract([block for _, blocks in runs for block in blocks])

    def pin(self, tokens: Any, seconds: float = 60.0, salt: bytes = b"", extra: Extra = b"") -> int:
        """Ask the owners, this engine included, to hand the prefix's blocks out last for a while,
        an hour at most; return how many tokens were found.  A hint: an owner without other blocks
        takes these.  It ends by itself and cannot be taken back, as it may be others' as well."""
        keys = self._node.keys(listed("tokens", tokens), salt, extra)
        return self._node.hold(keys, seconds) * self._block_size

    def stats(self) -> dict[str, int]:
        """Return the Node's counters and those of these calls: ``lookups``, ``lookup_tokens``,
        ``hit_tokens``, ``retrieves``, ``retrieve_tokens`` (asked for), ``retrieved_tokens``,
        ``stores``, ``stored_tokens``."""
        with self._lock:
            return {**self._node.stats(), **self._counts}

    def _count(self, **more: int) -> None:
        with self._lock:
            self._counts.update(more)


def finish(load: Load) -> None:
    """Wait until nothing writes to the load's blocks any more, soon."""
    if load.poll() is LoadState.PENDING:
        load.cancel()
        load.wait()
