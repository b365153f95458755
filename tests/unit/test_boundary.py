"""kvshm.hooks.boundary: what of ours may cross the border to vLLM."""

from __future__ import annotations

import pytest

from kvshm.errors import MemoryInUse, TransportError
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
