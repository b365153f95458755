"""vLLM's SimpleCPUOffloadConnector on a CPU: its copies, which a GPU makes, are those of torch."""

from __future__ import annotations

from contextlib import suppress
from typing import Any
from unittest import mock

import torch
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.simple_cpu_offload_connector import (
    SimpleCPUOffloadConnector,
)
from vllm.v1.simple_kv_offload import worker


class Nothing(mock.MagicMock):
    """In the place of CUDA's streams and events: everything that was begun has ended."""

    def query(self) -> bool:
        return True


class Copies:
    """In the place of DmaCopyBackend."""

    def init(self, cache: Any, host: Any, *_: Any) -> None:
        self.cache, self.host = cache, host

    def launch_copy(
        self,
        source: list[int],
        target: list[int],
        *,
        is_store: bool,
        event_idx: int,
        events_list: list[Any],
        wait_event: Any = None,
    ) -> None:
        read, written = (self.cache, self.host) if is_store else (self.host, self.cache)
        for name, blocks in read.items():
            written[name][target] = blocks[source]
        events_list.append((event_idx, Nothing()))

    def shutdown(self) -> None:
        pass


class HostConnector(SimpleCPUOffloadConnector):
    def register_kv_caches(self, kv_caches: Any) -> None:
        with (
            mock.patch.object(worker, "DmaCopyBackend", Copies),
            mock.patch.object(torch.cuda, "Stream") as stream,
        ):
            stream.priority_range.return_value = 0, 0
            super().register_kv_caches(kv_caches)

    def wait_for_save(self) -> None:
        with (
            mock.patch.object(torch, "Event", Nothing),
            mock.patch.object(torch.cuda, "current_stream"),
        ):
            super().wait_for_save()


with suppress(ValueError):  # it is registered
    KVConnectorFactory.register_connector("HostConnector", __name__, "HostConnector")
"""A MultiConnector looks up by name whose statistics it has."""
