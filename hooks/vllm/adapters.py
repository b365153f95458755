"""LoRA adapters by their contents: which the ranks compute with, and keys that hold them.

vLLM's block hashes hold an adapter's name and path.  Another engine may use these for other
contents, and so may this one: vLLM hits blocks of before when an adapter is loaded anew from its
path.  So each rank digests what it loads, and vLLM hashes a request with the digest instead::

    rank        loads an adapter, digests it, and tells the scheduler: with the step that loaded it,
                or as the answer after the call that did
    scheduler   hashes requests of an adapter that all ranks have told of with its digest; others
                as vLLM does, and they are not shared

A request whose adapter changes under it goes on with keys of its own.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import wraps
from typing import Any, TypeAlias

from .digests import digest_of

Loaded: TypeAlias = dict[int, dict[int, bytes]]
"""By rank and adapter, the digest of what the rank has loaded; empty if it cannot be digested."""

LOADING, REMOVING = "add_lora", "remove_lora"
"""vLLM's calls of the ranks."""


class AdapterDigests:
    """What one rank has loaded.  The worker's main thread."""

    def __init__(
        self, rank: int, loaded: Callable[[Loaded], None], changed: Callable[[], None]
    ) -> None:
        """``loaded``: called with an adapter that was loaded, before it is used; ``changed``:
        before that, if a step found other contents than were loaded before: no call has announced
        that."""
        self._rank, self._loaded, self._changed = rank, loaded, changed
        self._in_step = False
        self._known: dict[int, bytes] = {}
        """All that was ever loaded: vLLM may drop an adapter, and load its files again."""
        self._listed: Callable[[], Collection[int]] = frozenset

    def watch(self, manager: Any) -> None:
        """Digest all that vLLM's manager of adapters loads from now on.  Idempotent."""
        original: Callable[[Any], Any] = manager._load_adapter
        if getattr(original, "kvshm", False):
            return

        @wraps(original)
        def load_adapter(lora_request: Any) -> Any:
            adapter = original(lora_request)
            self._take(lora_request, adapter)
            return adapter

        @wraps(apply := manager._apply_adapters)
        def apply_adapters(requests: Any) -> Any:
            self._in_step = True
            try:
                return apply(requests)
            finally:
                self._in_step = False

        load_adapter.kvshm = True  # type: ignore[attr-defined]  # marks kvshm's wrapper
        manager._load_adapter, manager._apply_adapters = load_adapter, apply_adapters
        self._listed = manager.list_adapters

    def _take(self, lora_request: Any, adapter: Any) -> None:
        number = int(lora_request.lora_int_id)
        try:
            digest = digest_of(_plain(adapter))
        except Exception:  # any: its requests are not shared
            digest = b""
        before, self._known[number] = self._known.get(number, digest), digest
        if digest != before and self._in_step:
            self._changed()
        self._loaded({self._rank: {number: digest}})

    def known(self) -> Loaded:
        """Return what is loaded now."""
        listed = self._listed()
        return {self._rank: {n: digest for n, digest in self._known.items() if n in listed}}


def _plain(adapter: Any) -> dict[str, Any]:
    """All that vLLM keeps of an adapter that it has just loaded, but for its number here."""
    about = {name: value for name, value in vars(adapter).items() if name != "id"}
    for parts in ("loras", "modules_to_save"):
        about[parts] = {name: vars(layer) for name, layer in about.get(parts, {}).items()}
    return about


class AdapterKey:
    """Stands for an adapter in vLLM's block hashes.  No name of an adapter is bytes."""

    __slots__ = ("lora_name", "lora_path")

    def __init__(self, digest: bytes) -> None:
        self.lora_name, self.lora_path = digest, b""


class _Seen:
    """A request as vLLM's hasher sees it."""

    __slots__ = ("_request", "lora_request")

    def __init__(self, request: Any, key: AdapterKey) -> None:
        self._request, self.lora_request = request, key

    def __getattr__(self, name: str) -> Any:
        return getattr(self._request, name)


class ContentHasher:
    """Hashes a request with the digest of its adapter in place of name and path."""

    __slots__ = ("_key", "digest", "original")

    def __init__(self, original: Callable[[Any], Any], digest: bytes) -> None:
        self.original, self.digest, self._key = original, digest, AdapterKey(digest)

    def __call__(self, request: Any) -> Any:
        return self.original(_Seen(request, self._key))


