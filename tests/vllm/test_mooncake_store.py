"""vLLM's own MooncakeStoreConnector beside kvshm, in both orders: its scheduler's half is real, and
what its worker would answer is played.  It asks that worker for each prompt, and keeps a reference
on every block that is being stored."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

import zmq
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store.data import (
    MooncakeLookupResult,
    MooncakeStoreWorkerMetadata,
)
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store.protocol import (
    encode_lookup_response,
)
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store.worker import (
    get_zmq_rpc_path_lookup,
)
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import (
    MultiKVConnectorWorkerMetadata,
)
from vllm.v1.outputs import KVConnectorOutput

from kvshm._engine.load_plan import LoadReport
from kvshm.hooks.vllm.messages import RankReport

from .scheduling import Make, Sent, prompt
from .several_connectors import PeeredEngine, config_of

BOTH_ORDERS = pytest.mark.parametrize("ours_first", [True, False])
THEIRS = {"kv_connector": "MooncakeStoreConnector"}
MakeEngine = Callable[[bool, int], "MooncakeEngine"]


class Lookups:
    """Answers for the worker: the store has the first ``found`` tokens of every prompt."""

    def __init__(self, path: str, found: int) -> None:
        self._found = found
        self._context: Any = zmq.Context()
        self._socket = self._context.socket(zmq.REP)
        self._socket.bind(path)
        self._thread = threading.Thread(target=self._answer)
        self._thread.start()

    def _answer(self) -> None:
        answer = encode_lookup_response(MooncakeLookupResult(self._found))
        try:
            while True:
                self._socket.recv_multipart()
                self._socket.send(answer)
        except zmq.ContextTerminated:
            self._socket.close(linger=0)

    def close(self) -> None:
        self._context.term()
        self._thread.join()


class MooncakeEngine(PeeredEngine):
    """Peers hold the first two blocks of every prompt."""

    def store_jobs(self, sent: Sent) -> list[Any]:
        """What the store's worker is to do in a step."""
        found: list[Any] = sent.metadata.metadata[1 - self.place].requests
        return found

    def stored(self, sent: Sent, *jobs: Any) -> None:
        """The step's output comes back, with these blocks in the store."""
        done = MooncakeStoreWorkerMetadata({job.store_job_id: 1 for job in jobs})
        own = RankReport(sent.metadata.metadata[self.place].step)
        both = (own, done) if self.place == 0 else (done, own)
        self.answer(
            sent, KVConnectorOutput(kv_connector_worker_meta=MultiKVConnectorWorkerMetadata(both))
        )

    def references(self, blocks: list[int]) -> list[int]:
        pool = self.scheduler.kv_cache_manager.block_pool
        return [pool.blocks[block].ref_cnt for block in blocks]

    def close(self) -> None:
        """vLLM leaves the connection to the worker open."""
        super().close()
        client = self.other.connector_scheduler.client
        client.executor.shutdown()
        client.socket.close(linger=0)
        client.ctx.term()


@pytest.fixture
def make(
    model: Path, engine: Make, run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[MakeEngine]:
    """Makes engines that end with the test; ``engine`` sets the run directory."""
    monkeypatch.setenv("VLLM_RPC_BASE_PATH", str(run_dir))
    monkeypatch.setenv("KVSHM_BESIDE", "1")
    made: list[Any] = []

    def make(ours_first: bool, found: int) -> MooncakeEngine:
        config = config_of(model, THEIRS, ours_first)
        made.append(Lookups(get_zmq_rpc_path_lookup(config), found))
        made.append(MooncakeEngine(config))
        engine: MooncakeEngine = made[-1]
        return engine

    yield make
    for one in reversed(made):
        one.close()


@BOTH_ORDERS
def test_what_the_store_has_more_of_is_loaded_from_it(make: MakeEngine, ours_first: bool) -> None:
    e = make(ours_first, 64)
    e.add("a", prompt(5))
    sent = e.schedule()
    assert not e.loads(sent)
    [job] = e.store_jobs(sent)
    assert (job.load_spec.kvpool_cached_tokens, job.load_spec.can_load) == (64, True)
    assert e.scheduler.requests["a"].num_computed_tokens == 64


@BOTH_ORDERS
@pytest.mark.parametrize("found", [0, 16, 32])
def test_what_a_peer_has_is_copied_and_stored_once_it_is_there(
    make: MakeEngine, ours_first: bool, found: int
) -> None:
    """The store holds on to the blocks, of the import too, until they are in it."""
    e = make(ours_first, found)
    e.add("a", prompt(3), max_tokens=1)
    sent = e.schedule()
    assert e.loads(sent)
    assert not e.store_jobs(sent)  # neither loads what kvshm loads, nor stores what is not there
    e.report(sent, {"a"}, LoadReport("a", ()))
    sent = e.schedule()
    [job] = e.store_jobs(sent)
    blocks = e.blocks_of("a")[:3]
    assert (job.can_save, job.load_spec) == (True, None)
    assert list(job.block_ids[0][:3]) == blocks
    e.stored(sent)
    assert not e.scheduler.get_num_unfinished_requests()
    assert e.references(blocks) == [1, 1, 1]
    e.stored(e.schedule(), job)
    assert e.references(blocks) == [0, 0, 0]


@BOTH_ORDERS
def test_nothing_of_a_lost_import_is_stored(make: MakeEngine, ours_first: bool) -> None:
    """It is computed, and only then stored, in the blocks where it was computed."""
    e = make(ours_first, 0)
    e.add("a", prompt(3))
    sent = e.schedule()
    lost = e.blocks_of("a")[:2]
    e.report(sent, {"a"}, LoadReport("a", tuple(lost)), bad=lost)
    stored = [job for sent in (e.step(), e.step()) for job in e.store_jobs(sent)]
    computed = e.scheduler.requests["a"].num_computed_tokens
    assert computed >= 3 * 16
    assert [list(job.block_ids[0][:3]) for job in stored] == [e.blocks_of("a")[:3]]
