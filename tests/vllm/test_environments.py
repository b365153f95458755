"""Ways in which people start vLLM, and places where it cannot share but has to serve."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from local_node import (
    Engine,
    EngineSpec,
    clean_environment,
    machine,
    processes_of,
    wait_until,
)
from sharing_node import BLOCK_SIZE, observe
from vllm import plugins
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

from kvshm._base.rundir import SOCKET_PATH_BYTES, list_sockets
from kvshm.hooks.vllm.connector import KvshmConnector

from ..unit.few_descriptors import descriptors
from ..unit.few_threads import no_threads
from .engines import MAX_STARTS, PATIENCE_S, SharedNode
from .oracle import prompts, shareable
from .scheduling import BLOCK_SIZE as SMALL_BLOCK
from .scheduling import DrivenEngine, imagined_cache, vllm_config

# -- without an engine


@pytest.mark.parametrize(
    ("named", "loaded"), [(None, True), ("kvshm", True), ("lora_resolver", False), ("", False)]
)
def test_vllm_loads_the_plugin_unless_vllm_plugins_leaves_it_out(
    monkeypatch: pytest.MonkeyPatch, named: str | None, loaded: bool
) -> None:
    """Left out, nothing of kvshm is imported by vLLM, so nothing happens."""
    monkeypatch.setenv("KVSHM_ENABLE", "1")
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    if named is not None:
        monkeypatch.setenv("VLLM_PLUGINS", named)
    assert ("kvshm" in plugins.load_plugins_by_group(plugins.DEFAULT_PLUGINS_GROUP)) == loaded


@pytest.fixture
def run_dir(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KVSHM_RUN_DIR", str(run_dir))
    monkeypatch.setenv("KVSHM_NAMESPACE", run_dir.name.lower())
    monkeypatch.setenv("KVSHM_STRICT", "1")
    return run_dir


def serve(model: Path) -> DrivenEngine:
    """Drive a scheduler that does not share through two requests of one prefix."""
    engine = DrivenEngine(vllm_config(model), shares=False)
    for name in ("one", "two"):
        request = engine.add(name, list(range(1, 2 * SMALL_BLOCK + 3)))
        for _ in range(20):
            engine.step()
        assert request.num_output_tokens == 4
    return engine


def test_a_default_run_directory_too_long_for_one_socket_leaves_the_engine_unshared(
    model: Path, run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where only the longest of all names is just too long, in both processes."""
    monkeypatch.delenv("KVSHM_RUN_DIR")
    longest = f"{run_dir.name.lower()}.engine.0123456789abcdef.sock"
    room = SOCKET_PATH_BYTES - len(f"/kvshm/{longest}")
    runtime = f"{run_dir}/".ljust(room + 1, "d")
    Path(runtime).mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", runtime)
    engine = serve(model)
    assert engine.connector._scheduler is None
    cache = engine.scheduler.kv_cache_config
    worker = KvshmConnector(engine.config, KVConnectorRole.WORKER, cache)
    assert worker._worker is None
    engine.close()


