"""Where vLLM's ``--kv-transfer-config`` has settings of kvshm.

    {"kv_connector": "KvshmConnector", "kv_connector_extra_config": {"role": "producer"}}
    {"kv_connector": "OtherConnector", "kv_connector_extra_config": {"kvshm": {"role": "producer"}}}

Without another connector all keys are kvshm's; beside one they stand under ``kvshm``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvshm.errors import ConfigError

CONNECTOR = "KvshmConnector"
MULTI = "MultiConnector"
CHILDREN = "connectors"
BESIDE = "kvshm"
"""Key of kvshm's settings in the configuration of another connector."""


def own_settings(connector: object, extra: object) -> Mapping[str, Any]:
    """Return kvshm's settings in a ``kv_connector_extra_config`` beside the ``kv_connector``
    ``connector``.  Raises ConfigError if kvshm's connector would not find them."""
    table = _table("kv_connector_extra_config", extra)
    if connector in (None, CONNECTOR):
        return table
    beside = _table(f"kv_connector_extra_config: {BESIDE}", table.get(BESIDE))
    child = _own_child(table) if connector == MULTI else None
    if child is None:
        return beside
    own = _table("kv_connector_extra_config", child.get("kv_connector_extra_config"))
    if misplaced := [key for key in beside if own.get(key) != beside[key]]:
        raise ConfigError(
            f"kv_connector_extra_config: {BESIDE} of the MultiConnector sets {misplaced[0]}, which "
            f"its {CONNECTOR} does not read there; put it into the {CONNECTOR}'s own "
            "kv_connector_extra_config"
        )
    return own


def without_own(extra: Mapping[str, Any]) -> dict[str, Any]:
    """Return what of another connector's ``kv_connector_extra_config`` is that connector's."""
    return {key: value for key, value in extra.items() if key not in (BESIDE, CHILDREN)}


def _own_child(extra: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """kvshm's among the connectors of a MultiConnector."""
    children = extra.get(CHILDREN)
    for child in children if isinstance(children, list | tuple) else ():
        if isinstance(child, Mapping) and child.get("kv_connector") == CONNECTOR:
            return child
    return None


def _table(called: str, value: object) -> Mapping[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise ConfigError(f"{called}={value!r} is not a table of settings; correct it")
    return value
