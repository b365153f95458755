"""Lookups in other caches, by their own clients: a Mooncake Store's master, and LMCache's server.

Each client stores chains of blocks and then asks how long a prefix is there, as that project's own
connector of vLLM asks.  Servers run beside it on this machine.  Both projects lie in folders of
their own, which have to be on ``sys.path`` (``requirements/mooncake.txt``, ``lmcache.txt``).
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Protocol

from lmcache_store import Store, listens, lmcache_store
from local_node import free_port, wait_until

LOOPBACK = "127.0.0.1"
START_SECONDS, ANSWER_SECONDS = 60.0, 60.0
BLOCK_TOKENS = 16
"""vLLM's blocks on a GPU, and the chunks of LMCache here: one key of each for the same tokens."""
VALUE = bytes(64)
"""What lies behind a key of Mooncake's: a lookup does not look at it."""
STORED_AT_ONCE = 1000
KEY = "model@tp_rank:0@pcp0@dcp0@pp_rank:0@group:0@"
"""What Mooncake's connector of vLLM puts before a block's hash."""
STORED_CHUNKS = 512
"""Chunks that LMCache's client stores together."""


class Client(Protocol):
    """Another cache.  A question is what its lookup takes of a chain of blocks."""

    def question(self, chain: Sequence[int]) -> Any:
        """Return the question for a chain: a number for each of its blocks."""

    def store(self, chain: Sequence[int]) -> None:
        """Store a chain of blocks."""

    def ask(self, question: Any) -> int:
        """Return how many blocks from the first one on are there; this is what is timed."""

    def asked(self, question: Any) -> None:
        """Give back what a lookup has taken."""


class Mooncake:
    """A client that gives the store no memory, and a process that does."""

    def __init__(self, store: Any) -> None:
        self._store = store

    def question(self, chain: Sequence[int]) -> list[str]:
        hashes = (hashlib.sha256(b"%d" % number).hexdigest() for number in chain)
        return [KEY + each for each in hashes]

    def store(self, chain: Sequence[int]) -> None:
        keys = self.question(chain)
        for first in range(0, len(keys), STORED_AT_ONCE):
            some = keys[first : first + STORED_AT_ONCE]
            if status := self._store.put_batch(some, [VALUE] * len(some)):
                raise RuntimeError(f"Mooncake stores nothing: {status}")

    def ask(self, question: list[str]) -> int:
        there = self._store.batch_is_exist(question)
        return next((n for n, one in enumerate(there) if one != 1), len(there))

    def asked(self, question: list[str]) -> None:
        """Nothing is taken: each key is leased for a while, which the master does for itself."""


@contextmanager
def mooncake(folder: Path, size_gb: float = 1) -> Iterator[Mooncake]:
    """Start a master and a client that gives it memory, and connect; end them on leaving."""
    with ExitStack() as stack:
        master, memory, metrics = (free_port() for _ in range(3))
        _program(
            stack,
            folder,
            "mooncake_master",
            master,
            rpc_address=LOOPBACK,
            rpc_port=master,
            metrics_host=LOOPBACK,
            metrics_port=metrics,
        )
        address = f"{LOOPBACK}:{master}"
        _program(
            stack,
            folder,
            "mooncake_client",
            memory,
            host=LOOPBACK,
            port=memory,
            master_server_address=address,
            metadata_server="P2PHANDSHAKE",
            global_segment_size=round(size_gb * 2**30),
            protocol="tcp",
        )
        from mooncake.store import MooncakeDistributedStore

        store = MooncakeDistributedStore()
        own = f"{LOOPBACK}:{free_port()}"
        if status := store.setup(own, "P2PHANDSHAKE", 0, 64 << 20, "tcp", "", address):
            raise RuntimeError(f"Mooncake's client does not start: {status}")
        stack.callback(store.close)
        yield Mooncake(store)


def _program(
    stack: ExitStack, folder: Path, name: str, serves_at: int, **options: str | int
) -> None:
    """Start a program of Mooncake's, once it listens; end it with the stack."""
    command = [str(folder / "mooncake" / name), *(f"--{k}={v}" for k, v in options.items())]
    environment = {**os.environ, "MC_TCP_BIND_ADDRESS": LOOPBACK}
    quiet = subprocess.DEVNULL
    process = subprocess.Popen(command, env=environment, stdin=quiet, stdout=quiet, stderr=quiet)
    stack.callback(process.wait)
    stack.callback(process.terminate)
    for _ in wait_until(f"{name} listens", START_SECONDS):
        if listens(serves_at):
            return
        if process.poll() is not None:
            raise RuntimeError(f"{name} has ended with status {process.returncode}")


