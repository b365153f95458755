"""Engines whose connector is a MultiConnector, driven step by step: kvshm's and another one."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from vllm.config import KVTransferConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import (
    MultiKVConnectorWorkerMetadata,
)
from vllm.v1.outputs import KVConnectorOutput

from kvshm._engine.load_plan import LoadReport
from kvshm._node.peer import PlannedRun
from kvshm._shm.layout import RECORD_BYTES
from kvshm.hooks.vllm.messages import RankReport

from .scheduling import BLOCK_SIZE, DrivenEngine, Sent, description, plan_of, vllm_config

OURS = {
    "kv_connector": "KvshmConnector",
    "kv_connector_module_path": "kvshm.hooks.connector",
    "kv_role": "kv_both",
}
PEER: Any = SimpleNamespace(info=SimpleNamespace(epoch=77, ranks=[]), row=-1)


@dataclass
class BesideEngine(DrivenEngine):
    """Its workers are asked over the executor, because the handshake is another one's."""

    handshake: dict[tuple[int, int], Any] = field(default_factory=dict)
    model_executor: Any = None

    def shake_hands(self) -> None:
        self.model_executor = self
        self.scheduler.get_kv_connector().set_xfer_handshake_metadata_pp_aware(self.handshake)

    def collective_rpc(self, what: Any, args: tuple[Any, ...] = ()) -> list[Any]:
        assert what.__module__ == "kvshm.hooks.vllm.ranks"  # travels by its name
        return [description()]

    @property
    def place(self) -> int:
        return list(self.scheduler.connector.sub_connectors).index(self.connector)

    @property
    def other(self) -> Any:
        """The connector that is not kvshm's."""
        return self.scheduler.connector.sub_connectors[1 - self.place]

    def reported(self, report: RankReport) -> MultiKVConnectorWorkerMetadata:
        return MultiKVConnectorWorkerMetadata(
            tuple(report if i == self.place else None for i in range(2))
        )

    def step(self, report: RankReport | None = None) -> Sent:
        sent = self.schedule()
        own = report or RankReport(sent.metadata.metadata[self.place].step)
        self.answer(sent, KVConnectorOutput(kv_connector_worker_meta=self.reported(own)))
        return sent

    def close(self) -> None:
        self.scheduler.connector.shutdown()


class PeeredEngine(BesideEngine):
    """Peers hold the first blocks of every prompt."""

    held = 2
    nbytes = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        planner = self.connector._scheduler.cache.planner
        planner.has_peers, planner.lookup = lambda: True, self._lookup

    def _lookup(self, chain: list[bytes], start: int, stop: int) -> Any:
        length = min(stop, self.held) - start
        if length <= 0:
            return None
        runs = (PlannedRun(PEER, bytes(RECORD_BYTES * length)),)
        return plan_of(self.table.epoch, start, runs, nbytes=self.nbytes)

    def loads(self, sent: Sent) -> list[Any]:
        found: list[Any] = sent.metadata.metadata[self.place].loads
        return found

    def report(
        self,
        sent: Sent,
        finished: set[str],
        *loads: LoadReport,
        bad: Any = (),
        saved: Collection[str] = (),
    ) -> None:
        """The step's output comes back, with the end of these loads, and what a store has saved."""
        step = sent.metadata.metadata[self.place].step
        output = KVConnectorOutput(
            finished_recving=finished or None,
            finished_sending=set(saved) or None,
            kv_connector_worker_meta=self.reported(RankReport(step, loads=list(loads))),
            invalid_block_ids=set(bad),
        )
        self.answer(sent, output)


def config_of(model: Path, theirs: dict[str, Any], ours_first: bool, **policy: Any) -> VllmConfig:
    """Configuration of an engine with the connector ``theirs`` beside kvshm's."""
    theirs = {"kv_role": "kv_both", **theirs}
    connectors = [OURS, theirs] if ours_first else [theirs, OURS]
    transfer = KVTransferConfig(
        kv_connector="MultiConnector",
        kv_role="kv_both",
        kv_connector_extra_config={"connectors": connectors},
        **policy,
    )
    config = vllm_config(model, transfer)
    config.scheduler_config.async_scheduling = False
    config.cache_config.block_size = BLOCK_SIZE
    return config
