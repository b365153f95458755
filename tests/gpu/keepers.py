"""A keeper of engines whose caches lie in GPU memory, over a real GPU or a played one."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from gpu_peer import GpuPeer

from kvshm import Config, Reader

from .joined_engine import BLOCK, BLOCKS, LAYERS, PATIENCE_SECONDS

PROGRAM = str(Path(__file__).with_name("joined_engine.py"))
PROMPT = 24
KEEPER = ("--memory", str(LAYERS * BLOCK * BLOCKS), "--name", "keeper")


@contextmanager
def command(name: str, run_dir: str, *options: str, **given: str) -> Iterator[None]:
    """``given``: of its environment."""
    module = "kvshm.coordinator" if name == "coordinator" else "kvshm.tools.cli"
    asked = [] if name == "coordinator" else [name]
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", module, *asked, "--run-dir", run_dir, *options],
        env={**os.environ, **given},
    )  # fmt: skip
    try:
        yield
    finally:
        process.terminate()
        assert not process.wait(PATIENCE_SECONDS)


def wait_until(condition: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        assert time.monotonic() < end, what
        time.sleep(0.02)  # of a state in shared memory, which nobody announces


def kept_in(run_dir: str) -> int:
    """How many blocks the keeper has published."""
    with Reader(Config(run_dir=run_dir)) as reader:
        found = [view for view in reader.engines() if view.name == "keeper"]
        return sum(len(list(reader.list(view.epoch))) for view in found)


@contextmanager
def engine(run_dir: str, name: str, namespace: str = "default", **given: str) -> Iterator[GpuPeer]:
    path = [given.get("PYTHONPATH"), *sys.path]
    environment = {**given, "PYTHONPATH": os.pathsep.join(filter(None, path))}
    with GpuPeer(program=PROGRAM, environment=environment) as peer:
        assert peer.call("join", run_dir=run_dir, namespace=namespace, name=name) == ""
        yield peer


def engines_import_when_all_have_ended(run_dir: str, **given: str) -> None:
    """``given``: of the environment of engines and keeper."""
    with command("coordinator", run_dir), command("keeper", run_dir, *KEEPER, **given):
        with (
            engine(run_dir, "first", **given) as first,
            engine(run_dir, "watcher", **given) as watcher,
        ):
            first.call("compute", blocks=PROMPT)
            first_has = [PROMPT, ["first"]]
            wait_until(lambda: watcher.call("find", blocks=PROMPT) == first_has, "it is published")
            wait_until(lambda: kept_in(run_dir) == PROMPT, "it is kept")
            first.call("close")
            keeper_has = [PROMPT, ["keeper"]]
            wait_until(lambda: watcher.call("find", blocks=PROMPT) == keeper_has, "it has the rest")
        with engine(run_dir, "second", **given) as second:
            wait_until(lambda: second.call("find", blocks=PROMPT) == keeper_has, "it is offered")
            assert second.call("load", blocks=PROMPT) == ["done", PROMPT * LAYERS]


def engines_import_from_a_keepers_files(run_dir: str, folder: str, **given: str) -> None:
    """Engines and keeper are started again; what is kept was in files meanwhile.  All of them are
    told which transport it is."""
    given["KVSHM_TRANSPORT"] = "cuda_ipc"
    keeper = ("keeper", run_dir, *KEEPER, "--files", folder)
    with command("coordinator", run_dir):
        with command(*keeper, **given), engine(run_dir, "first", **given) as first:
            first.call("compute", blocks=PROMPT)
            wait_until(lambda: kept_in(run_dir) == PROMPT, "it is kept")
        with command(*keeper, **given), engine(run_dir, "second", **given) as second:
            found = [PROMPT, ["keeper"]]
            wait_until(lambda: second.call("find", blocks=PROMPT) == found, "it is offered")
            assert second.call("load", blocks=PROMPT) == ["done", PROMPT * LAYERS]
