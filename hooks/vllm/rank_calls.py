"""Which calls of the ranks may write weights: all that are not known to leave them alone.

All of them, from wherever they come, pass ``collective_rpc`` of vLLM's executor in the EngineCore's
process, and vLLM's steps do as well.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import wraps
from typing import Any

_STEP = "part of every step"
_TELLS = "only tells something"
_CACHES = "drops caches of inputs"
_SAVES = "writes the weights to files"
_ADAPTERS = "writes tensors of adapters, whose requests are not shared"

HARMLESS = {
    "execute_model": _STEP,
    "sample_tokens": _STEP,
    "take_draft_token_ids": _STEP,
    "execute_dummy_batch": _STEP,
    "check_health": _TELLS,
    "synchronize_device": _TELLS,
    "compute_weight_checksums": _TELLS,
    "get_compilation_match_table": _TELLS,
    "get_encoder_timing_stats": _TELLS,
    "get_kv_cache_spec": _TELLS,
    "get_kv_connector_handshake_metadata": _TELLS,
    "get_model_inspection": _TELLS,
    "get_supported_kv_cache_layouts": _TELLS,
    "get_supported_tasks": _TELLS,
    "list_loras": _TELLS,
    "supports_draft_weight_updates": _TELLS,
    "profile": "begins or ends a profile",
    "release_late_interaction_query_cache": _CACHES,
    "reset_encoder_cache": _CACHES,
    "reset_mm_cache": _CACHES,
    "save_sharded_state": _SAVES,
    "save_tensorized_model": _SAVES,
    "add_lora": _ADAPTERS,
    "pin_lora": _ADAPTERS,
    "remove_lora": _ADAPTERS,
    "handle_ft_command": "pauses and resumes ranks",
    "shutdown": "ends the ranks",
}
"""vLLM's methods that leave the weights alone, and why."""

WRITING = frozenset({
    "apply_model", "checkpoint_prepare", "checkpoint_restore", "discard", "elastic_ep_execute",
    "finish_weight_update", "init_weight_transfer_engine", "reinitialize_distributed",
    "reload_weights", "reset_weights", "shutdown_weight_transfer_engine", "sleep",
    "start_draft_weight_update", "start_weight_update", "update_weights", "wake_up",
})  # fmt: skip
"""vLLM's methods that write weights, unmap them, or may: no operator calls them harmless."""


def watch_calls(
    executor: Any,
    may_write: Callable[[str], None],
    own: Callable[..., Any],
    harmless: Collection[str] = (),
) -> None:
    """Call ``may_write`` with a call's name before it is sent to the ranks, unless it is in
    HARMLESS or the operator's ``harmless``, or is ``own``, kvshm's question."""
    original = executor.collective_rpc
    if getattr(original, "kvshm", False):
        return  # an engine that wakes up hands over its ranks again
    known = frozenset({*HARMLESS, *harmless})

    @wraps(original)
    def collective_rpc(method: Any, *args: Any, **kwargs: Any) -> Any:
        # A callable may have no hash.
        if not (method in known if type(method) is str else method is own):
            may_write(_name(method))
        return original(method, *args, **kwargs)

    collective_rpc.kvshm = True  # type: ignore[attr-defined]  # marks kvshm's wrapper
    executor.collective_rpc = collective_rpc


def _name(method: Any) -> str:
    """What the log calls it: short and one line, whatever its author has chosen."""
    name = method if isinstance(method, str) else getattr(method, "__qualname__", None)
    text = ascii(str(name)[:100])[1:-1]
    return text if isinstance(method, str) else f"a callable, {text}" if name else "a callable"
