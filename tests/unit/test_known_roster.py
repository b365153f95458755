"""When an engine that has joined knows all engines that the roster named then."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvshm._base.ids import Epoch, Fingerprint
from kvshm._engine.epoch_state import EpochState
from kvshm._engine.roster_handler import RosterHandler
from kvshm._node.peers import Peers
from kvshm._node.protocol import EngineGone, EngineJoined, EngineSuspected, Joined
from kvshm._node.updates import Update
from kvshm._shm.own_slot_table import TableSpec

from .exporters import OWN_EPOCH, Clock, Exporter, Make, break_version, mend_version, offered
from .served import AnyTable

OWN = Epoch(OWN_EPOCH)


@pytest.fixture
def table(namespace: str) -> Iterator[AnyTable]:
    spec = TableSpec(namespace, "me", 8, 16, 1, Fingerprint(bytes(32)))
    table = AnyTable.create(spec, OWN)
    yield table
    table.close()


@pytest.fixture
def handler(table: AnyTable, peers: Peers) -> RosterHandler:
    state = EpochState(table, peers, None, None)  # type: ignore[arg-type]  # not touched
    return RosterHandler(lambda: state, lambda: state)


def joined(*roster: Exporter) -> Joined:
    infos = [exporter.info for exporter in roster]
    return Joined(
        protocol=1, coordinator_epoch=1, engine_epoch=OWN, lease_bit=0, sequence=0,
        roster=infos, sequences={}, suspected=[], incompatible=[],
    )  # fmt: skip


def new(exporter: Exporter) -> EngineJoined:
    return EngineJoined(coordinator_epoch=1, sequence=0, engine=exporter.info, engine_sequence=0)


def test_it_knows_them_when_the_table_of_the_last_one_is_scanned(
    handler: RosterHandler, peers: Peers, exporter: Make
) -> None:
    a, b = exporter("a"), exporter("b")
    b.publish(1)
    assert not handler.knows_roster(OWN), "it has not joined"
    handler.apply(joined(a, b))
    assert not handler.knows_roster(OWN)
    handler.apply(new(a))
    assert not handler.knows_roster(OWN)
    handler.apply(new(b))
    assert handler.knows_roster(OWN)
    assert offered(peers, 1) == [(b.info.epoch, 1, 0)]
    assert not handler.knows_roster(Epoch(OWN + 1)), "of another epoch nothing is known"


def test_an_empty_roster_is_known_at_once(handler: RosterHandler) -> None:
    handler.apply(joined())
    assert handler.knows_roster(OWN)


def test_who_cannot_be_attached_yet_is_awaited(
    handler: RosterHandler, exporter: Make, clock: Clock
) -> None:
    a = exporter("a")
    break_version(a)
    for update in (joined(a), new(a)):
        handler.apply(update)
    handler.beat()
    assert not handler.knows_roster(OWN)
    mend_version(a)
    clock.now += 60
    handler.beat()
    assert handler.knows_roster(OWN)


@pytest.mark.parametrize("kind", ["suspected", "gone"])
def test_who_has_nothing_to_offer_is_not_awaited(
    handler: RosterHandler, exporter: Make, kind: str
) -> None:
    a, b = exporter("a"), exporter("b")
    break_version(a)
    for update in (joined(a, b), new(a), new(b)):
        handler.apply(update)
    assert not handler.knows_roster(OWN)
    about = {"coordinator_epoch": 1, "sequence": 1, "epoch": a.info.epoch}
    reported: Update = (
        EngineGone(**about, reason="left") if kind == "gone" else EngineSuspected(**about)
    )
    handler.apply(reported)
    assert handler.knows_roster(OWN)


def test_who_joins_later_is_not_awaited(handler: RosterHandler, exporter: Make) -> None:
    a = exporter("a")
    break_version(a)
    handler.apply(joined())
    handler.apply(new(a))
    assert handler.knows_roster(OWN)