class LMCache:
    """A client of LMCache's server that has registered a small KV cache on the CPU."""

    def __init__(self, store: Store) -> None:
        os.environ.setdefault("LMCACHE_LOG_LEVEL", "ERROR")  # of this process, not of the server
        import torch
        import zmq
        from lmcache.utils import EngineType
        from lmcache.v1.multiprocess.group_view import EngineGroupInfo
        from lmcache.v1.multiprocess.transfer_context import create_transfer_context
        from lmcache.v1.multiprocess.transport.factory import RequestClientFactory

        self._requests = 0
        self._client = RequestClientFactory.create(
            f"tcp://{LOOPBACK}:{store.port}", context=zmq.Context.instance()
        )
        self._blocks = torch.zeros((2, 64, BLOCK_TOKENS, 1, 8), dtype=torch.float16)
        self._cache = {"layer.0": self._blocks}
        self._transfer = create_transfer_context(
            self._cache, mode="lmcache_driven", instance_id=os.getpid(), req_client=self._client
        )
        group = EngineGroupInfo(
            engine_group_id=0, layer_indices=(0,), tokens_per_block=BLOCK_TOKENS
        )
        self._transfer.register(
            self._cache,
            "model",
            1,
            1,
            ANSWER_SECONDS,
            layout_hints={"kv_layout": "NHD"},
            engine_group_infos=[group],
            engine_type=EngineType.VLLM,
        )

    def close(self) -> None:
        if (ended := self._transfer.unregister()) is not None:
            ended.result(timeout=ANSWER_SECONDS)
        self._transfer.close()
        self._client.close()

    def question(self, chain: Sequence[int]) -> tuple[int, ...]:
        """The tokens: LMCache hashes them itself."""
        return tuple(number * BLOCK_TOKENS + n for number in chain for n in range(BLOCK_TOKENS))

    def store(self, chain: Sequence[int]) -> None:
        tokens = self.question(chain)
        for first in range(0, len(chain), STORED_CHUNKS):
            last = min(first + STORED_CHUNKS, len(chain))
            key = self._key(tokens[: last * BLOCK_TOKENS], first * BLOCK_TOKENS, worker=0)
            blocks = [1 + n % 63 for n in range(last - first)]
            event = self._transfer.create_recorded_event()
            stored = self._transfer.submit_store(
                key.request_id, key, self._cache, [blocks], event, 1
            )
            if not stored.result(timeout=ANSWER_SECONDS):
                raise RuntimeError(f"LMCache does not store blocks {first} to {last}")
            self._client.end_session(key.request_id).result(timeout=ANSWER_SECONDS)

    def ask(self, question: tuple[int, ...]) -> int:
        """The fewest calls that its protocol takes: to look up, and to wait for the answer."""
        self._last = self._key(question)
        self._client.lookup(self._last, 1).result(timeout=ANSWER_SECONDS)
        waits = self._client.wait_prefetch_status(self._last.request_id, ANSWER_SECONDS)
        return int(waits.result(timeout=ANSWER_SECONDS) or 0)

    def asked(self, question: tuple[int, ...]) -> None:
        """Free the locks on the chunks that were found."""
        self._client.free_lookup_locks(self._last, 1).result(timeout=ANSWER_SECONDS)
        self._client.end_session(self._last.request_id).result(timeout=ANSWER_SECONDS)

    def _key(self, tokens: tuple[int, ...], start: int = 0, worker: int | None = None) -> Any:
        from lmcache.v1.multiprocess.custom_types import IPCCacheServerKey

        self._requests += 1
        return IPCCacheServerKey(
            model_name="model",
            world_size=1,
            worker_id=worker,
            token_ids=tokens,
            start=start,
            end=len(tokens),
            request_id=f"{os.getpid()}-{self._requests}",
            num_kv_readers=1,
        )


@contextmanager
def lmcache(folder: Path, size_gb: float = 1) -> Iterator[LMCache]:
    """Start LMCache's server and connect to it; end it on leaving."""
    with lmcache_store(folder, size_gb, chunk_size=BLOCK_TOKENS) as store:
        client = LMCache(store)
        try:
            yield client
        finally:
            client.close()


def without_network() -> None:
    """Go on in a network of this process's own, of which only loopback is up: some programs of
    the peers listen on every address.  Returns in a process that is in one already.

    SystemExit, which says why, if this machine does not let it.
    """
    mark = "KVSHM_BENCH_LOOPBACK"
    if os.environ.get(mark) == str(os.getpid()):
        return
    user = [] if os.geteuid() == 0 else ["--map-root-user"]
    asked = subprocess.run(["unshare", *user, "--net", "true"], capture_output=True, text=True)
    if asked.returncode:
        raise SystemExit(f"no network of its own, without which peers are not run: {asked.stderr}")
    script = f'export {mark}=$$; ip link set lo up && exec "$0" "$@"'
    command = ["unshare", *user, "--net", "sh", "-c", script, sys.executable, *sys.argv]
    os.execvp(command[0], command)
