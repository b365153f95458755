"""Transports by setting: one of another package carries blocks, and different ones never mix."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvshm._base.rundir import list_sockets
from tests import other_package

from .processes import Managed, Node
from .toys import finish, result, start

pytestmark = pytest.mark.multiprocess


@pytest.fixture
def other(tmp_path: Path) -> dict[str, str]:
    folder = other_package.install(tmp_path)
    return {"PYTHONPATH": str(folder), "KVSHM_TRANSPORT": other_package.NAME}


def test_engines_share_by_a_transport_of_another_package(node: Node, other: dict[str, str]) -> None:
    node.coordinator()
    engines = [start(node, seed, "--imported", "20", **other) for seed in (1, 2)]
    for engine in engines:
        result(engine)
    # A rank's socket is that of kvshm's own transport.
    ranks = [found for found in list_sockets(node.run_dir, node.namespace) if found.epoch is None]
    assert ranks == []
    for said in finish(engines):
        assert said["imported"] >= 20
        assert said["counters"]["verified"] > 0
        assert (said["wrong"], said["counters"].get("mismatched", 0)) == (0, 0)


def refused(engine: Managed) -> str:
    return engine.wait_err("cannot share with this one").partition("this one: ")[2]


def test_engines_of_different_transports_do_not_share_and_say_so(
    node: Node, other: dict[str, str]
) -> None:
    node.coordinator()
    usual = start(node, 1, "--imported", "5")
    named = start(node, 2, "--imported", "5", KVSHM_TRANSPORT="posix_shm")
    strange = start(node, 3, "--peers", "0", "--loads", "0", **other)
    assert refused(strange) == "transport is procfs here, posix_shm there"
    assert refused(usual) == refused(named) == "transport is posix_shm here, procfs there"
    results = finish([usual, named, strange])
    assert [said["imported"] >= 5 for said in results] == [True, True, False]
    assert [said["wrong"] for said in results] == [0, 0, 0]
