"""KvshmConnector that writes how many steps of the scheduler each prompt waited; vLLM loads it by
its path.

A line of JSON per request goes to the file COUNTED_STEPS when its first tokens are scheduled:
``waited``, the number of steps built since the connector was first asked about the request;
``prompt``, how many tokens it has; ``hit``, how many of them vLLM found in its own cache; and
``imported``, how many were loaded from elsewhere.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

from kvshm.hooks.vllm.connector import KvshmConnector

FILE = "COUNTED_STEPS"


class CountedStepsConnector(KvshmConnector):
    """Counts calls of ``build_connector_meta``, one for each step."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        self._built = 0
        self._asked: dict[str, dict[str, int]] = {}
        self._imported: dict[str, int] = {}
        super().__init__(vllm_config, role, kv_cache_config)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> Any:
        """Note when a request is asked about for the first time."""
        found = {"prompt": request.num_prompt_tokens, "hit": num_computed_tokens}
        self._asked.setdefault(request.request_id, {"waited": self._built, **found})
        return super().get_num_new_matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Note what comes from elsewhere."""
        if num_external_tokens:
            self._imported[request.request_id] = num_external_tokens
        super().update_state_after_alloc(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        """Count a step, and write of each request whose first tokens are in it."""
        for request in set(self._asked) & set(scheduler_output.num_scheduled_tokens):
            line = self._asked.pop(request)
            line["waited"] = self._built - line["waited"]
            line["imported"] = self._imported.pop(request, 0)
            with Path(os.environ[FILE]).open("a") as file:
                file.write(json.dumps(line) + "\n")
        self._built += 1
        return super().build_connector_meta(scheduler_output)
