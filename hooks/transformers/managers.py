"""The one line by which a program has its ContinuousBatchingManagers share.

transformers loads no plugins, so an environment variable alone cannot bring kvshm in.  Methods of a
manager are wrapped that make and end its batch processor or fail its requests, and the pause in
which a program may change the weights.
"""

from __future__ import annotations

import _thread
import os
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from functools import cache, wraps
from math import isfinite
from threading import Lock, Thread
from typing import Any, NamedTuple

import torch
import transformers
from transformers.generation.continuous_batching import ContinuousBatchingManager

from kvshm.api import Config, ConfigError, Identity, KvshmError, Node, allocate, join

from ..boundary import decline, guarded, log, start_log
from ..log_lines import HookLine
from .identity import identity_of
from .imports import WAIT_SECONDS
from .paged_cache import SharedPagedAttentionCache, allocator_of, move, regions_of
from .refusals import (
    cache_refusal,
    interface_refusal,
    made_already,
    manager_refusal,
    model_refusal,
)
from .shared_prefixes import SharedPrefixes
from .versions import tested, untested


def share(
    manager: ContinuousBatchingManager,
    *,
    salt: bytes = b"",
    name: str | None = None,
    wait_seconds: float = WAIT_SECONDS,
    config: Config | None = None,
) -> ContinuousBatchingManager:
    """Have a manager share its prefix cache, if KVSHM_ENABLE=1; return the manager.

    Call it before the manager starts or warms up; of several calls the last counts.  ``salt``: only
    managers with the same one share.  ``name``: for other engines' logs.  ``wait_seconds``: how
    long one import may hold up the generation loop.  ``config``: the settings; by default those of
    the environment.  A manager that cannot share logs why, and serves on.  Raises ConfigError for a
    bad setting, for what is no manager, and if the manager shares otherwise already.
    """
    wishes = _wishes(salt, name, wait_seconds, config)
    if not wishes.config.enable:
        return manager
    start_log(wishes.config.log_level, wishes.config.log_format, wishes.config.log_file)
    if not isinstance(manager, ContinuousBatchingManager):
        raise ConfigError(f"share() was given {manager!r}; give a ContinuousBatchingManager")
    if (sharing := getattr(manager, "kvshm", None)) is not None:
        sharing.wish(wishes)
        return manager
    sharing = _Sharing(manager, wishes)
    if reason := manager_refusal(manager) or interface_refusal():
        sharing.decline(reason)
        return manager
    if untested(transformers.__version__):
        _note_untested(transformers.__version__)
    manager._create_batch_processor = sharing.around_creation(manager._create_batch_processor)
    manager._fail_all_remaining_requests = sharing.around_failures(
        manager._fail_all_remaining_requests
    )
    manager.pause = sharing.around_pause(manager.pause)
    manager.stop = sharing.around_stop(manager.stop)
    manager.destroy = sharing.around_destroy(manager.destroy)
    manager.kvshm = sharing  # so that a later call neither wraps it again nor is ignored
    return manager


@cache
def _note_untested(version: str) -> None:
    """Say so, once."""
    log.line(HookLine.UNTESTED_TRANSFORMERS, version, tested())


