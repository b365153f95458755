"""The name by which users know the connector: ``kv_connector_module_path``."""

from .vllm.plain_connector import connector_class

__all__ = ["KvshmConnector"]

KvshmConnector = connector_class()
