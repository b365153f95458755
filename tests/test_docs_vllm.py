"""vLLM, and whoever else the pages mean, knows every option that they name."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from .unit.pages import PAGES, ROOT, called, check_pages, options, spans
from .unit.test_docs_commands import commands, help_of
from .unit.test_docs_programs import HELPS, help_on

pytest.importorskip("vllm")

VLLM = r"vllm serve|python (?:-P )?-m vllm\.entrypoints\.openai\.api_server"

OF_DOCKER = {"--ipc", "--pid", "--shm-size", "--volume"}


@pytest.fixture(scope="module")
def known_to_vllm() -> set[str]:
    from vllm.entrypoints.cli.serve import cmd_init
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    subparsers = FlexibleArgumentParser().add_subparsers()
    return set(cmd_init()[0].subparser_init(subparsers)._option_string_actions)


def test_vllm_has_the_options_that_are_named(known_to_vllm: set[str]) -> None:
    def named(page: Path) -> Iterator[tuple[str, bool]]:
        for call in called(page, VLLM):
            yield call, set(options(call)) <= known_to_vllm

    check_pages(named)


def test_somebody_knows_each_option_that_stands_alone(known_to_vllm: set[str]) -> None:
    known = known_to_vllm | OF_DOCKER
    for command in {command for one in PAGES for command, _ in commands(one)}:
        known |= set(options(help_of(command)))
    for program, how in HELPS.items():
        if shutil.which(how[0]):
            known |= set(options(help_on(program)))

    def named(page: Path) -> Iterator[tuple[str, bool]]:
        for span in spans(page):
            if span.startswith("--"):
                yield span, set(options(span)) <= known

    check_pages(named)


def test_vllm_has_the_options_of_the_script(known_to_vllm: set[str]) -> None:
    script = re.sub(r"\\\n *", "", (ROOT / "examples/two_engines.sh").read_text())
    (call,) = re.findall(rf"(?:{VLLM}) (.*?) >", script)
    assert "--served-model-name" in call
    assert set(options(call)) <= known_to_vllm


def test_vllm_takes_the_multiconnector_that_a_page_shows() -> None:
    from vllm.config import KVTransferConfig
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    page = (ROOT / "docs/deployment.md").read_text("utf-8")
    (shown,) = re.findall(r"^```json\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    transfer = KVTransferConfig(**json.loads(shown))
    children = transfer.kv_connector_extra_config["connectors"]
    for child in (transfer, *(KVTransferConfig(**child) for child in children)):
        connector = KVConnectorFactory.get_connector_class(child)
        assert connector.__name__ == child.kv_connector
    assert "KvshmConnector" in {child["kv_connector"] for child in children}


def test_calls_of_vllm_are_found() -> None:
    found = {page.name for page in PAGES if list(called(page, VLLM))}
    assert {"README.md", "deployment.md", "configuration.md"} <= found