class Adapters:
    """What the ranks have loaded, and the requests that it concerns.  Scheduler's thread, but for
    ``rehash``."""

    def __init__(self, num_ranks: int, kernels: str) -> None:
        """``kernels``: how they compute with adapters."""
        self._num_ranks, self._kernels = num_ranks, kernels
        self._loaded: Loaded = {}
        self._digests: dict[int, bytes] = {}
        """Of adapters that all ranks have told of."""
        self._requests: dict[str, Any] = {}
        self.before_change: Callable[[Any], None] = lambda request: None
        """Called with a request whose adapter is another one now: what it waits for is not."""

    # -- requests

    def rehash(self, request: Any) -> None:
        """Hash a request by the contents of its adapter if they are known, else as vLLM does.
        Before it has blocks; any thread."""
        adapter, hasher = request.lora_request, request._block_hasher
        digest = None if adapter.load_inplace else self._digests.get(adapter.lora_int_id)
        original = hasher.original if type(hasher) is ContentHasher else hasher
        request._block_hasher = original if digest is None else ContentHasher(original, digest)
        request.block_hashes.clear()
        request.update_block_hashes()

    def covers(self, request: Any) -> bool:
        """Whether a request's hashes hold what its adapter is now."""
        hasher = request._block_hasher
        known = self._digests.get(request.lora_request.lora_int_id)
        return type(hasher) is ContentHasher and hasher.digest == known

    def arrived(self, request: Any) -> None:
        """The scheduler has got a request with an adapter."""
        self._requests[request.request_id] = request
        if not self.covers(request):
            self.rehash(request)  # the adapter may have changed since

    def finished(self, request: Any) -> None:
        """A request with an adapter has ended."""
        self._requests.pop(request.request_id, None)

    def _change(self, request: Any) -> None:
        """Go on with a request whose adapter is another one now."""
        self.before_change(request)
        if not request.num_computed_tokens:
            self.rehash(request)
            return
        if type(hasher := request._block_hasher) is not ContentHasher:
            return
        # Keys that nobody else has, for what it has computed as well: it may be preempted, and
        # compute its whole prompt anew.  Blocks in vLLM's cache keep the keys they have.
        request._block_hasher = ContentHasher(hasher.original, secrets.token_bytes(32))
        request.block_hashes.clear()
        request.update_block_hashes()

    # -- what the ranks have loaded

    def learn(self, loaded: Loaded) -> bool:
        """Take what ranks have loaded; returns whether an adapter has other contents now."""
        for rank, digests in loaded.items():
            self._loaded.setdefault(rank, {}).update(digests)
        numbers = {number for digests in loaded.values() for number in digests}
        changed = [self._settle(number) for number in numbers]  # each of them
        return any(changed)

    def requests(self) -> list[Any]:
        """Return the requests with an adapter that have not ended."""
        return list(self._requests.values())

    def disown(self) -> None:
        """Have no request keep a key under which it has computed blocks."""
        for request in self._requests.values():
            self._change(request)

    def forget(self, numbers: Iterable[int]) -> None:
        """The ranks have removed these adapters, and may load others with their numbers."""
        for number in list(numbers):
            for digests in self._loaded.values():
                digests.pop(number, None)
            self._settle(number)

    def _settle(self, number: int) -> bool:
        """Returns whether an adapter that was known has other contents now."""
        parts = [self._loaded[rank].get(number) for rank in sorted(self._loaded)]
        known = len(parts) == self._num_ranks and all(parts)
        digest = digest_of([self._kernels, parts]) if known else None
        if digest == self._digests.get(number):
            return False
        before = self._digests.pop(number, None)
        if digest is not None:
            self._digests[number] = digest
        for request in self._requests.values():
            if request.lora_request.lora_int_id == number:
                self._change(request)
        return before is not None

    def watch(self, executor: Any, ask: Callable[[], Iterable[Loaded | None]]) -> None:
        """Learn what calls of the ranks load and remove.  ``ask``: what each has loaded."""
        original: Callable[..., Any] = executor.collective_rpc

        @wraps(original)
        def collective_rpc(method: Any, *args: Any, **kwargs: Any) -> Any:
            if type(method) is not str or method not in (LOADING, REMOVING):
                return original(method, *args, **kwargs)
            try:
                return original(method, *args, **kwargs)
            finally:  # some ranks may have, even if others could not
                self._called(method, ask, args, kwargs)

        executor.collective_rpc = collective_rpc

    def _called(
        self,
        method: str,
        ask: Callable[[], Iterable[Loaded | None]],
        args: Sequence[Any],
        kwargs: dict[str, Any],
    ) -> None:
        try:
            given = kwargs["args"] if "args" in kwargs else args[1]
            if method == REMOVING:
                self.forget(given)
                return
            # What a step under way has loaded besides comes with its output, and counts for that.
            called = {adapter.lora_int_id for adapter in given}
            for loaded in ask():
                for rank, digests in (loaded or {}).items():
                    self.learn({rank: {n: digests[n] for n in called & digests.keys()}})
        except Exception:  # any: nothing is known of any adapter
            self.forget(self._digests)
