"""What follows when the loads that a step has waited for end, before vLLM handles its output."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvshm.halves import LoadOrder

from .after_prefill import BlockTracker
from .before_prefill import RequestImporter
from .messages import RankReport
from .prompt_tokens import PromptTokens


def end_awaited(
    importer: RequestImporter,
    prompts: PromptTokens,
    tracker: BlockTracker | None,
    loads: Sequence[LoadOrder],
    result: Any,
) -> None:
    """Finish the imports of these loads with what the ranks report of them in vLLM's ``result`` of
    the step, and undo the requests whose import failed, so that vLLM delivers no token of
    theirs."""
    said = getattr(result.kv_connector_output, "kv_connector_worker_meta", None)
    reports = said.loads if isinstance(said, RankReport) else []
    for done in importer.finish_awaited(loads, reports):
        prompts.import_ended(done)
        if not done.good:
            if tracker is not None:  # before ``failed`` frees the request's blocks
                tracker.blocks_failed(done.bad)
            importer.at_once.failed(done.request_id, done.load.load_id)
            continue
        importer.at_once.arrived(done.request_id, done.load.load_id)
        if tracker is not None:
            tracker.import_ended(done)
