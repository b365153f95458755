"""An engine's client and a coordinator that talks nonsense: dropped, counted, logged once."""

from __future__ import annotations

import logging

import msgspec
import pytest

from kvshm._node.protocol import MAX_MESSAGE_BYTES, PROTOCOL_VERSION, EngineGone, Join, encode
from kvshm._shm.statistics import BAD_MESSAGES

from .scripted import Script

pytestmark = pytest.mark.multiprocess


def errors_logged(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]


def counted(script: Script) -> int:
    return script.engine.calls.count(("count", BAD_MESSAGES))


def test_truncated_unknown_and_oversized_messages(
    script: Script, caplog: pytest.LogCaptureFixture
) -> None:
    script.expect(Join)
    reply, broadcast = encode(script.joined(e7=0)), encode(script.events(1, 1, b"1"))
    unknown = msgspec.msgpack.encode({"type": "no-such"})
    bad = [reply[:cut] for cut in range(len(reply))]
    bad += [unknown, reply + b"\0", broadcast, bytes(MAX_MESSAGE_BYTES + 1)]
    for frame in bad:
        script.send_raw([frame])
    script.answer(script.joined(e7=0))
    script.engine.wait("joined", script.joined(e7=0))
    worse = [broadcast[:cut] for cut in range(len(broadcast))]
    worse += [unknown, reply, bytes(MAX_MESSAGE_BYTES + 1)]
    for frame in worse:
        script.publish_raw(frame)
    script.publish(script.events(1, 1, b"1"))
    script.engine.wait("engine_events", 7, b"1")
    assert counted(script) == len(bad) + len(worse)
    (line,) = errors_logged(caplog)
    assert "decoding" in line


def test_a_reply_of_another_version_is_no_place_in_the_roster(
    hasty_script: Script, caplog: pytest.LogCaptureFixture
) -> None:
    script = hasty_script
    script.expect(Join)
    wrong = msgspec.structs.replace(script.joined(), protocol=99)
    for _ in range(3):
        script.answer(wrong)
    script.expect(Join)  # it asks again
    assert not script.client.is_member
    script.answer(script.joined())
    script.engine.wait("joined", script.joined())
    assert counted(script) == 3
    (line,) = errors_logged(caplog)
    assert "99" in line
    assert str(PROTOCOL_VERSION) in line


def test_strange_numbers_end_nothing(script: Script, caplog: pytest.LogCaptureFixture) -> None:
    script.expect(Join)
    huge = (1 << 64) - 1
    strange = script.joined(sequence=0, e7=huge)
    strange = msgspec.structs.replace(
        strange, lease_bit=-(1 << 63), suspected=[huge, -1], sequences={7: huge, -1: -1}
    )
    script.answer(strange)
    script.engine.wait("joined", strange)
    script.publish(EngineGone(coordinator_epoch=1, sequence=1, epoch=-1, reason="\0"))
    script.publish(script.events(2, -5, b""))
    script.publish(EngineGone(coordinator_epoch=1, sequence=3, epoch=7, reason="x" * 100_000))
    script.engine.wait("engine_gone", 7, "x" * 100_000)
    assert counted(script) == 0
    assert errors_logged(caplog) == []
