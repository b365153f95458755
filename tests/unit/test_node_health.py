"""The judgement of an engine and of a coordinator, from what a look has found."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import pytest

from kvshm._base.ids import Epoch
from kvshm._shm.error_log import ErrorCode, LoggedError
from kvshm._shm.progress import LoopProgress
from kvshm.tools.node.health import (
    CANNOT_TELL,
    Code,
    Limits,
    State,
    judge,
    judge_coordinator,
    judge_node,
    worst,
)
from kvshm.tools.node.reading import Blocks, EngineReading, NamespaceReading, NodeReading

NOW = 1_000_000_000_000
LIMITS = Limits(scheduler=60, loop=10, load=30)
ENGINE = EngineReading(
    namespace="n",
    epoch=Epoch(1),
    name="e",
    pid=7,
    model="m",
    fingerprint="00",
    block_size=16,
    answers=True,
    owner_died=False,
    died=False,
    retired=False,
    life=(True, True),
    heartbeat=3,
    lease_bit=0,
    created_ns=0,
    blocks=Blocks(10),
    counters={"hook_errors": 0, "mismatched": 0},
    histograms={},
    traffic=(),
    progress=(
        LoopProgress("scheduler", 0, 0, idles=True),
        LoopProgress("client", 0, NOW, idles=False),
        LoopProgress("loads of rank 0", 0, NOW, idles=False),
    ),
    coordinator_ns=NOW,
    loads_since=(),
    errors=(),
    joined=True,
)
SPACE = NamespaceReading("n", coordinated=True, coordinator_answers=True, coordinator_ns=NOW)


def seconds_ago(seconds: float) -> int:
    return NOW - round(seconds * 1e9)


class Found(NamedTuple):
    live: bool
    ready: bool
    progress: bool | None
    state: State
    reasons: tuple[str, ...]


def found(space: NamespaceReading = SPACE, **changed: Any) -> Found:
    health = judge(replace(ENGINE, **changed), space, NOW, LIMITS)
    return Found(health.live, health.ready, health.progress, health.state, tuple(health.texts))


def codes(space: NamespaceReading = SPACE, **changed: Any) -> list[Code]:
    health = judge(replace(ENGINE, **changed), space, NOW, LIMITS)
    return [reason.code for reason in health.reasons]


def with_loop(loop: str, pending: int, rested: float) -> tuple[LoopProgress, ...]:
    return tuple(
        LoopProgress(loop, pending, seconds_ago(rested), of.idles) if of.loop == loop else of
        for of in ENGINE.progress
    )


def test_of_a_clock_that_cannot_be_compared_nothing_is_judged_and_that_is_said() -> None:
    """Its times may lie anywhere: in the past of this process as well as in its future."""
    why = f"whether its loops go round is not known: {CANNOT_TELL}"
    for rested in (-40_000.0, 0.0, 200.0):
        loops = tuple(e._replace(pending=1, last_ns=seconds_ago(rested)) for e in ENGINE.progress)
        played = {"clock_known": False, "progress": loops, "loads_since": (seconds_ago(rested),)}
        assert found(**played) == Found(True, True, None, State.HEALTHY, (why,))
        assert found(**played, died=True).reasons == ("a worker process has ended",)
        assert found(**played, joined=False).state is State.DEGRADED
    unshown = replace(SPACE, coordinator_ns=None)
    unknown = judge_coordinator(unshown, NOW, LIMITS)
    assert unknown.state is State.HEALTHY
    assert unknown.text.endswith(f"is not known: {CANNOT_TELL}")
    silent = replace(unshown, coordinator_answers=False)
    assert judge_coordinator(silent, NOW, LIMITS).state is State.DEGRADED


def test_why_the_coordinator_refuses_an_engine_is_a_reason() -> None:
    text = "refused: upgrade kvshm in the coordinator's environment"
    for code in (ErrorCode.REFUSED, ErrorCode.OTHER_VERSION):
        refusal = LoggedError(3, 1, 2, text, code)
        health = found(joined=False, errors=(refusal,))
        assert health.state is State.DEGRADED
        assert health.reasons == (f"it is not in the coordinator's roster: {refusal.text}",)
        assert found(errors=(refusal,)).state is State.HEALTHY, "it has joined since"


def test_an_engine_without_a_lease_bit_is_degraded() -> None:
    text = ErrorCode.NO_LEASE_BIT.text()
    judged = LoggedError(1, 1, 2, text, ErrorCode.NO_LEASE_BIT)
    assert found(lease_bit=None).state is State.HEALTHY, "it may be about to get one"
    assert found(lease_bit=None, errors=(judged,)).reasons == (text,)
    assert found(lease_bit=3, errors=(judged,)).state is State.HEALTHY
    assert found(lease_bit=None, errors=(judged,), keeps=True).state is State.HEALTHY, "no need"


@pytest.mark.parametrize(
    ("changed", "code"),
    [
        ({"owner_died": True}, Code.ENDED),
        ({"died": True}, Code.RANK_ENDED),
        ({"answers": False}, Code.SILENT),
        (
            {"progress": (LoopProgress("scheduler", 1, NOW - 61 * 10**9, True),)},
            Code.SCHEDULER_STALLED,
        ),
        ({"progress": (LoopProgress("client", 1, NOW - 61 * 10**9, False),)}, Code.LOOP_STALLED),
        ({"retired": True}, Code.EPOCH_ENDED),
        ({"life": (True, False)}, Code.NOT_OPENED),
        ({"joined": False}, Code.NOT_JOINED),
        ({"loads_since": (1,)}, Code.LONG_LOAD),
        ({"life": (False, False)}, Code.WAITS),
        ({"clock_known": False}, Code.CLOCK_UNKNOWN),
        ({"counters": {"hook_errors": 1, "mismatched": 0}}, Code.HOOK_FAILED),
        ({"counters": {"hook_errors": 0, "mismatched": 1}}, Code.MISMATCHED),
    ],
)
def test_each_reason_has_the_code_that_programs_read(changed: dict[str, Any], code: Code) -> None:
    assert codes(**changed) == [code]


def test_an_engine_without_faults_is_healthy() -> None:
    assert found() == Found(True, True, True, State.HEALTHY, ())


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"owner_died": True, "died": True}, "its process has ended"),
        ({"died": True}, "a worker process has ended"),
        ({"answers": False}, "it does not answer: stopped, or out of descriptors"),
    ],
)
def test_what_does_not_live_is_down_whatever_else_there_is(
    changed: dict[str, Any], reason: str
) -> None:
    wrong = {"retired": True, "loads_since": (1,), "progress": with_loop("client", 0, 99)}
    assert found(**changed, **wrong) == Found(False, False, False, State.DOWN, (reason,))


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"retired": True}, "its epoch has ended, and no other one has begun"),
        ({"life": (True, False, False)}, "ranks that have not opened the epoch: 1, 2"),
        ({"joined": False}, "it is not in the coordinator's roster"),
        (
            {"counters": {"hook_errors": 1, "mismatched": 0}},
            "a hook of kvshm has failed: it shares nothing until it is restarted",
        ),
    ],
)
def test_what_is_not_ready_serves_on_unshared(changed: dict[str, Any], reason: str) -> None:
    assert found(**changed) == Found(True, False, True, State.DEGRADED, (reason,))


def test_an_engine_without_a_request_yet_is_healthy_but_not_ready() -> None:
    health = found(life=(False, False))
    assert (health.ready, health.progress, health.state) == (False, True, State.HEALTHY)
    assert health.reasons[0].startswith("it is ready after its first request")
    assert found(life=(False, False), joined=False).state is State.DEGRADED
    begun = with_loop("scheduler", 0, 1)
    assert found(life=(False, False), progress=begun).state is State.DEGRADED


def test_without_a_coordinator_no_one_has_to_be_in_its_roster() -> None:
    alone = replace(SPACE, coordinated=False)
    assert found(alone, joined=False).ready
    new = found(alone, joined=False, life=(False,))
    assert new.reasons == ("no coordinator has admitted it yet",)


@pytest.mark.parametrize(
    ("loop", "pending", "rested", "state"),
    [
        ("scheduler", 2, 61, State.DOWN),
        ("scheduler", 2, 59, State.HEALTHY),
        ("scheduler", 0, 999, State.HEALTHY),
        ("client", 0, 11, State.DEGRADED),
        ("client", 0, 9, State.HEALTHY),
        ("loads of rank 0", 1, 11, State.DEGRADED),
        ("loads of rank 0", 0, 11, State.DEGRADED),
    ],
)
def test_each_loop_that_rests_too_long_is_distinguished(
    loop: str, pending: int, rested: float, state: State
) -> None:
    health = found(progress=with_loop(loop, pending, rested))
    waiting = f" with {pending} waiting" if pending else ""
    judged = f"{loop} stalled: it has not gone round for {rested:.0f} s{waiting}"
    assert health.state is state
    assert health.progress is (state is State.HEALTHY)
    assert health.reasons == (() if state is State.HEALTHY else (judged,))


def test_a_loop_that_has_never_gone_round_may_be_about_to_begin() -> None:
    loops = tuple(loop._replace(pending=1, last_ns=0) for loop in ENGINE.progress)
    assert found(progress=loops).progress


def test_other_faults_are_named() -> None:
    assert found(loads_since=(seconds_ago(31), NOW)).reasons == (
        "a load holds its leases for 31 s",
    )
    assert found(counters={"hook_errors": 0, "mismatched": 2}).reasons == (
        "2 copied blocks differed from what was published",
    )
    assert found(loads_since=(seconds_ago(29),)).state is State.HEALTHY


def test_an_engine_that_differs_from_all_others_of_its_model_is_reported_with_the_field() -> None:
    text = "cannot share with other: dtype is bfloat16 here, float32 there"
    code = ErrorCode.CANNOT_SHARE
    errors = (
        LoggedError(1, 1, 1, text, code, ("other", "dtype", "is bfloat16 here, float32 there")),
        LoggedError(1, 1, 1, "cannot share with x: model is a", code, ("x", "model", "is a")),
    )
    other = replace(ENGINE, epoch=Epoch(2), name="other", fingerprint="11")
    assert found(replace(SPACE, engines=(ENGINE, other)), errors=errors).reasons == (
        f"shares with no engine here: {text} (give both the same --dtype)",
    )
    assert codes(replace(SPACE, engines=(ENGINE, other)), errors=errors) == [Code.ALONE]
    for engines in (
        (ENGINE,),
        (ENGINE, other, replace(other, epoch=Epoch(3), fingerprint="00")),
        (ENGINE, replace(other, model="another")),
        (ENGINE, replace(other, owner_died=True)),
    ):
        assert not found(replace(SPACE, engines=engines), errors=errors).reasons


def test_a_coordinator_that_is_missing_silent_or_stalled_is_distinguished() -> None:
    def judged(**changed: Any) -> tuple[State, str]:
        health = judge_coordinator(replace(SPACE, **changed), NOW, LIMITS)
        return health.state, health.text

    assert judged() == (State.HEALTHY, "")
    stalled = judge_coordinator(replace(SPACE, coordinator_answers=False), NOW, LIMITS)
    missing = judge_coordinator(replace(SPACE, coordinated=False), NOW, LIMITS)
    assert stalled.reason is not None
    assert missing.reason is not None
    assert (stalled.reason.code, missing.reason.code) == (
        Code.COORDINATOR_STALLED,
        Code.NO_COORDINATOR,
    )
    assert judged(coordinator_ns=0) == (State.HEALTHY, "")
    assert judged(coordinated=False, coordinator_answers=False)[1].startswith("no coordinator runs")
    assert judged(coordinator_answers=False)[1] == "coordinator stalled: it does not answer"
    assert judged(coordinator_ns=seconds_ago(11)) == (
        State.DEGRADED,
        "coordinator stalled: it has not gone round for 11 s",
    )


def test_a_node_is_as_well_as_what_does_worst_on_it() -> None:
    def state(*spaces: NamespaceReading) -> State:
        return judge_node(NodeReading(NOW, spaces), LIMITS).state

    good = replace(SPACE, engines=(ENGINE,))
    assert state(good) is State.HEALTHY
    assert state(good, replace(SPACE, coordinated=False)) is State.DEGRADED
    assert state(replace(good, ended=(Epoch(2),))) is State.DOWN
    assert state(replace(good, unreadable={Epoch(2): "why"})) is State.DOWN
    assert state(replace(good, engines=(ENGINE, replace(ENGINE, retired=True)))) is State.DEGRADED
    assert state() is State.DOWN
    odd = replace(good, unreadable={Epoch(2): "a", Epoch(3): "b"}, silent=frozenset({Epoch(3)}))
    (space,) = judge_node(NodeReading(NOW, (odd,)), LIMITS).namespaces
    assert [reason.code for reason in space.unknown.values()] == [Code.UNREADABLE, Code.SILENT]
    assert worst(iter(())) is State.HEALTHY
