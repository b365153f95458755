"""What the two halves of the connector tell each other through vLLM, step by step."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, ClassVar

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from kvshm.engine.load_plan import Load, LoadReport
from kvshm.ids import BlockId, Epoch
from kvshm.node.protocol import RankInfo

_NONE: Any = ()
_NOBODY: Any = MappingProxyType({})


@dataclass(frozen=True)
class RankDescription(KVConnectorHandshakeMetadata):
    """How one rank's KV memory is reached, and its share of the fingerprint."""

    info: RankInfo | None
    """None with a refusal."""
    fields: dict[str, str]
    refusal: str = ""
    """Why this rank cannot share at all; empty if it can."""


@dataclass
class StepMetadata(KVConnectorMetadata):
    """Scheduler to ranks, with every step."""

    quiet: ClassVar[bool] = False
    step: int
    open_epoch: int = 0
    """A new epoch has begun: every rank has to open its slot table.  0: none has."""
    describe: int = 0
    """The old epoch has ended (weights may have changed): describe yourself again, in answer
    to the reset of this number.  0: no need."""
    loads: list[Load] = field(default_factory=list)
    fence: int = 0
    """With a step without a model: say whether all that was written up to this step stands in
    memory, the drafter's part included.  0: no need."""
    at_once: list[Load] = field(default_factory=list)
    """Loads whose blocks this step computes from: it waits for them."""
    patience: float = 0.0
    """How long it may do so, in seconds."""
    linger: float = 0.0
    """How long its end may wait for other loads under way, in seconds."""
    checksums: list[BlockId] = field(default_factory=list)
    """KVSHM_VERIFY: blocks whose last token this step computes."""


class QuietStep(StepMetadata):
    """A step of which there is nothing to tell but its number, as of most: this one object takes
    less to make, to pack and to unpack.  Its other values are those of the class."""

    quiet = True
    loads = at_once = checksums = _NONE

    def __init__(self, step: int) -> None:
        self.step = step


@dataclass
class RankReport(KVConnectorWorkerMetadata):
    """Ranks to scheduler, with every step's output; merged over the ranks by vLLM."""

    quiet: ClassVar[bool] = False
    step: int
    fence: int = 0
    """The fence that was asked for, once it is passed."""
    loads: list[LoadReport] = field(default_factory=list)
    descriptions: dict[int, RankDescription] = field(default_factory=dict)
    """New descriptions, by rank."""
    describes: int = 0
    """The reset they answer; those of an earlier one are of weights that may be gone."""
    weights_changed: bool = False
    """The weights were loaded anew since the last report."""
    attached: dict[int, frozenset[Epoch]] = field(default_factory=dict)
    """Peers that can be read at once, by rank; of ranks for which that has changed."""
    not_opened: int = 0
    """The epoch that this rank could not open.  0: there is none."""
    failed: bool = False
    """A hook failed on this rank: it neither exports nor imports any more."""

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
            not_opened=self.not_opened or other.not_opened,
            failed=self.failed or other.failed,
        )


class QuietReport(RankReport):
    """The same for a report: the step has ended, and that is all."""

    quiet = True
    loads = _NONE
    descriptions = attached = _NOBODY

    def __init__(self, step: int) -> None:
        self.step = step
