"""How an engine sleeps and wakes beside another one: a program of its own, because an access to
memory that sleeps ends the process (SIGSEGV).  Each case runs in a process forked for it; prints
what it has written, and how it ended."""

from __future__ import annotations

import itertools
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn
from unittest import mock

import torch
from local_node import Node
from vllm.v1.worker import gpu_worker

from kvshm import _native
from kvshm._shm.statistics import STILL_MAPPED
from kvshm.hooks.vllm import worker_side
from kvshm.hooks.vllm import worker_side as worker_module
from kvshm.hooks.vllm.identity.weights import weights_digest
from kvshm.hooks.vllm.imports import at_once
from kvshm.transport import copier

from ..waiting import until
from .scheduling import BLOCK_SIZE
from .sleeping_engines import Engine, prompt

WAKES: dict[str, list[list[str] | None]] = {
    "all": [None],
    "weights first": [["weights"], ["kv_cache"]],
    "cache first": [["kv_cache"], ["weights"]],
    "weights only": [["weights"]],
}
LOOKS_SECONDS = 0.3
"""Far longer than the witness takes for a look at all weights, with KVSHM_WEIGHTS_CHECK_SECONDS."""
PARALLEL = 3


class Pair:
    def __init__(self, a: Engine, b: Engine) -> None:
        self.a, self.b = a, b
        self.firsts = itertools.count(2000, 1000)

    def meet(self) -> None:
        """Both share: their ranks have described themselves, and serve their memory, which takes
        steps that run the model."""
        for engine in (self.a, self.b):
            deadline = time.monotonic() + 60
            while (table := engine.cache.table) is None or not table.alive:
                assert time.monotonic() < deadline, "no epoch is open"
                engine.compute(prompt(next(self.firsts)))

    def share(self, exporter: Engine, importer: Engine) -> None:
        """One computes a prompt and the other imports it whole."""
        tokens = prompt(next(self.firsts))
        self.known(exporter, importer, tokens)
        assert importer.compute(tokens) == 3 * BLOCK_SIZE

    def known(self, exporter: Engine, importer: Engine, tokens: list[int]) -> None:
        assert exporter.compute(tokens) == 0

        def known() -> bool:
            exporter.step()
            return importer.knows(tokens)

        importer.until(known, "the peer knows the prompt and has attached the memory")


@contextmanager
def held_copy() -> Any:
    """The next copy stops in its first block, until it is let go; then it writes all blocks."""
    reached, go_on, copy_blocks = threading.Event(), threading.Event(), _native.copy_blocks

    def copy(source: Any, target: Any, read: Any, written: Any, _: bytearray) -> int:
        reached.set()
        assert go_on.wait(60)
        return copy_blocks(source, target, read, written, bytearray(4))  # asked to stop too late

    with (
        mock.patch.object(copier, "_native", SimpleNamespace(copy_blocks=copy)),
        mock.patch.object(at_once.AtOnce, "accepts", return_value=False),
    ):
        yield SimpleNamespace(reached=reached, go_on=go_on)
        go_on.set()


def begin_import(pair: Pair, exporter: Engine, importer: Engine, held: Any) -> str:
    """The importer's load of a prompt of the exporter is about to copy."""
    tokens = prompt(next(pair.firsts))
    pair.known(exporter, importer, tokens)
    name = importer.ask(tokens)
    importer.until(held.reached.is_set, "the copy begins")
    return name


def go_on_when(held: Any, ended: Callable[[], bool]) -> None:
    def watch() -> None:
        until(ended)
        time.sleep(0.3)
        held.go_on.set()

    threading.Thread(target=watch, daemon=True).start()


def sleeps(pair: Pair, wakes: list[list[str] | None], level: int, direction: str) -> None:
    """The engine sleeps and wakes while a copy is under way, and shares again afterwards."""
    a, b = pair.a, pair.b
    importer, exporter = (b, a) if direction == "exports" else (a, b)
    first, mapped = a.cache.table.epoch, []
    a.backend.before = lambda: mapped.append(a.side._cache.transport._server.connections)
    # Where its own import is what the sleep waits for, it does not wait for its peer as well.
    patience = worker_side.UNMAP_SECONDS if exporter is a else 0.0
    with (
        held_copy() as held,
        mock.patch.object(worker_side, "UNMAP_SECONDS", patience),
    ):
        name = begin_import(pair, exporter, importer, held)
        go_on_when(held, lambda: a.cache.table is None)
        if level and direction != "imports, no reset":
            a.core.sleep(level)
        elif level:
            a.core.model_executor.sleep(level)
        elif importer is a:  # vLLM's core does not ask for it while a request waits for a load
            a.core.model_executor.discard(("kv_cache",))
        else:
            a.core.sleep(0)
            a.step()
            a.core.release_kv_cache_memory()
    assert len(mapped) == 1
    if exporter is a:
        assert mapped == [0], "peers have unmapped the memory before it goes"
    assert a.backend.asleep == ({"weights", "kv_cache"} if level else {"kv_cache"})
    for tags in wakes if level else [["kv_cache"]]:
        asleep(a)
        a.core.wake_up(tags)
        if level == 2 and (tags is None or "weights" in tags):
            asleep(a)
            a.core.model_executor.collective_rpc("reload_weights")
    if a.backend.asleep:
        asleep(a)
        return
    if exporter is a:
        importer.until(lambda: name not in importer.driven.scheduler.requests, "it is computed")
    pair.meet()
    assert a.cache.table.epoch != first
    pair.share(a, b)
    pair.share(b, a)


