"""LMCache's half in the scheduler beside kvshm's, an import of which loses all its blocks.

    python -m tests.vllm.lost_import MODEL CONNECTOR

CONNECTOR is a configuration in JSON.  Fails unless each block that LMCache stores for the request
is one that the request has.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from local_node import wait_until

from kvshm._engine.load_plan import LoadReport

from .scheduling import BLOCK_SIZE, Sent, prompt
from .several_connectors import PeeredEngine, config_of

PATIENCE_S = 60.0


def stored(engine: PeeredEngine, sent: Sent) -> int:
    """Compare what a step stores for request "a" with the blocks of that request; returns how many
    blocks that are."""
    blocks = engine.blocks_of("a")
    count = 0
    for order in sent.metadata.metadata[1 - engine.place].requests:
        if order.request_id == "a" and order.direction == "STORE":
            first, end = order.op.start // BLOCK_SIZE, order.op.end // BLOCK_SIZE
            assert list(order.op.block_ids[0]) == blocks[first:end], (order.op, blocks)
            count += end - first
    return count


def until_looked_up(engine: PeeredEngine) -> Sent:
    """Step until LMCache's server has answered, and vLLM has allocated blocks."""
    for _ in wait_until("LMCache answers", PATIENCE_S):
        sent = engine.schedule()
        if engine.loads(sent) or sent.output.num_scheduled_tokens:
            break
        engine.report(sent, set())
    return sent


def main(model: str, connector: str) -> None:
    engine = PeeredEngine(config_of(Path(model), json.loads(connector), ours_first=False), 64)
    engine.add("a", prompt(18))
    sent = until_looked_up(engine)
    (load,) = engine.loads(sent)
    engine.held = 0  # the peer is gone
    engine.report(sent, {"a"}, LoadReport("a", tuple(load.lost)), bad=load.lost)
    for _ in wait_until("LMCache stores the prompt", PATIENCE_S):
        sent = engine.schedule()
        count = stored(engine, sent)
        engine.report(sent, set())
        if count:
            break
    print("blocks stored:", count)
    engine.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
