"""The coordinator as a process: who joins, who dies, what is left."""

from __future__ import annotations

import os
import signal

import pytest

from kvshm._base.ids import Rank
from kvshm._base.rundir import rank_socket, tables_socket
from kvshm._shm.statistics import SWEPT

from .engines import FakeEngine, in_turn
from .processes import Node, lease_bits, leave_socket, wait_until

pytestmark = pytest.mark.multiprocess


# -- coming and going


def test_serves_and_ends_cleanly(node: Node) -> None:
    coordinator = node.coordinator()
    assert tables_socket(node.run_dir, node.namespace).exists()
    assert coordinator.terminate() == 0
    assert "event=ended" in str(coordinator.err)
    assert not list(node.run_dir.iterdir())


def test_sigint_ends_it_like_sigterm(node: Node) -> None:
    coordinator = node.coordinator()
    coordinator.signal(signal.SIGINT)
    assert coordinator.wait() == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_another_signal_while_python_shuts_down_changes_no_exit_status(
    node: Node, number: signal.Signals
) -> None:
    script = (
        "import os, sys\n"
        "from kvshm.coordinator.__main__ import main\n"
        "class Late:\n"
        f"    def __del__(self, kill=os.kill, pid=os.getpid()): kill(pid, {number.value})\n"
        "late = Late()\n"
        "sys.exit(main())"
    )
    place = ("--run-dir", str(node.run_dir), "--namespace", node.namespace)
    coordinator = node.processes.python("coordinator", "-c", script, *place)
    coordinator.wait_err("event=serving")
    assert coordinator.terminate() == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("early", ["main", "main.__globals__['open_run_directory']"])
def test_a_signal_before_it_serves_ends_it_and_leaves_nothing(
    node: Node, number: signal.Signals, early: str
) -> None:
    """Which status tells: before it has begun it ends as any program does."""
    begun = early != "main"
    script = (
        "import os, signal, sys\n"
        # As in a terminal; what a shell puts in the background ignores it.
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "from kvshm.coordinator.__main__ import main\n"
        f"real = {early}\n"
        "def signalled(*args):\n"
        f"    os.kill(os.getpid(), {number.value})\n"
        "    return real(*args)\n"
        f"{early} = signalled\n"
        "sys.exit(main())"
    )
    node.run_dir.rmdir()
    place = ("--run-dir", str(node.run_dir), "--namespace", node.namespace)
    coordinator = node.processes.python("coordinator", "-c", script, *place)
    assert coordinator.wait() == (0 if begun else -number)
    assert not node.run_dir.exists() or not list(node.run_dir.iterdir())
    node.run_dir.mkdir(mode=0o700, exist_ok=True)


def test_a_second_one_is_refused_and_the_first_goes_on(node: Node) -> None:
    first = node.coordinator()
    second = node.start_coordinator()
    assert second.wait() == 3
    assert f"pid {first.pid}" in str(second.err)
    FakeEngine(node, "a").joined()


def test_an_unusable_run_directory_and_a_wrong_command_line_have_their_own_status(
    node: Node,
) -> None:
    node.run_dir.chmod(0o755)
    coordinator = node.start_coordinator()
    assert coordinator.wait() == 4
    assert f"has mode 0755, wanted 0700; run chmod 700 {node.run_dir}" in str(coordinator.err)
    node.run_dir.chmod(0o700)
    assert node.start_coordinator("--no-such-option").wait() == 2


def test_version_and_documented_exit_status(node: Node) -> None:
    version = node.processes.python("version", "-m", "kvshm.coordinator", "--version")
    assert version.wait() == 0
    assert str(version.out).startswith("kvshm-coordinator 0.")
    usage = node.processes.python("help", "-m", "kvshm.coordinator", "--help")
    assert usage.wait() == 0
    for status in range(6):
        assert f"\n  {status}  " in str(usage.out)


# -- deaths