def test_without_memory_for_a_slot_table_the_hooks_go_on_without_an_epoch(
    model: Path, run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def full(fd: int, offset: int, length: int) -> None:
        asked.append(length)
        raise OSError(errno.ENOSPC, "no room")

    monkeypatch.setattr(os, "posix_fallocate", full)
    engine = serve(model)
    for _ in wait_until("the epoch is tried", PATIENCE_S):
        if asked:
            break
    for _ in range(3):
        engine.step()
    assert engine.connector._scheduler.cache.table is None
    assert not list_sockets(run_dir, run_dir.name.lower())
    engine.close()


@pytest.mark.parametrize("short", [no_threads, partial(descriptors, 1)])
def test_a_start_without_descriptors_or_threads_is_a_start_of_plain_vllm(
    model: Path, run_dir: Path, lines: list[str], short: Any
) -> None:
    config, cache = vllm_config(model), imagined_cache(32)
    with short():
        sides = [KvshmConnector(config, role, cache) for role in KVConnectorRole]
    assert sides[0]._scheduler is None
    assert [line for line in lines if "not sharing" in line and "ulimit -" in line]
    for side in sides:
        side.shutdown()


def test_a_start_that_fails_in_an_unknown_way_is_a_start_of_plain_vllm(
    model: Path, run_dir: Path, lines: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where a later vLLM has renamed what kvshm reads."""
    config, cache = vllm_config(model), imagined_cache(32)
    gone = property(attrgetter("renamed"))
    monkeypatch.setattr(type(config.parallel_config), "rank", gone)
    monkeypatch.setattr(type(config.scheduler_config), "async_scheduling", gone)
    for role in KVConnectorRole:
        with pytest.raises(AttributeError, match="renamed"):
            KvshmConnector(config, role, cache)
    monkeypatch.setenv("KVSHM_STRICT", "0")
    sides = [KvshmConnector(config, role, cache) for role in KVConnectorRole]
    assert sides[0]._scheduler is sides[1]._worker is None
    (line,) = [line for line in lines if "not sharing" in line]
    assert "this vLLM is not as kvshm knows it: AttributeError: " in line
    for side in sides:
        side.shutdown()


# -- real engines


@dataclass(frozen=True)
class ServeSpec(EngineSpec):
    """``vllm serve`` with two API servers in front of one engine."""

    def command(self, port: int) -> list[str]:
        serve = str(Path(__file__).with_name("serve.py"))
        module = super().command(port)
        return [sys.executable, serve, *module[module.index("--model") + 1 :]]

    def __post_init__(self) -> None:
        object.__setattr__(self, "arguments", ("--api-server-count", "2"))


class Offline:
    """A script that uses ``LLM()``, in a process group of its own."""

    def __init__(self, node: SharedNode, model: Path, way: str, core: int) -> None:
        SharedNode.starts.append(f"offline by {way}")
        assert len(SharedNode.starts) <= MAX_STARTS, SharedNode.starts
        environ = {**machine(core), **node.environment}
        if way == "argument":
            del environ["KVSHM_ENABLE"]
        self.log = node.run_dir / f"offline-{way}.log"
        script = str(Path(__file__).with_name("offline_engine.py"))
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, script, str(model), way],
                env={**clean_environment(), **environ},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                process_group=0,
            )

    def processes(self) -> dict[int, str]:
        return processes_of(self.process.pid)

    def said(self) -> dict[str, Any]:
        """Its next line that is ours: vLLM logs to the same place.  The first one says that the
        engine is there."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("{"):
                said: dict[str, Any] = json.loads(line)
                return said
            with self.log.open("a") as log:
                log.write(line)
        raise AssertionError(f"ended:\n{self.log.read_text(errors='replace')[-6000:]}")

    def complete(self, prompt: Sequence[int]) -> dict[str, Any]:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(list(prompt)) + "\n")
        self.process.stdin.flush()
        return self.said()

    def end(self) -> int | None:
        """Let the script end by itself; then make sure that nothing of it is left.  Returns None
        if that had to be done."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        try:
            return self.process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            return None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            self.process.stdout.close()


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[tuple[SharedNode, Engine]]:
    with SharedNode() as node:
        node.start_coordinator()
        (engine,) = node.start_engines(ServeSpec("two-api-servers", model, core=0))
        yield node, engine


@pytest.mark.vllm
@pytest.mark.long
@pytest.mark.timeout(900)
def test_behind_two_api_servers_there_is_one_engine(server: tuple[SharedNode, Engine]) -> None:
    node, engine = server
    asked = list(prompts(4, seed=700))
    with node.sharing(engine, sum(map(shareable, asked))):
        first = [engine.complete(prompt) for prompt in asked]
    again = [engine.complete(prompt) for prompt in asked]
    assert [len(answer.tokens) for answer in first + again] == [16] * 8
    assert len(node.owned(engine)) == 1  # one epoch: API servers have none
    assert "2 API server" in engine.log() or "ApiServer_1" in engine.log()


@pytest.mark.vllm
@pytest.mark.long
@pytest.mark.timeout(900)
def test_offline_vllm_shares_either_way_it_is_enabled(
    server: tuple[SharedNode, Engine], model: Path
) -> None:
    node, engine = server
    scripts: list[Offline] = []
    try:
        for core, way in enumerate(("environment", "argument")):
            scripts.append(Offline(node, model, way, core))
        for offline in scripts:
            offline.said()
        for offline, prompt in zip(scripts, prompts(2, seed=710), strict=True):
            with node.sharing(engine, shareable(prompt)):
                engine.complete(prompt)
            for _ in wait_until("the script knows what the server shows", PATIENCE_S):
                if node.shown(engine) <= (node.known(offline, engine) or set()):
                    break
            answer = offline.complete(prompt)
            assert answer["cached"] == shareable(prompt) * BLOCK_SIZE
            assert tuple(answer["tokens"]) == engine.complete(prompt).tokens
        for prompt in prompts(3, seed=715):  # perhaps by one API server, perhaps by the other
            with node.sharing(offline, shareable(prompt)):
                offline.complete(prompt)
            with observe(node, engine) as seen:
                imported = engine.complete(prompt)
            seen.assert_imported(shareable(prompt))
            assert list(imported.tokens) == offline.complete(prompt)["tokens"]
    finally:
        ended = [offline.end() for offline in scripts]
    assert ended == [0, 0]
    for _ in wait_until("nothing of the scripts is left", PATIENCE_S):
        if set(node.sockets()) == node.owned(engine):
            break


@pytest.mark.vllm
@pytest.mark.nightly  # tests/unit/test_minute_report.py shows the line, without the minute
@pytest.mark.timeout(900)
def test_an_engine_with_lookups_and_no_hit_says_why(server: tuple[SharedNode, Engine]) -> None:
    """At the end of a minute at the latest, by the reasons that it has counted."""
    node, engine = server
    asked = prompts(1000, seed=720)
    for _ in wait_until("the line comes, once a minute", PATIENCE_S):
        engine.complete(next(asked))  # in the minute that begins with the test others were found
        if lines := re.findall(
            r": 0 of (\d+) lookups found a prefix; not imported: (.*)", engine.log()
        ):
            break
    lookups, reasons = lines[0]
    counted = {reason: int(count) for reason, count in re.findall(r"(\w[\w ]+) (\d+)", reasons)}
    assert counted.keys() <= {"no peer", "no owner"}
    assert sum(counted.values()) == int(lookups) > 0
    assert node.counted(engine)["lookups"] >= int(lookups)