def share_all(
    *, salt: bytes = b"", wait_seconds: float = WAIT_SECONDS, config: Config | None = None
) -> None:
    """``share`` every manager that this process makes from now on, ``generate_batch``'s too.  A
    second call counts for the managers made after it."""
    original = ContinuousBatchingManager.__init__
    wishes = _wishes(salt, None, wait_seconds, config)
    if not wishes.config.enable:
        return
    if hasattr(original, "kvshm"):
        original.kvshm = wishes
        return

    @wraps(original)
    def init(self: ContinuousBatchingManager, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        share(self, **init.kvshm._asdict())  # type: ignore[attr-defined]  # set below

    init.kvshm = wishes  # type: ignore[attr-defined]  # marks kvshm's wrapper
    ContinuousBatchingManager.__init__ = init


def node_of(manager: ContinuousBatchingManager) -> Node | None:
    """Return the manager's Node, None if it shares nothing: before it starts, unless KVSHM_ENABLE
    is 1, or for a reason in the log."""
    prefixes = _prefixes_of(manager.batch_processor)
    return prefixes.node if prefixes is not None else None


def stats_of(manager: ContinuousBatchingManager) -> dict[str, int]:
    """Return the ``stats`` of the manager's node and the counts in ImportCounts
    (hooks/transformers/imports.py); nothing if the manager shares nothing."""
    processor = manager.batch_processor
    if (prefixes := _prefixes_of(processor)) is None:
        return {}
    return {**prefixes.node.stats(), **asdict(processor.cache.importer.counts)}


def _prefixes_of(processor: Any) -> SharedPrefixes | None:
    """What a batch processor shares, None if nothing."""
    cache = getattr(processor, "cache", None)
    if not isinstance(cache, SharedPagedAttentionCache) or cache.prefixes.closed:
        return None
    return cache.prefixes


class _Wishes(NamedTuple):
    """The arguments of ``share``."""

    salt: bytes
    name: str | None
    wait_seconds: float
    config: Config


def _wishes(salt: bytes, name: str | None, wait_seconds: float, config: Config | None) -> _Wishes:
    """Return the wishes.  Raises ConfigError for impossible ones, if kvshm is on."""
    if config is not None and not isinstance(config, Config):
        raise ConfigError(f"config is {config!r}; give a kvshm.Config")
    wishes = _Wishes(salt, name, wait_seconds, config or Config.from_env(os.environ))
    if not wishes.config.enable:
        return wishes
    if not isinstance(salt, bytes):
        raise ConfigError(f"salt is {salt!r}; give bytes")
    if not (name is None or isinstance(name, str)):
        raise ConfigError(f"name is {name!r}; give text")
    if not (isinstance(wait_seconds, int | float) and isfinite(wait_seconds) and wait_seconds >= 0):
        raise ConfigError(f"wait_seconds is {wait_seconds!r}; give seconds, 0 or more")
    return wishes


class _Sharing:
    """What one manager shares, in one cache after the other."""

    def __init__(self, manager: ContinuousBatchingManager, wishes: _Wishes) -> None:
        self.strict = wishes.config.strict
        self._manager = manager
        self._wishes = wishes
        self._looking = Lock()

    def wish(self, wishes: _Wishes) -> None:
        """Take the wishes of a further call.  Raises ConfigError if it is too late for these."""
        if (processor := self._manager.batch_processor) is not None:
            if _prefixes_of(processor) is None:
                self.decline(made_already(self._manager))
                return
            if wishes != self._wishes:
                raise ConfigError(
                    "the manager shares already, since share() was called before; give it what "
                    "differs before its cache is made"
                )
        self._wishes = wishes
        self.strict = wishes.config.strict

    def hook_failed(self, hook: str, exc: Exception) -> None:
        """Share nothing any more (hooks/boundary.py)."""
        if (prefixes := _prefixes_of(self._manager.batch_processor)) is not None:
            prefixes.hook_failed(hook, exc)

    # -- around the manager's methods

    def around_creation(self, create: Callable[[], Any]) -> Callable[[], Any]:
        """Wrap the method that makes a batch processor, or returns the one there is."""

        @wraps(create)
        def call() -> Any:
            before = self._manager.batch_processor
            processor = create()
            if processor is not before:
                self.begin(processor)
            else:  # a cache that has served and is not shared holds prefixes: it stays as it is
                self.look_at_model(processor)
            return processor

        return call

    def around_failures(self, fail: Callable[..., None]) -> Callable[..., None]:
        """Wrap the method by which all requests fail, also waiting ones without blocks to free."""

        @wraps(fail)
        def call(*args: Any, **kwargs: Any) -> None:
            fail(*args, **kwargs)
            if (prefixes := _prefixes_of(self._manager.batch_processor)) is not None:
                prefixes.end_all()

        return call

    def around_pause(self, pause: Callable[[], Any]) -> Callable[[], Any]:
        """Wrap the context in which the loop stands still and a program may change the weights."""

        @wraps(pause)
        @contextmanager
        def call() -> Iterator[None]:
            with pause():
                try:
                    yield
                finally:
                    self.look_at_model(self._manager.batch_processor)

        return call

    def around_stop(self, stop: Callable[..., None]) -> Callable[..., None]:
        """Wrap the method that ends the loop."""

        @wraps(stop)
        def call(*args: Any, **kwargs: Any) -> None:
            thread = self._manager._generation_thread
            processor = self._manager.batch_processor  # kept: without it nothing is shared
            prefixes = _prefixes_of(processor)
            stop(*args, **kwargs)
            if prefixes is None or self._manager.batch_processor is not None:
                return  # kept for the next session
            if thread is not None and thread.is_alive():
                Thread(target=_close_behind, args=(thread, processor), daemon=True).start()
            else:
                prefixes.close()

        return call

    def around_destroy(self, destroy: Callable[[], None]) -> Callable[[], None]:
        """Wrap the method that ends a manager for good, which may have been kept stopped."""

        @wraps(destroy)
        def call() -> None:
            destroy()
            thread = self._manager._generation_thread
            prefixes = _prefixes_of(self._manager.batch_processor)
            if prefixes is not None and (thread is None or not thread.is_alive()):
                prefixes.close()

        return call

    # -- what they do

    def decline(self, reason: str) -> None:
        """Report why the manager shares nothing."""
        called, name = type(self._manager.model).__name__, self._wishes.name
        decline(reason, name or f"transformers-{os.getpid()}", self._wishes.config, called)

    @guarded(lambda *_: None)
    def begin(self, processor: Any) -> None:
        """Have a new batch processor's cache share, if it can be shared."""
        if reason := cache_refusal(processor, self._manager.model):
            self.decline(reason)
            return
        cache, size = processor.cache, processor.cache.cache_tensor.numel()
        try:
            identity = self._identity()
            cache.cache_tensor.untyped_storage().resize_(0)  # there may be no room for two
            self._begin(cache, size, identity)
        except BaseException as exc:
            move(cache, torch.zeros(size, dtype=torch.uint8))
            if not isinstance(exc, KvshmError):
                raise
            self.decline(str(exc))  # weights that cannot be read, no memory

    def _begin(self, cache: Any, size: int, identity: Identity) -> None:
        """Share a cache whose own memory is gone.  Leaves nothing open when it raises."""
        with ExitStack() as opened:
            memory = allocate(size)
            opened.callback(memory.close)
            move(cache, torch.frombuffer(memory.buffer, dtype=torch.uint8))
            node = join(
                identity,
                memory=memory,
                regions=regions_of(cache),
                block_size=allocator_of(cache).tokens_per_page,
                config=self._wishes.config,
                name=self._wishes.name,
            )
            opened.callback(node.close)
            salt = self._wishes.salt
            prefixes = SharedPrefixes(node, identity, memory, salt=salt, strict=self.strict)
            SharedPagedAttentionCache.take_over(cache, prefixes, self._wishes.wait_seconds)
            if self._manager.num_return_sequences > 1:
                cache.importer.to_compute = 2
            weakref.finalize(cache, _close_apart, prefixes).atexit = False
            opened.pop_all()

    @guarded(lambda *_: None)
    def look_at_model(self, processor: Any) -> None:
        """Renew the identity after a change of the model.  Blocks while it reads all weights."""
        # Several threads may hold one pause: the last one to read must renew last.
        with self._looking:
            if (prefixes := _prefixes_of(processor)) is None:
                return
            try:
                if reason := model_refusal(self._manager.model):
                    raise KvshmError(reason)
                prefixes.renew(self._identity())
            except KvshmError as exc:
                self.decline(str(exc))
                prefixes.close()

    def _identity(self) -> Identity:
        return identity_of(self._manager.model, self._manager.continuous_batching_config)


def _close_behind(thread: Thread, processor: Any) -> None:
    """Stop sharing as soon as the generation loop has ended."""
    thread.join()
    processor.cache.prefixes.close()


def _close_apart(prefixes: SharedPrefixes) -> None:
    """Stop sharing a cache that is gone with its manager.  The garbage collector calls this on any
    thread, which may hold a lock that closing needs, or that starting a ``Thread`` needs."""
    if not prefixes.closed:
        _thread.start_new_thread(Thread(target=prefixes.close, daemon=True).start, ())
