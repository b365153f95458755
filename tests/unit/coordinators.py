"""A coordinator's state as tests speak to it: no socket, no process, no clock."""

from __future__ import annotations

from typing import Any, TypeVar

from kvshm._node.protocol import PROTOCOL_VERSION, Command, EngineInfo, Join, Joined, RankInfo
from kvshm._shm.layout import RECORD_BYTES
from kvshm.coordinator.actions import (
    Action,
    CheckResult,
    CheckTable,
    EngineMessage,
    SendBroadcast,
    Sender,
    SendReply,
)
from kvshm.coordinator.roster import Schedule, State
from kvshm.coordinator.state import decide
from kvshm.interfaces import MemoryDescriptor

UID = 1000
RECORD = bytes(RECORD_BYTES)

A = TypeVar("A")


def new_state(*, grace_over: bool = True) -> State:
    """``grace_over``: no coordinator before it knew engines that may yet come back."""
    schedule = Schedule(grace_over=grace_over)
    return State(epoch=1, namespace="n", uid=UID, schedule=schedule)


def engine(epoch: int, *, pid: int = 0, ranks: tuple[int, ...] = (), **fields: Any) -> EngineInfo:
    pid = pid or epoch
    memory = MemoryDescriptor("none", epoch, 0, [])
    described: dict[str, Any] = {
        "epoch": epoch,
        "name": f"e{epoch}",
        "pid": pid,
        "fingerprint": b"f" * 32,
        "fields": {},
        "num_blocks": 8,
        "ranks": [RankInfo(rank, memory) for rank in ranks or (pid,)],
    }
    return EngineInfo(**{**described, **fields})


def sender_of(info: EngineInfo) -> Sender:
    return Sender(b"route%d" % info.pid, UID, info.pid)


def say(state: State, info: EngineInfo, message: Command, now: float = 0.0) -> list[Action]:
    return decide(state, EngineMessage(sender_of(info), message), now)


def join(
    state: State, info: EngineInfo, now: float = 0.0, sequence: int = 0
) -> tuple[Joined, list[Action]]:
    message = Join(protocol=PROTOCOL_VERSION, engine=info, sequence=sequence)
    assert say(state, info, message, now) == [CheckTable(sender_of(info), message)]
    actions = decide(state, CheckResult(sender_of(info), message, None), now)
    (reply,) = [a.message for a in actions if isinstance(a, SendReply)]
    assert isinstance(reply, Joined)
    return reply, actions


def only(actions: list[Action], kind: type[A]) -> list[A]:
    return [action for action in actions if isinstance(action, kind)]


def published(actions: list[Action]) -> list[Any]:
    return [action.message for action in only(actions, SendBroadcast)]
