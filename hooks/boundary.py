"""The boundary to an engine: no exception of kvshm crosses it, except MemoryInUse, or all of them
with KVSHM_STRICT=1 (tests).  A failure is a cache miss and a counter; its traceback is logged once
per hook."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable
from typing import Any, Protocol, TypeVar, cast

from kvshm._base.core_lines import CoreLine
from kvshm._base.declined import declined_now, record_declined
from kvshm._base.log import LogLimit, logger
from kvshm._base.log_output import start_log as start_log  # for hooks that use kvshm.api only
from kvshm.config import Config, Share
from kvshm.errors import MemoryInUse

from .log_lines import HookLine

log = logger(__name__)

F = TypeVar("F", bound=Callable[..., Any])


class Bounded(Protocol):
    """What a class must have so that its methods can be guarded."""

    strict: bool

    def hook_failed(self, hook: str, exc: Exception) -> None:
        """Record the failure and withdraw all published blocks, which nothing guards any more."""


_log_limit = LogLimit(math.inf)
"""A hook is called in every step: each way in which it fails is logged once."""


def _log_once(line: HookLine, hook: str) -> None:
    """Log that a hook has failed, with the traceback."""
    if _log_limit.allows(line, hook):
        log.line(line, hook, exc_info=True)


def guarded(fallback: Callable[..., Any], timed_as: str = "") -> Callable[[F], F]:
    """Make a hook return ``fallback(self, *args)`` instead of raising, None if that fails, too.
    ``timed_as``: the name under which ``hook_took`` gets the start of each call that succeeds."""

    def decorate(hook: F) -> F:
        @functools.wraps(hook)
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            start = time.monotonic_ns() if timed_as else 0
            try:
                result = hook(self, *args, **kwargs)
            except MemoryInUse:
                raise  # better no token than a wrong one
            except Exception as exc:  # any: a failure of kvshm is a cache miss
                if self.strict:
                    raise
                report(self, hook.__name__, exc)
                return _fall_back(fallback, hook.__name__, self, *args, **kwargs)
            if timed_as:  # here, not in a function: several times in each step
                try:
                    self.hook_took(timed_as, start)
                except Exception:  # any: the hook has done its work, and must not count as failed
                    if self.strict:
                        raise
            return result

        return cast(F, call)

    return decorate


def _fall_back(fallback: Callable[..., Any], hook: str, *args: Any, **kwargs: Any) -> Any:
    try:
        return fallback(*args, **kwargs)
    except MemoryInUse:
        raise
    except Exception:  # perhaps the same error again
        _log_once(HookLine.FALLBACK_FAILED, hook)
        return None


def decline(reason: str, engine: str, config: Config, model: str = "") -> None:
    """Report why an engine shares nothing, in the log and to tools; it serves on."""
    log.line(CoreLine.NOT_SHARING, reason)
    record(reason, engine, config, model)


def record(reason: str, engine: str, config: Config, model: str = "") -> None:
    """Report to tools, in the run directory, why an engine shares nothing."""
    declined = declined_now(engine, model, reason, on_purpose=config.share is Share.NONE)
    record_declined(config.run_dir, config.namespace, declined)


def report(owner: Bounded, hook: str, exc: Exception) -> None:
    """Log the first failure of a hook with its traceback and make ``owner`` safe."""
    _log_once(HookLine.HOOK_FAILED, hook)
    try:
        owner.hook_failed(hook, exc)
    except Exception:  # any: this is called where an exception is handled
        _log_once(HookLine.UNSAFE, hook)
