"""Old coordinator and new engines, and the reverse: real wheels in environments of their own."""

from __future__ import annotations

import pytest

from . import toys
from .engines import FakeEngine
from .processes import Node
from .wheels import Installed, Versions, install_all, said_by

pytestmark = [pytest.mark.multiprocess, pytest.mark.long, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Versions:
    return install_all(tmp_path_factory.mktemp("versions"))


@pytest.fixture
def versions(installed: Versions) -> tuple[Installed, Installed]:
    return installed.present, installed.newer


@pytest.mark.parametrize("engine_is", ["newer", "older"])
def test_both_versions_and_who_must_upgrade_are_named(
    node: Node, versions: tuple[Installed, Installed], engine_is: str
) -> None:
    own, other = versions if engine_is == "newer" else versions[::-1]
    coordinator = node.coordinator(python=own.python)
    refused = FakeEngine(node, "other", python=other.python).heard("refused")
    for side in versions:
        assert f"protocol {side.protocol} (kvshm {side.version})" in refused["reason"]
    upgrade = {
        "newer": f"upgrade kvshm in the coordinator's environment to {other.version}",
        "older": f"upgrade kvshm in the engine's environment to {own.version}",
    }
    assert upgrade[engine_is] in refused["remedy"]
    assert not refused["retry"]
    coordinator.wait_err(f"event=refused .*engine=other .*{upgrade[engine_is]}")
    pair = [FakeEngine(node, name, python=own.python) for name in "ab"]
    pair[0].heard("engine_joined", name="b")  # and no one else, whatever came before
    assert not pair[0].process.out.matching(lambda line: '"name": "other"' in line)
    assert coordinator.terminate() == 0
    assert "Traceback" not in str(coordinator.err)


@pytest.mark.parametrize("coordinator_is", ["older", "newer"])
def test_releases_of_one_protocol_and_layout_share_in_any_mixture(
    node: Node, installed: Versions, coordinator_is: str
) -> None:
    both = (installed.present, installed.next)
    coordinator = node.coordinator(python=both[coordinator_is == "newer"].python)
    coordinator.wait_err(f"version={both[coordinator_is == 'newer'].version}")
    engines = [toys.start(node, seed, python=one.python) for seed, one in enumerate(both)]
    results = toys.finish(engines)
    assert all(result["imported"] > 0 for result in results)
    assert [result["wrong"] for result in results] == [0, 0]
    assert coordinator.terminate() == 0


def test_tools_name_the_version_of_what_they_cannot_read(
    node: Node, versions: tuple[Installed, Installed]
) -> None:
    for one, other in (versions, versions[::-1]):
        engine = FakeEngine(node, "e", python=one.python)
        place = ("--run-dir", str(node.run_dir), "--namespace", node.namespace)
        status, said = said_by(other, "kvshm.tools.dump_index", *place)
        assert status == 0
        assert f"has layout {one.layout}, this kvshm reads {other.layout}" in said
        assert "Traceback" not in said
        engine.end()


def test_rolling_upgrade_one_process_after_the_other(
    node: Node, versions: tuple[Installed, Installed]
) -> None:
    """docs/deployment.md: the coordinator first, then one engine after the other."""
    old, new = versions
    coordinator = node.coordinator(python=old.python)
    engines = [toys.start(node, seed, python=old.python) for seed in (1, 2)]
    assert all(toys.result(engine)["imported"] > 0 for engine in engines)

    assert coordinator.terminate() == 0
    coordinator = node.coordinator(python=new.python)
    for engine in engines:
        engine.wait_err(
            rf"the coordinator refuses this engine: .*protocol {old.protocol} .*"
            rf"protocol {new.protocol} .*upgrade kvshm in the engine's environment"
        )
    assert [toys.more(engine)["wrong"] for engine in engines] == [0, 0]  # they serve on

    toys.finish(engines[:1])
    first = toys.start(node, 3, python=new.python)
    coordinator.wait_err(f"event=join .*pid={first.pid} ")
    assert toys.more(engines[1])["wrong"] == 0
    engines[1].kill()  # no one here can read its table, but what it leaves behind is removed
    second = toys.start(node, 4, python=new.python)
    results = toys.finish([first, second])
    assert all(result["imported"] > 0 for result in results)
    assert [result["wrong"] for result in results] == [0, 0]
    assert coordinator.terminate() == 0
    assert not list(node.run_dir.iterdir())


def test_upgrade_without_a_gap_by_a_second_namespace(
    node: Node, versions: tuple[Installed, Installed]
) -> None:
    """docs/deployment.md: old and new engines share among themselves, in one run directory."""
    later = node.with_other_namespace()
    coordinators, engines = [], []
    for place, installed in zip((node, later), versions, strict=True):
        coordinators.append(place.coordinator(python=installed.python))
        engines += [toys.start(place, seed, python=installed.python) for seed in (1, 2)]
    results = toys.finish(engines)
    assert all(result["imported"] > 0 for result in results)
    assert [result["wrong"] for result in results] == [0] * 4
    assert not any(engine.err.matching(lambda line: "refuses" in line) for engine in engines)
    assert [coordinator.terminate() for coordinator in coordinators] == [0, 0]
    assert not list(node.run_dir.iterdir())
