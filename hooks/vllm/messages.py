"""Messages between the two halves of the connector, which vLLM carries with every step."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, ClassVar

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from kvshm._base.ids import BlockId, Epoch
from kvshm.halves import LoadOrder, LoadReport, RankInfo

from .adapters import Loaded

_NONE: Any = ()
_NOBODY: Any = MappingProxyType({})


@dataclass(frozen=True)
class RankDescription(KVConnectorHandshakeMetadata):
    """One rank: how to reach its KV memory, and its fields of the fingerprint."""

    info: RankInfo | None  # None if there is a refusal
    fields: dict[str, str]
    refusal: str = ""  # why this rank cannot share; empty if it can
    seconds: float = 0.0  # that the digest of its weights has taken
    board: tuple[str, int] | None = None
    """Path of the board, and of how many ranks, if other engines hold experts of the model
    (expert_ranks.py)."""


@dataclass
class StepMetadata(KVConnectorMetadata):
    """From the scheduler to the ranks, with every step."""

    step: int
    open_epoch: int = 0
    """The new epoch, whose slot table every rank must open.  0: none."""
    describe: int = 0
    """Number of the reset after which every rank must describe itself again.  0: no need."""
    loads: list[LoadOrder] = field(default_factory=list)
    fence: int = 0
    """Report whether memory holds all that was written up to this step.  0: no need."""
    at_once: list[LoadOrder] = field(default_factory=list)
    """Loads whose blocks this step computes from; the step waits for these loads."""
    patience: float = 0.0
    """How many seconds the step may wait for them."""
    linger: float = 0.0
    """How many seconds the end of the step may wait for other loads."""
    checksums: list[BlockId] = field(default_factory=list)
    """KVSHM_VERIFY: blocks whose last token this step computes."""


class QuietStep(StepMetadata):
    """A step with nothing but its number, as most steps are: cheap to make and to pickle."""

    loads = at_once = checksums = _NONE

    def __init__(self, step: int) -> None:
        self.step = step


@dataclass
class RankReport(KVConnectorWorkerMetadata):
    """From the ranks to the scheduler, with every step's output; vLLM merges them."""

    quiet: ClassVar[bool] = False
    step: int
    fence: int = 0
    """The fence that the scheduler asked for, once the rank has passed it."""
    loads: list[LoadReport] = field(default_factory=list)
    descriptions: dict[int, RankDescription] = field(default_factory=dict)  # by rank
    describes: int = 0  # number of the reset that the descriptions answer
    weights_changed: bool = False  # since the last report
    written: dict[int, str] = field(default_factory=dict)
    """By rank, a parameter that was found written without an announcement."""
    attached: dict[int, frozenset[Epoch]] = field(default_factory=dict)
    """Attached peers by rank, for ranks where they have changed."""
    adapters: Loaded = field(default_factory=dict)
    """Adapters that were loaded since the last report."""
    adapter_changed: bool = False
    """A step has found other contents of an adapter than were loaded before, unannounced."""
    not_opened: int = 0
    """The epoch that this rank could not open.  0: none."""
    still_mapped: int = 0
    """How many ranks' KV caches were unmapped while other engines still mapped them."""
    failed: bool = False
    """A hook failed on this rank, which neither exports nor imports any more."""

    def aggregate(self, other: KVConnectorWorkerMetadata) -> RankReport:
        """Merge another rank's report of the same step."""
        assert isinstance(other, RankReport)
        if self.quiet and other.quiet and self.step == other.step:
            return self
        return RankReport(
            step=min(self.step, other.step),
            fence=min(self.fence, other.fence),
            loads=[*self.loads, *other.loads],
            descriptions={**self.descriptions, **other.descriptions},
            describes=max(self.describes, other.describes),
            attached={**self.attached, **other.attached},
            weights_changed=self.weights_changed or other.weights_changed,
            written={**self.written, **other.written},
            adapters={**self.adapters, **other.adapters},
            adapter_changed=self.adapter_changed or other.adapter_changed,
            not_opened=self.not_opened or other.not_opened,
            still_mapped=self.still_mapped + other.still_mapped,
            failed=self.failed or other.failed,
        )


class QuietReport(RankReport):
    """A report only of the end of a step."""

    quiet = True
    loads = _NONE
    descriptions = attached = written = adapters = _NOBODY

    def __init__(self, step: int) -> None:
        self.step = step


def report_in(result: Any) -> RankReport | None:
    """The ranks' report in what vLLM's model runner returns of a step, also beside the reports of a
    MultiConnector's other connectors."""
    found = getattr(result.kv_connector_output, "kv_connector_worker_meta", None)
    reports = (found, *getattr(found, "metadata", ()))
    return next((one for one in reports if isinstance(one, RankReport)), None)
