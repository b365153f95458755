"""A line of the log as JSON and as key=value: the same facts, in a form that always parses."""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvshm._base import log_format
from kvshm._base.log_format import EVENT, FIELDS, MAX_VALUE, LineFormatter


@pytest.fixture(autouse=True)
def own_epochs(monkeypatch: pytest.MonkeyPatch) -> dict[int, str]:
    epochs: dict[int, str] = {}
    monkeypatch.setattr(log_format, "OWN_EPOCHS", epochs)
    return epochs


def record(msg: str = "kvshm: %s has died", *args: object, **more: Any) -> logging.LogRecord:
    name = "vllm.kvshm._node.peers"
    made = logging.LogRecord(name, logging.WARNING, "peers.py", 1, msg, args, more.pop("exc", None))
    made.created = 1_790_000_000.000_123
    made.process = 77
    made.__dict__.update(more)
    return made


def as_json(line: logging.LogRecord, component: str = "engine") -> dict[str, Any]:
    text = LineFormatter(component, as_json=True).format(line)
    assert "\n" not in text
    said = json.loads(text)
    assert isinstance(said, dict)
    return said


def test_a_json_line_has_every_fact() -> None:
    said = as_json(record("kvshm: engine %s has died", "vllm-7", vllm_process_name="EngineCore"))
    assert datetime.fromisoformat(said["time"]) == datetime(2026, 9, 21, 14, 13, 20, 123, UTC)
    assert said == {
        "time": "2026-09-21T14:13:20.000123Z",
        "level": "warning",
        "component": "engine",
        "pid": 77,
        "logger": "kvshm._node.peers",
        "message": "engine vllm-7 has died",
        "process": "EngineCore",
    }


def test_an_event_keeps_its_fields_apart_from_those_of_the_line() -> None:
    """``pid`` is the coordinator's own, ``fields.pid`` that of the engine it speaks of."""
    fields = {"engine": "vllm-7", "pid": 7, "silent_s": 1.5, "left": float("inf"), "reason": None}
    line = record("event=death", **{EVENT: "death", FIELDS: fields})
    said = as_json(line, "coordinator")
    assert (said["component"], said["pid"], said["event"]) == ("coordinator", 77, "death")
    assert said["fields"] == fields | {"left": "inf", "reason": "None"}
    text = LineFormatter("coordinator", as_json=False).format(line)
    assert text == (
        "time=2026-09-21T14:13:20.000123Z level=warning event=death engine=vllm-7 pid=7 "
        "silent_s=1.5 left=inf reason=None"
    )


def test_the_engine_is_named_while_there_is_only_one(own_epochs: dict[int, str]) -> None:
    log_format.note_own_epoch(0x10DDD, "vllm-7")
    log_format.note_own_epoch(0x10DDD)  # a rank in the same process, which does not know the name
    said = as_json(record("kvshm: hello"))
    assert (said["engine"], said["epoch"]) == ("vllm-7", "0000000000010ddd")
    log_format.note_own_epoch(2, "other")
    assert "epoch" not in as_json(record("kvshm: hello"))
    log_format.forget_own_epoch(0x10DDD)
    assert as_json(record("kvshm: hello"))["engine"] == "other"
    log_format.forget_own_epoch(2)
    log_format.forget_own_epoch(2)
    assert "engine" not in as_json(record("kvshm: hello"))


def test_a_traceback_is_one_string_in_one_line() -> None:
    try:
        raise ValueError("no")
    except ValueError:
        line = record("kvshm: failed", exc=sys.exc_info())
    said = as_json(line)
    assert said["traceback"].startswith("Traceback (most recent call last):\n")
    assert said["traceback"].endswith("ValueError: no")
    text = LineFormatter("engine", as_json=False).format(line)
    assert 'event=log logger=kvshm._node.peers message=failed traceback="Traceback' in text
    assert "component=engine pid=77" in text
    assert "\n" not in text


@given(st.text(st.characters(codec=None)), st.text(st.characters(codec=None)))
def test_whatever_others_send_stays_one_line_that_can_be_written(message: str, value: str) -> None:
    line = record("kvshm: %s", message, **{EVENT: "join", FIELDS: {"name": value}})
    said = as_json(line)
    message, value = (t.encode(errors="backslashreplace").decode() for t in (message, value))
    assert said["message"] == message.removeprefix("kvshm: ")[:MAX_VALUE]
    assert said["fields"]["name"] == value[:MAX_VALUE]
    for formatter in (LineFormatter("engine", as_json=True), LineFormatter("engine", False)):
        written = formatter.format(line).encode(errors="backslashreplace").decode()
        assert len(written.splitlines()) == 1


def test_a_value_of_megabytes_is_cut() -> None:
    line = record("kvshm: %s", "m" * 1_000_000, **{EVENT: "e", FIELDS: {"v": "w" * 1_000_000}})
    assert len(json.dumps(as_json(line))) < 3 * MAX_VALUE
    assert len(LineFormatter("engine", as_json=False).format(line)) < 3 * MAX_VALUE


@pytest.mark.parametrize("as_json", [True, False])
def test_a_traceback_of_megabytes_keeps_its_begin_and_its_end(as_json: bool) -> None:
    try:
        raise ValueError("x" * 5_000_000 + " the end")
    except ValueError:
        exc = sys.exc_info()
    line = LineFormatter("engine", as_json).format(record(exc=exc))
    assert len(line) < 2 * log_format.MAX_TRACEBACK
    assert "Traceback (most recent call last)" in line
    assert "the end" in line


def test_bytes_that_are_no_text_do_not_become_lone_surrogates() -> None:
    said = as_json(record("kvshm: %s", "a\udcffb"))
    assert said["message"] == "a\\udcffb"
