"""The settings of an engine; those in vLLM's configuration count before the environment and the
file (kvshm/_base/setting_sources.py).  Any process of vLLM; each call reads the file."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from kvshm._base.extra_config import own_settings
from kvshm.config import Config
from kvshm.errors import ConfigError
from kvshm.interfaces import check_installed

from .rank_calls import WRITING
from .roles import engine_transfer, kv_role_limit

if TYPE_CHECKING:
    from vllm.config import KVTransferConfig

misspelt_are_told = False
"""Whether the plugin has looked at the names of variables, and the connector need not."""


def checked_settings(own: Mapping[str, Any] | None = None) -> Config:
    """Return the settings of an engine; ``own``: those in vLLM's configuration.  Raises ConfigError
    for a bad one, a transport that is not installed, and a method in ``read_only_calls`` that
    writes."""
    config = Config.from_env(os.environ, extra_config=own)
    check_installed(config.transport, config.called("transport"))
    if writing := sorted(WRITING.intersection(config.read_only_calls.split(","))):
        raise ConfigError(
            f"{config.called('read_only_calls')}={config.read_only_calls} names vLLM's "
            f"{', '.join(writing)}: that may write weights or unmap them; name only methods of "
            "your own worker extension that read"
        )
    return config


def settings_of(transfer: KVTransferConfig | None) -> Config:
    """Return the settings of an engine with this transfer configuration.  Raises ConfigError."""
    if transfer is None:
        return checked_settings()
    return checked_settings(own_settings(transfer.kv_connector, transfer.kv_connector_extra_config))


def settings_of_connector(own: KVTransferConfig) -> Config:
    """Return the settings of kvshm's connector, limited by the kv_role of its ``own`` transfer
    configuration.  Connector's constructor.  Raises ConfigError, also if the engine's configuration
    has settings where the connector does not get them."""
    settings_of(engine_transfer(own))
    return settings_of(own).with_limits(kv_role_limit(own))
