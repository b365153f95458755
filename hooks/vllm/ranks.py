"""Asks the ranks directly over vLLM's executor: between steps, or when no step will come.

vLLM's own question at the start, the handshake of connectors, is one for all connectors of an
engine: a MultiConnector gives the first answer that it gets to all its connectors.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol, runtime_checkable

from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

from .call_stack import callers_with
from .messages import RankDescription


@runtime_checkable
class AskedRank(Protocol):
    """The methods that a rank is asked for; only kvshm's connector has them."""

    def describe(self) -> RankDescription | None: ...

    def wait_for_end(self, load_ids: list[str]) -> set[str]: ...

    def forget_loads(self, load_ids: list[str]) -> None: ...


class Ranks:
    """All workers of this engine.  EngineCore's main thread; every call waits for the steps
    that were dispatched before."""

    def __init__(self, executor: Any) -> None:
        self._executor = executor

    @classmethod
    def of_caller(cls) -> Ranks | None:
        """Return the ranks of the calling EngineCore, or None."""
        cores = callers_with("model_executor")
        return cls(cores[0].model_executor) if cores else None

    def describe(self) -> dict[int, RankDescription]:
        """Return the ranks' descriptions, by rank; blocks while the ranks digest their weights."""
        answers = self._executor.collective_rpc(_describe)
        return {rank: answer for rank, answer in enumerate(answers) if answer is not None}

    def give_up(self, load_ids: Iterable[str]) -> set[str]:
        """End loads of an epoch that has ended; returns the loads that no rank copies or will
        report any more.  The ranks report the other loads with a step, as always."""
        answers = self._executor.collective_rpc(_ended, args=(sorted(load_ids),))
        ended: set[str] = set.intersection(*map(set, answers)) if answers else set()
        if ended:
            self._executor.collective_rpc(_forget, args=(sorted(ended),))
        return ended


def is_beside_others(connector: object) -> bool:
    """Whether this worker has other connectors too (a MultiConnector).  Worker only."""
    return has_kv_transfer_group() and get_kv_transfer_group() is not connector


# These run in every worker; the first argument is vLLM's worker.


def _describe(_: object) -> RankDescription | None:
    return own.describe() if (own := _own_connector()) else None


def _ended(_: object, load_ids: list[str]) -> set[str]:
    return own.wait_for_end(load_ids) if (own := _own_connector()) else set()


def _forget(_: object, load_ids: list[str]) -> None:
    if own := _own_connector():
        own.forget_loads(load_ids)


def _own_connector() -> AskedRank | None:
    if not has_kv_transfer_group():
        return None
    group: Any = get_kv_transfer_group()
    connectors = (group, *getattr(group, "sub_connectors", ()))
    return next((c for c in connectors if isinstance(c, AskedRank)), None)
