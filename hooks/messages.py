"""What the two halves of the connector tell each other through vLLM, step by step."""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from kvshm.plans import Load, LoadReport
from kvshm.protocol import RankInfo
from kvshm.terms import BlockId


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

    step: int
    open_table: str = ""
    """A new epoch has begun: the slot table every rank has to open."""
    describe: int = 0
    """The old epoch has ended (weights may have changed): describe yourself again, in answer
    to the reset of this number.  0: no need."""
    loads: list[Load] = field(default_factory=list)
    checksums: list[BlockId] = field(default_factory=list)
    """KVSHM_VERIFY: blocks whose last token this step computes."""


@dataclass
class RankReport(KVConnectorWorkerMetadata):
    """Ranks to scheduler, with every step's output; merged over the ranks by vLLM."""

    step: int
    loads: list[LoadReport] = field(default_factory=list)
    descriptions: dict[int, RankDescription] = field(default_factory=dict)
    """New descriptions, by rank."""
    describes: int = 0
    """The reset they answer; those of an earlier one are of weights that may be gone."""
    weights_changed: bool = False
    """The weights were loaded anew since the last report."""
    failed: bool = False
    """A hook failed on this rank: it neither exports nor imports any more."""

    def aggregate(self, other: KVConnectorWorkerMetadata) -> RankReport:
        """Merge another rank's report of the same step."""
        assert isinstance(other, RankReport)
        return RankReport(
            step=min(self.step, other.step),
            loads=self.loads + other.loads,
            descriptions=self.descriptions | other.descriptions,
            describes=max(self.describes, other.describes),
            weights_changed=self.weights_changed or other.weights_changed,
            failed=self.failed or other.failed,
        )
