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
    describe: bool = False
    """The old epoch has ended (weights may have changed): describe yourself again."""
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

    def aggregate(self, other: KVConnectorWorkerMetadata) -> RankReport:
        """Merge another rank's report of the same step."""
        assert isinstance(other, RankReport)
        return RankReport(
            step=min(self.step, other.step),
            loads=self.loads + other.loads,
            descriptions=self.descriptions | other.descriptions,
        )
