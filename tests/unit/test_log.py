"""Every line says kvshm, comes from below vLLM's logger, and names an engine in one way."""

from __future__ import annotations

import ast
import logging
from pathlib import Path

import pytest

from kvshm._base.log import engine_name, logger
from kvshm._base.log_format import MAX_MESSAGE

from .coordinators import engine

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def heard(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "vllm.kvshm")


def test_each_line_begins_with_kvshm(caplog: pytest.LogCaptureFixture) -> None:
    log = logger("kvshm._node.peers")
    log.info("%d engines", 2)
    log.warning("full")
    log.debug("not shown")
    try:
        raise ValueError("no")
    except ValueError:
        log.exception("failed: %s", "why")
    assert caplog.messages == ["kvshm: 2 engines", "kvshm: full", "kvshm: failed: why"]
    assert {record.name for record in caplog.records} == {"vllm.kvshm._node.peers"}
    assert {record.filename for record in caplog.records} == {"test_log.py"}
    assert "ValueError: no" in caplog.text


def test_an_engine_is_named_with_epoch_and_pid() -> None:
    assert engine_name(0x10DDD, "vllm-7", 7) == "vllm-7 (epoch 0000000000010ddd, pid 7)"
    assert engine_name(name="vllm-7", pid=7) == "vllm-7 (pid 7)"
    assert engine_name(0x10DDD) == "(epoch 0000000000010ddd)"
    assert engine(0x10DDD, name="vllm-7", pid=7).log_name == engine_name(0x10DDD, "vllm-7", 7)


def test_every_logger_of_the_product_is_one_of_these() -> None:
    """But for the coordinator's own, whose lines are key=value."""
    made = {
        path.relative_to(ROOT).as_posix()
        for folder in ("kvshm", "coordinator", "transport", "hooks", "tools")
        for path in (ROOT / folder).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and node.attr == "getLogger"
    }
    ground = {"kvshm/_base/log.py", "kvshm/_base/log_output.py"}
    assert made == {*ground, "coordinator/logfmt.py"}


def test_nothing_that_a_line_quotes_is_obeyed_by_a_terminal(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Clients, other engines and files choose such texts."""
    log, odd = logger("kvshm._node.peers"), "\x1b[2J\n\x00\u202e\ud800%s 模"
    shown = "\\x1b[2J\\n\\x00\\u202e\\ud800%s 模"
    log.warning("said: %s", odd)
    log.warning("raised: %s", ValueError(odd))
    try:
        raise ValueError(odd)
    except ValueError:
        log.exception("failed")
    assert caplog.messages == [f"kvshm: said: {shown}", f"kvshm: raised: {shown}", "kvshm: failed"]
    (*_, last) = caplog.handler.format(caplog.records[-1]).splitlines()
    assert last == "\\x00\\u202e\\ud800%s 模"
    caplog.clear()
    log.warning("%s", odd * 1_000_000)
    assert len(caplog.messages[0]) < 10 * MAX_MESSAGE
