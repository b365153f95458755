"""The name by which users know the connector: ``kv_connector_module_path``."""

from .vllm.connector import KvshmConnector

__all__ = ["KvshmConnector"]
