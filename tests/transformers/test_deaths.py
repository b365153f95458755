"""Processes that die while a copy is under way cost the other one a miss."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest
from completions import Result
from local_node import Engine, wait_until
from sharing_node import observe

from ..engines_under_test import TransformersSpec
from ..vllm.engines import PATIENCE_S, SharedNode
from ..vllm.oracle import prompts, shareable

pytestmark = [pytest.mark.vllm, pytest.mark.long, pytest.mark.timeout(600)]


class Two(NamedTuple):
    node: SharedNode
    exporter: Engine
    importer: Engine


@contextmanager
def at_first_copy(model_path: Path, what: str) -> Iterator[Two]:
    with SharedNode() as node:
        node.start_coordinator()
        point = {"KVSHM_TEST_SYNC_POINT": f"COPY_BEGINS:{what}"}
        exporter, importer = node.start_engines(
            TransformersSpec("exporter", model_path, 0),
            TransformersSpec("importer", model_path, 1, environment=point),
        )
        node.wait_joined(exporter, importer)
        yield Two(node, exporter, importer)


def test_an_exporter_that_dies_while_it_is_copied_from(model_path: Path) -> None:
    (prompt,) = prompts(1, seed=900)
    with at_first_copy(model_path, "stop") as (node, exporter, importer):
        with node.sharing(exporter, shareable(prompt)):
            computed = exporter.complete(prompt)
        with observe(node, importer) as seen, ThreadPoolExecutor(1) as pool:
            pending: Future[Result] = pool.submit(importer.complete, prompt)
            try:
                for _ in wait_until("the importer stops with its leases", PATIENCE_S):
                    if "T" in importer.processes().values():
                        break
                exporter.kill()
            finally:
                importer.signal(signal.SIGCONT)
            answer = pending.result()
        assert answer == computed
        assert seen.imported_blocks == seen.tokens.imported == 0
        assert (seen.loaded["loads"], seen.loaded["failed_loads"]) == (1, 1)
        assert importer.complete(prompt) == answer


def test_an_importer_that_dies_with_its_leases(model_path: Path) -> None:
    (prompt,) = prompts(1, seed=901)
    with at_first_copy(model_path, "kill") as (node, exporter, importer):
        with node.sharing(exporter, shareable(prompt)):
            exporter.complete(prompt)
        with ThreadPoolExecutor(1) as pool:
            dying = pool.submit(importer.complete, prompt)
            importer.process.wait(PATIENCE_S)
            assert isinstance(dying.exception(), OSError | RuntimeError)
        for _ in wait_until("its leases are swept", PATIENCE_S):
            if not node.leased(exporter):
                break
        assert node.shown(exporter), "they are readable as before"
        assert exporter.complete(prompt) == exporter.complete(prompt)