def asleep(a: Engine) -> None:
    """Nothing of the engine is shared and nothing touches its memory: not the witness, nor an idle
    step."""
    assert a.cache.table is None
    assert a.side._weights._witness._samples is None
    time.sleep(LOOKS_SECONDS)
    if not a.driven.scheduler.requests:
        a.step()


def peer_hangs(pair: Pair) -> None:
    """The engine sleeps nevertheless, its memory stays the peer's, and the wait is counted."""
    a, b = pair.a, pair.b
    with (
        held_copy() as held,
        mock.patch.object(worker_side, "UNMAP_SECONDS", 0.2),
    ):
        name = begin_import(pair, a, b, held)
        a.core.sleep(1)
        a.core.wake_up()
        held.go_on.set()
        b.until(lambda: name not in b.driven.scheduler.requests, "it is computed")
    pair.meet()
    assert a.cache.table.counters.read(STILL_MAPPED) == 1
    pair.share(a, b)


def unannounced(pair: Pair) -> None:
    """vLLM's worker takes the KV cache back outside of a sleep: the engine shares again."""
    first = pair.a.cache.table.epoch
    pair.share(pair.a, pair.b)
    pair.a.connector.unregister_kv_caches()
    pair.meet()
    assert pair.a.cache.table.epoch != first
    pair.share(pair.a, pair.b)
    pair.share(pair.b, pair.a)


CASES: dict[str, Callable[[Pair], None]] = {
    f"{order}, level {level}, {direction}": lambda pair, w=wakes, n=level, d=direction: sleeps(
        pair, w, n, d
    )
    for order, wakes in WAKES.items()
    for level in (1, 2)
    for direction in ("exports", "imports")
}
CASES |= {
    f"{order}, level 1, imports, no reset": lambda pair, w=wakes: sleeps(
        pair, w, 1, "imports, no reset"
    )
    for order, wakes in WAKES.items()
}
CASES |= {
    f"released, {direction}": lambda pair, d=direction: sleeps(pair, [], 0, d)
    for direction in ("exports", "imports")
}
CASES["a peer hangs"] = peer_hangs
CASES["unannounced"] = unannounced


def run(case: str, model: Path) -> None:
    """One case, in this process."""
    with ExitStack() as stack:
        group = SimpleNamespace(rank_in_group=0)
        # No case shows for how long a step waits for a copy, and a busy machine may make it wait.
        stack.enter_context(mock.patch.object(at_once, "PATIENCE_SECONDS", 60.0))
        for owner, name, result in (
            (torch.accelerator, "synchronize", None),
            (torch.accelerator, "get_memory_info", (1, 1)),
            (gpu_worker, "get_pp_group", group),
            (gpu_worker, "get_tp_group", group),
        ):
            stack.enter_context(mock.patch.object(owner, name, return_value=result))

        def fields(config: Any, cache: Any, models: Any, each: Any) -> dict[str, str]:
            return {"weights": "".join(weights_digest(model, each) for model in models)}

        stack.enter_context(mock.patch.object(worker_module, "rank_fields", fields))
        node = stack.enter_context(Node())
        node.start_coordinator()
        more = {"KVSHM_STRICT": "1", "KVSHM_WEIGHTS_CHECK_SECONDS": "0.1"}
        os.environ.update({**node.environment, **more, "KVSHM_MIN_PREFIX_TOKENS": "0"})
        os.environ.pop("KVSHM_ENABLE", None)
        engines = []
        for _ in range(2):
            engines.append(Engine(model))
            stack.callback(engines[-1].close)
        pair = Pair(*engines)
        pair.meet()
        CASES[case](pair)


def run_in_child(case: str, model: Path, said: Path) -> NoReturn:
    """One case, in this process, which ends with it; ``said``: what it writes."""
    with said.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    try:
        signal.alarm(150)
        run(case, model)
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)


def main(model: str, only: list[str]) -> None:
    left = [name for name in CASES if not only or name in only]
    running: dict[int, str] = {}
    with tempfile.TemporaryDirectory() as folder:
        while left or running:
            while left and len(running) < PARALLEL:
                name = left.pop(0)
                said = Path(folder) / name
                if not (pid := os.fork()):
                    run_in_child(name, Path(model), said)
                running[pid] = name
            pid, status = os.wait()
            how, name = os.waitstatus_to_exitcode(status), running.pop(pid)
            print((Path(folder) / name).read_text(errors="replace"))
            print(f"case {name}: {signal.Signals(-how).name if how < 0 else how}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
