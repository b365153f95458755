"""Asks the ranks directly over vLLM's executor: between steps, or when no step will come."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Any, TypeAlias

from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

from .adapters import Loaded
from .call_stack import callers_with
from .messages import RankDescription
from .rank_calls import watch_calls

Descriptions: TypeAlias = dict[int, RankDescription] | None
"""By rank; None if what vLLM hands over is not kvshm's."""


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

    def watch_calls(self, may_write: Callable[[str], None], harmless: Collection[str]) -> None:
        """Have ``may_write`` called before each call that may write weights, unless ``harmless``
        names it."""
        watch_calls(self._executor, may_write, ask_rank, harmless)

    def weights_change(self) -> None:
        """Have every rank end its epoch before any later call reaches it.  Does not wait."""
        self._executor.collective_rpc(ask_rank, args=("weights_change",), non_block=True)

    def adapters(self) -> list[Loaded | None]:
        """Return what each rank has loaded of adapters."""
        answers: list[Loaded | None] = self._ask("adapters")
        return answers

    def describe(self) -> dict[int, RankDescription]:
        """Return the ranks' descriptions, by rank; blocks while the ranks digest their weights."""
        answers = self._ask("describe")
        return {rank: answer for rank, answer in enumerate(answers) if answer is not None}

    def give_up(self, load_ids: Iterable[str]) -> set[str]:
        """End loads of an epoch that has ended; returns those that no rank copies or will report.
        The ranks report the others with a step, as always."""
        answers = self._ask("loads.wait_for_end", sorted(load_ids))
        ended: set[str] = set.intersection(*(a or set() for a in answers)) if answers else set()
        if ended:
            self._ask("loads.forget", sorted(ended))
        return ended

    def end_loads(self, load_ids: Iterable[str]) -> set[str]:
        """Have every rank end these loads and never report them; returns those that no rank
        carries out any more.  vLLM, which counts the ranks' reports, forgets the others' too."""
        answers = self._ask("loads.end", sorted(load_ids))
        ended: set[str] = set.intersection(*(a or set() for a in answers)) if answers else set()
        counted: Any = getattr(self._executor, "kv_output_aggregator", None)
        for name in ended if counted is not None else ():
            counted._recv_remaining_count.pop(name, None)
            counted._failed_recving_pending.discard(name)
        return ended

    def _ask(self, question: str, *args: Any) -> Any:
        """Call a method of every rank's WorkerSide, or of its ``loads``; returns a list of the
        answers by rank, None from a rank that cannot answer."""
        return self._executor.collective_rpc(ask_rank, args=(question, *args))


def is_beside_others(connector: object) -> bool:
    """Whether this worker has other connectors too (a MultiConnector).  Worker only."""
    return has_kv_transfer_group() and get_kv_transfer_group() is not connector


def ask_rank(_: object, question: str, *args: Any) -> Any:
    """Runs in every worker; the first argument is vLLM's worker.  Returns the answer of kvshm's
    connector, the only one that has ``answer_scheduler``."""
    if not has_kv_transfer_group():
        return None
    group: Any = get_kv_transfer_group()
    connectors = (group, *getattr(group, "sub_connectors", ()))
    own = next((c for c in connectors if hasattr(c, "answer_scheduler")), None)
    return own.answer_scheduler(question, *args) if own else None
