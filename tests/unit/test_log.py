"""Every line says kvshm, comes from below vLLM's logger, and names an engine in one way."""

from __future__ import annotations

import ast
import logging
import math
import threading
from pathlib import Path

import pytest

from kvshm._base.core_lines import CoreLine
from kvshm._base.log import LogLimit, engine_name, logger
from kvshm._base.log_format import MAX_MESSAGE

from .coordinators import engine
from .exporters import Clock

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


def test_a_listed_line_has_its_level_or_another_and_the_place_of_its_call(
    caplog: pytest.LogCaptureFixture,
) -> None:
    log = logger("kvshm._node.peers")
    log.line(CoreLine.PEER_DIED, "vllm-7")
    log.line(CoreLine.PEER_JOINED, "vllm-7", level=logging.ERROR)
    log.filled(CoreLine.PEER_GONE.fill("vllm-7", "killed"))
    assert [(r.levelno, r.message, r.filename) for r in caplog.records] == [
        (logging.WARNING, "kvshm: engine vllm-7 has died", "test_log.py"),
        (logging.ERROR, "kvshm: engine vllm-7 joined", "test_log.py"),
        (logging.INFO, "kvshm: engine vllm-7 is gone: killed", "test_log.py"),
    ]


def test_a_line_of_one_kind_comes_once_in_its_time() -> None:
    clock = Clock()
    limit = LogLimit(60.0, clock)
    assert limit.allows(CoreLine.PEER_DIED, "a")
    assert limit.allows(CoreLine.PEER_DIED, "b")
    assert limit.allows(CoreLine.PEER_JOINED, "a")
    clock.now += 59.0
    assert not limit.allows(CoreLine.PEER_DIED, "a")
    clock.now += 1.0
    assert limit.allows(CoreLine.PEER_DIED, "a")
    assert not limit.allows(CoreLine.PEER_DIED, "a")


def test_a_line_that_comes_once_for_good_may_come_again_once_it_is_forgotten() -> None:
    limit = LogLimit(math.inf)
    lines = CoreLine.NOT_SERVED, CoreLine.ACCEPT_FAILED
    assert [limit.allows(line, "why") for line in lines * 2] == [True, True, False, False]
    limit.forget(CoreLine.NOT_SERVED)
    assert [limit.allows(line, "why") for line in lines] == [True, False]


def test_a_limit_remembers_a_bounded_number_of_kinds() -> None:
    limit = LogLimit(math.inf, most=3)
    assert all(limit.allows(CoreLine.PEER_DIED, name) for name in "abcd")
    assert not any(limit.allows(CoreLine.PEER_DIED, name) for name in "bcd")
    assert limit.allows(CoreLine.PEER_DIED, "a")


def test_of_threads_that_log_one_line_at_once_one_does() -> None:
    limit, allowed = LogLimit(math.inf), []
    start = threading.Barrier(8)

    def log_all() -> None:
        start.wait(10)
        allowed.extend(n for n in range(200) if limit.allows(CoreLine.PEER_DIED, n))

    threads = [threading.Thread(target=log_all) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert sorted(allowed) == list(range(200))


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
