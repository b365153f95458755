"""Names of vLLM that stand in other modules in other tested versions."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any

HOMES = {
    "cli_env_setup": (
        "vllm.entrypoints.common.startup",  # since 0.33
        "vllm.entrypoints.serve.utils.api_utils",
    ),
    "get_kv_cache_groups": (
        "vllm.v1.core.kv_cache_planning",  # since 0.33
        "vllm.v1.core.kv_cache_utils",
    ),
    "get_kv_cache_config_from_groups": (
        "vllm.v1.core.kv_cache_planning",  # since 0.33
        "vllm.v1.core.kv_cache_utils",
    ),
}
"""Per name the modules that had it, the newest first."""


def moved(name: str) -> Any:
    """Return what this vLLM calls so.  Raises ImportError if none of the name's modules has it.

    Asks the modules, not the version, which tests change.
    """
    homes = [module for home in HOMES[name] if (module := _module(home)) is not None]
    if found := [vars(module)[name] for module in homes if name in vars(module)]:
        return found[0]
    raise ImportError(f"{name} is in none of {', '.join(HOMES[name])}")


def _module(name: str) -> ModuleType | None:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError:
        return None
