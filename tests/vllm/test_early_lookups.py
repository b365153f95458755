"""A request that comes while its engine joins waits until the peers are known, a while at most."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("vllm")

from kvshm._base.rundir import tables_socket
from kvshm._node.protocol import Joined

from ..waiting import until
from .scheduling import DrivenEngine, Make, described, prompt


class Starting:
    """An engine that starts beside a coordinator that does not answer, and its clock."""

    def __init__(self, engine: DrivenEngine) -> None:
        self.engine, self.now = engine, 1000.0
        self.cache: Any = engine.connector._scheduler.cache
        self.cache._clock = lambda: self.now
        self._coordinator = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._coordinator.bind(
            str(tables_socket(self.cache._run_dir, self.cache._config.namespace))
        )
        self._coordinator.listen()

    def scheduled(self) -> set[str]:
        return set(self.engine.step().output.num_scheduled_tokens)

    def joins(self) -> None:
        epoch = self.cache.epoch_state.table.epoch
        self.cache._handler.apply(
            Joined(
                protocol=1, coordinator_epoch=1, engine_epoch=epoch, lease_bit=0, sequence=0,
                roster=[], sequences={}, suspected=[], incompatible=[],
            )
        )  # fmt: skip

    def close(self) -> None:
        self._coordinator.close()


@pytest.fixture
def starting(engine: Make, monkeypatch: pytest.MonkeyPatch) -> Iterator[Starting]:
    monkeypatch.setenv("KVSHM_JOIN_WAIT_MS", "1000")
    starting = Starting(engine())
    yield starting
    starting.close()


def test_it_waits_until_the_peers_are_known_and_holds_up_no_one_else(starting: Starting) -> None:
    starting.engine.add("early", prompt(4))
    for _ in range(50):  # however often vLLM asks
        assert starting.scheduled() == set()
    alone = starting.engine.add("alone", prompt(4, first=99))
    alone.kv_transfer_params = {"kvshm": {"share": False}}
    starting.engine.add("short", prompt(0))  # of which nothing can be imported
    assert starting.scheduled() == {"alone", "short"}
    starting.joins()
    assert starting.scheduled() == {"alone", "short", "early"}


def test_it_waits_for_a_while_and_no_other_one_waits_again(starting: Starting) -> None:
    starting.engine.add("early", prompt(4))
    assert starting.scheduled() == set()
    starting.now += 0.999
    assert starting.scheduled() == set()
    starting.now += 0.001  # KVSHM_JOIN_WAIT_MS
    assert starting.scheduled() == {"early"}
    starting.engine.add("later", prompt(4, first=99))
    assert starting.scheduled() == {"early", "later"}


def test_it_waits_too_if_the_cache_was_reset_before(starting: Starting) -> None:
    """As a trainer does first; the ranks describe themselves in the first request's step."""
    e = starting.engine
    assert e.scheduler.reset_prefix_cache()
    e.add("first", prompt(4))
    sent = e.schedule()
    assert sent.metadata.describe
    assert set(sent.output.num_scheduled_tokens) == {"first"}
    e.run(sent, described(sent))
    e.add("early", prompt(4, first=99))
    assert starting.scheduled() == {"first"}
    until(lambda: starting.cache.epoch_state is not None)
    starting.joins()
    assert starting.scheduled() == {"first", "early"}


def test_nothing_waits_without_a_coordinator(engine: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVSHM_JOIN_WAIT_MS", "1000")
    e = engine()
    e.add("first", prompt(4))
    assert set(e.step().output.num_scheduled_tokens) == {"first"}


def test_nothing_waits_if_the_setting_says_so(engine: Make) -> None:
    """As that of all other tests of a scheduler does."""
    starting = Starting(engine())
    starting.engine.add("first", prompt(4))
    assert starting.scheduled() == {"first"}
    starting.close()
