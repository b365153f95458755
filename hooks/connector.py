"""The name by which users know the connector: ``kv_connector_module_path``."""

from typing import Any

__all__ = ["KvshmConnector"]

KvshmConnector: Any
try:
    from .vllm.connector import KvshmConnector
except ImportError as exc:  # vLLM has something else than kvshm knows: the engine must serve
    from .vllm.plain_connector import plain_connector

    KvshmConnector = plain_connector(exc)
