"""Engines whose connector is a MultiConnector, driven step by step: kvshm's and another one."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vllm.config import KVTransferConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import (
    MultiKVConnectorWorkerMetadata,
)
from vllm.v1.outputs import KVConnectorOutput

from kvshm.hooks.vllm.messages import RankReport

from .scheduling import BLOCK_SIZE, DrivenEngine, Sent, description, vllm_config

OURS = {
    "kv_connector": "KvshmConnector",
    "kv_connector_module_path": "kvshm.hooks.connector",
    "kv_role": "kv_both",
}


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