def test_death_withdraws_sweeps_and_clears_up(node: Node) -> None:
    coordinator = node.coordinator()
    living, dying = in_turn(node, "living", "dying")
    bit, epoch = dying.joined()["bit"], dying.started["epoch"]
    living.heard("engine_joined", name="dying")
    living.do("publish", blocks=[1, 2, 3])
    assert dying.do("lease", epoch=living.started["epoch"])["blocks"] == 3
    table = dying.table()
    assert table.is_alive(Rank(0))
    left = rank_socket(node.run_dir, node.namespace, f"{epoch:x}", 0)
    leave_socket(left)

    dying.process.kill()

    gone = living.heard("engine_gone", epoch=epoch)
    assert gone["reason"] == f"process {dying.process.pid} died"
    assert not gone["usable"], "withdrawn before anybody was told"
    coordinator.wait_err("event=death engine=dying")
    assert not table.is_alive(Rank(0))
    assert lease_bits(living.table()) == 0
    wait_until(lambda: not left.exists(), "what lies there of the dead is removed")
    # Its death is known before the kernel has closed what it served: then it is swept once more.
    wait_until(lambda: node.sockets() == [living.started["epoch"]], "its own socket as well")
    successor = FakeEngine(node, "successor")
    assert successor.joined()["bit"] not in (bit, living.joined()["bit"])  # never used first


def test_death_of_a_rank_ends_the_epoch_but_keeps_the_bit(node: Node) -> None:
    coordinator = node.coordinator()
    watcher = FakeEngine(node, "watcher")
    engine = FakeEngine(node, "engine", "--ranks", "2")
    joined = engine.joined()
    watcher.heard("engine_joined", name="engine")
    table = engine.table()
    assert all(table.is_alive(Rank(rank)) for rank in range(2))

    os.kill(engine.started["workers"][0], signal.SIGKILL)

    wait_until(lambda: table.died, "the kernel has marked it")
    assert not any(table.is_alive(Rank(rank)) for rank in range(2)), "before anybody has told"
    watcher.heard("engine_gone", epoch=joined["epoch"])
    coordinator.wait_err("event=death engine=engine")
    engine.heard("coordinator_lost")
    assert engine.heard("refused")["reason"] == "this epoch has ended"
    mark = engine.mark()
    engine.do("new-epoch")
    assert engine.joined(mark)["bit"] == joined["bit"]


def test_leave_is_reported_and_the_leases_go_with_the_process(node: Node) -> None:
    coordinator = node.coordinator()
    staying, leaving = in_turn(node, "staying", "leaving")
    epoch = leaving.joined()["epoch"]
    staying.heard("engine_joined", name="leaving")
    staying.do("publish", blocks=[5])
    leaving.do("lease", epoch=staying.started["epoch"])
    table = staying.table()
    worker = leaving.table()  # one that has the old table, too, and may give leases back
    worker.begin_pulse(Rank(0))
    mark = leaving.mark()
    leaving.do("new-epoch")
    assert staying.heard("engine_gone", epoch=epoch)["reason"] == "left"
    coordinator.wait_err("event=leave engine=leaving")
    assert lease_bits(table) == 1 << leaving.joined(mark)["bit"], "something of it may be under way"
    assert not coordinator.err.matching(lambda line: "event=death" in line)
    leaving.end()
    staying.heard("engine_gone", epoch=leaving.joined(mark)["epoch"])
    assert lease_bits(table) != 0
    worker.close()
    wait_until(lambda: table.counters.read(SWEPT) > 0, "the leases of the processes are swept")
    assert lease_bits(table) == 0
    assert table.counters.read(SWEPT) == 1


@pytest.mark.usefixtures("hurried")
def test_stopped_engine_is_suspected_then_recovered_never_swept(node: Node) -> None:
    node.coordinator()
    other, stopped = in_turn(node, "other", "stopped")
    epoch = stopped.joined()["epoch"]
    other.heard("engine_joined", name="stopped")
    other.do("publish", blocks=[1])
    stopped.do("lease", epoch=other.started["epoch"])
    held, table = other.table(), stopped.table()
    stopped.process.signal(signal.SIGSTOP)
    other.heard("engine_suspected", epoch=epoch)
    assert lease_bits(held) == 1 << stopped.joined()["bit"]
    assert table.is_alive(Rank(0))
    assert node.segments.table_from_coordinator(epoch).epoch == epoch, "which answers for it"
    stopped.process.signal(signal.SIGCONT)
    other.heard("engine_recovered", epoch=epoch)
    assert lease_bits(held) == 1 << stopped.joined()["bit"]
    assert not other.all_heard("engine_gone")


# -- refusals
