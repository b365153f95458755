"""kvshm.hooks.boundary: what of ours may cross the border to vLLM."""

from __future__ import annotations

import math
from typing import ClassVar

import pytest

from kvshm._base.log import LogLimit
from kvshm.errors import MemoryInUse, TransportError
from kvshm.hooks import boundary
from kvshm.hooks.boundary import guarded


class Hooks:
    strict = False

    def __init__(self) -> None:
        self.failed: list[str] = []

    def hook_failed(self, hook: str, exc: Exception) -> None:
        self.failed.append(hook)

    @guarded(lambda self, exc: "a miss")
    def hook(self, exc: Exception) -> str:
        raise exc


@pytest.mark.parametrize("exc", [TransportError("lost"), RuntimeError("a bug")])
def test_a_failure_is_a_miss(exc: Exception) -> None:
    hooks = Hooks()
    assert hooks.hook(exc) == "a miss"
    assert hooks.failed == ["hook"]


def test_where_a_wrong_token_might_follow_the_engine_stops() -> None:
    with pytest.raises(MemoryInUse):
        Hooks().hook(MemoryInUse("a copy may still write"))


def test_what_fails_in_every_step_is_logged_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Broken(Hooks):
        def hook_failed(self, hook: str, exc: Exception) -> None:
            raise RuntimeError("again")

        @guarded(lambda self: [].pop())
        def other_hook(self) -> None:
            raise RuntimeError("a bug")

    monkeypatch.setattr(boundary, "_log_limit", LogLimit(math.inf))
    hooks = Broken()
    with caplog.at_level("ERROR", "vllm.kvshm"):
        for _ in range(100):
            assert hooks.other_hook() is None
    assert caplog.messages == [
        "kvshm: other_hook failed; kvshm is off for this engine, which serves on",
        "kvshm: other_hook failed, and kvshm could not make its state safe",
        "kvshm: other_hook failed, and so did what takes its place",
    ]


@pytest.mark.parametrize("strict", [False, True])
def test_a_call_that_succeeds_is_timed_and_its_time_costs_no_result(strict: bool) -> None:
    class Timed(Hooks):
        taken: ClassVar[list[str]] = []

        def hook_took(self, hook: str, begun_ns: int) -> None:
            self.taken.append(hook)
            raise RuntimeError("no room for it")

        @guarded(lambda self, exc: "a miss", "name")
        def timed_hook(self, exc: Exception | None) -> str:
            if exc is not None:
                raise exc
            return "a hit"

    hooks = Timed()
    assert hooks.timed_hook(RuntimeError("a bug")) == "a miss"
    assert hooks.taken == []
    hooks.failed.clear()
    hooks.strict = strict
    if strict:
        with pytest.raises(RuntimeError, match="no room for it"):
            hooks.timed_hook(None)
    else:
        assert hooks.timed_hook(None) == "a hit"
    assert (hooks.taken, hooks.failed) == (["name"], [])
