"""Which calls of the ranks may write weights: all that are not known to leave them alone.

All of them, from wherever they come, pass ``collective_rpc`` of vLLM's executor in the EngineCore's
process, and vLLM's steps do as well.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import wraps
from typing import Any

HARMLESS = frozenset({
    # part of every step
    "execute_model", "sample_tokens", "take_draft_token_ids", "execute_dummy_batch",
    # only say something
    "check_health", "synchronize_device", "compute_weight_checksums",
    "get_compilation_match_table", "get_encoder_timing_stats", "get_kv_cache_spec",
    "get_kv_connector_handshake_metadata", "get_model_inspection",
    "get_supported_kv_cache_layouts", "get_supported_tasks", "list_loras",
    "supports_draft_weight_updates",
    # begin or end a profile; drop caches of inputs; write the weights to files
    "profile", "release_late_interaction_query_cache", "reset_encoder_cache", "reset_mm_cache",
    "save_sharded_state", "save_tensorized_model",
    # write tensors of adapters (adapters.py)
    "add_lora", "pin_lora", "remove_lora",
    # pause, resume or end the ranks
    "handle_ft_command", "shutdown",
})  # fmt: skip
"""vLLM's methods that leave the weights alone."""

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
    known = HARMLESS.union(harmless)

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
