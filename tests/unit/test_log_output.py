"""Where an engine's lines go, with a logger that is set up as vLLM sets up its own."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator
from logging.config import dictConfig
from pathlib import Path

import pytest

from kvshm._base.log import LineLimit, logger
from kvshm._base.log_output import shown_on_stderr, start_log
from kvshm.errors import ConfigError

OURS, VLLM = logging.getLogger("vllm.kvshm"), logging.getLogger("vllm")


def configure(stream: io.StringIO) -> None:
    handler = {"class": "logging.StreamHandler", "formatter": "plain", "level": "INFO"}
    dictConfig(
        {
            "version": 1,
            "disable_existing_loggers": False,
            "formatters": {"plain": {"format": "%(levelname)s %(message)s"}},
            "handlers": {"vllm": handler | {"stream": stream}},
            "loggers": {"vllm": {"handlers": ["vllm"], "level": "INFO", "propagate": False}},
        }
    )


@pytest.fixture
def shown() -> Iterator[io.StringIO]:
    before = VLLM.handlers, VLLM.level, VLLM.propagate, OURS.level
    stream = io.StringIO()
    configure(stream)
    yield stream
    start_log("INFO")
    VLLM.handlers, VLLM.propagate = before[0], before[2]
    VLLM.setLevel(before[1])
    OURS.setLevel(before[3])


def say(*texts: str) -> None:
    for text in texts:
        logger("kvshm._node.peers").warning(text)
    VLLM.warning("vLLM's own")


def lines(stream: io.StringIO) -> list[str]:
    said = stream.getvalue().splitlines()
    assert said.pop() == "WARNING vLLM's own"  # as vLLM formats it, whatever ours are
    return said


def test_as_text_they_are_vllms(shown: io.StringIO) -> None:
    start_log("INFO")
    say("hello")
    assert lines(shown) == ["WARNING kvshm: hello"]


def test_as_json_they_stand_in_vllms_log_and_its_own_lines_stay(shown: io.StringIO) -> None:
    start_log("DEBUG", "json")
    logger("kvshm._node.peers").debug("below vLLM's level")
    say("hello")
    said = [json.loads(line) for line in lines(shown)]
    assert [(line["level"], line["message"]) for line in said] == [
        ("debug", "below vLLM's level"),
        ("warning", "hello"),
    ]
    assert said[0]["component"] == "engine"


def test_in_a_file_they_are_not_in_vllms_log(shown: io.StringIO, tmp_path: Path) -> None:
    path = tmp_path / "kvshm.log"
    start_log("INFO", "text", str(path))
    start_log("INFO", "text", str(path))  # as every further call: nothing is said again
    say("hello")
    assert lines(shown) == [f"INFO kvshm: the lines of this process go to {path}"]
    assert path.read_text().count("message=hello") == 1


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_what_a_file_does_not_take_is_in_vllms_log(shown: io.StringIO, log_format: str) -> None:
    start_log("WARNING", log_format, "/dev/full")
    say("one", "two")
    said = lines(shown)
    if log_format == "json":
        parsed = map(json.loads, said)
        said = [f"{line['level'].upper()} kvshm: {line['message']}" for line in parsed]
    reason, *rest = said
    assert reason.startswith("WARNING kvshm: lines are not written to /dev/full, but here: [Errno")
    assert rest == ["WARNING kvshm: one", "WARNING kvshm: two"]


def test_vllm_may_configure_its_log_again(shown: io.StringIO, tmp_path: Path) -> None:
    path = tmp_path / "kvshm.log"
    start_log("DEBUG", "json", str(path))
    configure(shown)
    start_log("DEBUG", "json", str(path))
    assert OURS.level == logging.DEBUG
    say("hello")
    assert json.loads(path.read_text())["message"] == "hello"


def test_a_wrong_path_leaves_the_log_as_it_was(shown: io.StringIO) -> None:
    with pytest.raises(ConfigError, match="KVSHM_LOG_FILE"):
        start_log("INFO", "json", "/no/such/folder/kvshm.log")
    say("hello")
    assert lines(shown) == ["WARNING kvshm: hello"]


def test_another_choice_replaces_the_one_before(shown: io.StringIO, tmp_path: Path) -> None:
    start_log("INFO", "json", str(tmp_path / "a"))
    start_log("INFO", "json", str(tmp_path / "b"))
    start_log("INFO", "text")
    say("hello")
    *notes, last = lines(shown)
    assert last == "WARNING kvshm: hello"
    assert [json.loads(note)["message"].partition("/")[0] for note in notes] == [
        "the lines of this process go to "
    ] * 2
    assert (tmp_path / "a").read_text() + (tmp_path / "b").read_text() == ""


def test_a_program_without_vllm_shows_them_as_it_was_asked(
    shown: io.StringIO, capsys: pytest.CaptureFixture[str]
) -> None:
    VLLM.handlers = []
    with shown_on_stderr("INFO"):
        logger("kvshm.x").info("text")
        start_log("INFO", "json")
        logger("kvshm.x").info("json")
    text, as_json = capsys.readouterr().err.splitlines()
    assert text.startswith("INFO ")
    assert json.loads(as_json)["message"] == "json"
    logger("kvshm.x").info("nobody asked")  # as Python's own last resort: warnings only
    logger("kvshm.x").warning("seen")
    assert json.loads(capsys.readouterr().err)["message"] == "seen"


# -- how many


def test_lines_beyond_a_bound_are_left_out_and_counted() -> None:
    now, said = [100.0], list[str]()
    limit = LineLimit(said.append, most=3, seconds=60.0, clock=lambda: now[0])
    record = logging.makeLogRecord({})
    assert [limit.filter(record) for _ in range(5)] == [True] * 3 + [False] * 2
    assert said == ["more than 3 lines in 60 s: further ones are left out until this time is over"]
    now[0] += 59.0
    assert not limit.filter(record)
    now[0] += 1.0
    assert limit.filter(record)
    assert said[1:] == ["3 lines were left out, because there were too many at once"]
    now[0] += 60.0
    assert limit.filter(record)
    assert len(said) == 2


def test_every_line_of_an_engine_counts(shown: io.StringIO) -> None:
    start_log("INFO")
    logger("kvshm")  # the logger that also says it
    for number in range(150):
        logger("kvshm.a").warning("a %d", number)
        logger("kvshm.b").warning("b %d", number)
    VLLM.warning("vLLM's own")
    *said, last = lines(shown)
    assert 150 < len(said) <= 200  # a thread of an earlier test may have logged some
    assert last.startswith("WARNING kvshm: more than 200 lines in 60 s")
