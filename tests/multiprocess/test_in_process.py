"""A coordinator on a thread of a program: engines of the program and of others share through it,
and the program keeps everything else as it was."""

from __future__ import annotations

import gc
import logging
import os
import random
import resource
import signal
import threading
import time
import warnings
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from kvshm._base.rundir import command_endpoint, lock_path
from kvshm._base.timing import TIMING
from kvshm._node.locks import take_lock
from kvshm.config import Config
from kvshm.coordinator import bounds, in_process, service
from kvshm.coordinator.bounds import num_open_descriptors
from kvshm.coordinator.in_process import serve
from kvshm.coordinator.server import Server
from kvshm.errors import AlreadyRunning, KvshmError, RunDirectoryError, TransportError

from ..descriptors import names_open
from ..unit.few_threads import no_threads
from . import toys
from .engines import FakeEngine
from .joined import TOKENS, Toys, ended
from .processes import PATIENCE_SECONDS, Node, wait_until
from .toy_engine import ToyEngine, chain_of

pytestmark = pytest.mark.multiprocess

FAMILIES, BLOCKS = 6, 24


def config_of(node: Node) -> Config:
    return Config(run_dir=str(node.run_dir), namespace=node.namespace)


@pytest.fixture
def engines(node: Node, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], list[ToyEngine]]:
    monkeypatch.setenv("KVSHM_RUN_DIR", str(node.run_dir))
    monkeypatch.setenv("KVSHM_NAMESPACE", node.namespace)
    monkeypatch.setenv("KVSHM_VERIFY", "1")
    return lambda count: [ToyEngine(BLOCKS, 1, 4096) for _ in range(count)]


def work(engines: list[ToyEngine], blocks: int, dice: random.Random) -> None:
    wanted = [engine.imported + blocks for engine in engines]
    while any(e.imported < most for e, most in zip(engines, wanted, strict=True)):
        for engine in engines:
            engine.request(chain_of(dice.randrange(FAMILIES), dice.randint(2, BLOCKS // 2)))
        time.sleep(0.02)


def forked_child() -> int:
    with warnings.catch_warnings():  # from Python 3.12 on of threads that the child lacks
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


def forked(act: Callable[[], None]) -> int:
    child = forked_child()
    if child == 0:
        try:
            act()
        except BaseException:
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_engines_of_one_process_and_of_another_share_every_byte(
    node: Node, engines: Callable[[int], list[ToyEngine]]
) -> None:
    dice = random.Random(1)
    with serve(config_of(node)) as thread:
        first, second = made = engines(2)
        for engine in made:
            engine.open()
        wait_until(lambda: first.num_peers == second.num_peers == 1, "they know each other")
        other = toys.start(
            node, 7, "--blocks", str(BLOCKS), "--region-bytes", "4096", "--imported", "5"
        )
        work(made, 10, dice)

        def end_all() -> None:
            for engine in made:
                engine.cache.publisher.retract(list(engine.lru))
                engine.close()
            thread.close()

        assert [forked(lambda: None), forked(end_all)] == [0, 0]
        work(made, 10, dice)
        assert thread.running
        said = toys.result(other)
        assert said["imported"] >= 5
        for outcome in (said, *(engine.summary() for engine in made)):
            assert (outcome["wrong"], outcome["violations"]) == (0, [])
            assert "mismatched" not in outcome["counters"]
        for engine in made:
            engine.close()
        other.say("")
        assert other.wait() == 0
    assert list(node.run_dir.iterdir()) == []


def test_joined_nodes_of_one_process_share(node: Node) -> None:
    with serve(config_of(node)), closing(Toys(node, "kind")) as joined:
        a, b = joined.pair()
        keys = a.node.keys(range(6 * TOKENS))
        a.compute(keys, range(6))
        found = b.node.wait_for(keys, PATIENCE_SECONDS)
        load = ended(b.node.load(found, range(20, 26)))
        assert (load.good, load.failed) == (6, ())
        assert b.holds(range(20, 26), keys) == [True] * 6


def state_of_process() -> list[object]:
    """What belongs to the program in which a coordinator's thread runs."""
    os.umask(umask := os.umask(0))
    logger = logging.getLogger("kvshm.coordinator")
    return [
        umask,
        [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)],
        resource.getrlimit(resource.RLIMIT_NOFILE),
        [*logging.getLogger().handlers, *logger.handlers],
        (logging.getLogger().level, logger.level, logger.propagate),
    ]


def threads_and_descriptors() -> tuple[set[threading.Thread], int]:
    gc.collect()  # what earlier tests have dropped
    return set(threading.enumerate()), num_open_descriptors()


def test_the_process_is_left_as_it_was(node: Node, caplog: pytest.LogCaptureFixture) -> None:
    with serve(config_of(node)):
        pass  # whatever libzmq and Python open for good
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 900), hard))
    try:
        before = state_of_process(), *threads_and_descriptors()
        with caplog.at_level(logging.INFO, "kvshm.coordinator"), serve(config_of(node)):
            begun = set(threading.enumerate()) - before[1] - {served_tables()}
            # Threads of engines of earlier tests may end, or begin another, meanwhile.
            (one,) = (thread for thread in begun if "coordinator" in thread.name)
            assert one.name == "kvshm-coordinator"
            engine = FakeEngine(node, "a")
            engine.joined()
            engine.end()
            assert state_of_process()[:3] == before[0][:3]
        # Threads of earlier tests may have something open at this moment.
        wait_until(
            lambda: (state_of_process(), *threads_and_descriptors()) == before, "all is as before"
        )
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    said = [record.getMessage().split()[0] for record in caplog.records]
    assert said[0] == "event=serving"
    assert {"event=join", "event=ended"} <= {*said}


def served_tables() -> threading.Thread:
    return next(t for t in threading.enumerate() if t.name == "kvshm-fds")


def test_one_process_serves_two_namespaces_and_none_twice(node: Node) -> None:
    other = node.with_other_namespace()
    with serve(config_of(node)) as thread, serve(config_of(other)) as second:
        FakeEngine(node, "a").joined()
        FakeEngine(other, "b").joined()
        with pytest.raises(AlreadyRunning, match=f"pid {os.getpid()}"), serve(config_of(node)):
            pass
        program = node.start_coordinator()
        assert (program.wait(), thread.running, second.running) == (3, True, True)
    assert not thread.running
    program = node.coordinator()
    with pytest.raises(AlreadyRunning, match=f"pid {program.pid}"), serve(config_of(node)):
        pass
    assert program.terminate() == 0
    with serve(config_of(node)) as again:
        assert again.running


def test_the_environment_says_where(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVSHM_RUN_DIR", str(node.run_dir))
    monkeypatch.setenv("KVSHM_NAMESPACE", node.namespace)
    with serve():
        FakeEngine(node, "a").joined()


def no_thread(thread: threading.Thread) -> None:
    raise TransportError("none left")


def test_a_start_that_fails_leaves_nothing_open(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serve(config_of(node)):
        pass
    before = threads_and_descriptors()
    taken = Path(command_endpoint(node.run_dir, node.namespace).removeprefix("ipc://"))
    taken.mkdir()
    with pytest.raises(RunDirectoryError, match="cannot be made"), serve(config_of(node)):
        pass
    taken.rmdir()
    with pytest.raises(RunDirectoryError), serve(Config(run_dir="/proc")):
        pass
    with no_threads(), pytest.raises(KvshmError, match="ulimit -u"), serve(config_of(node)):
        pass
    with monkeypatch.context() as patch:
        patch.setattr(in_process, "start_thread", no_thread)
        with pytest.raises(TransportError, match="none left"), serve(config_of(node)):
            pass
    wait_until(lambda: threads_and_descriptors() == before, "all is as before")
    with serve(config_of(node)) as thread:
        assert thread.running


def test_a_thread_that_fails_says_so_and_ends_nothing_else(
    node: Node, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: Server, stopping: object) -> None:
        raise ZeroDivisionError("a bug")

    with monkeypatch.context() as patch:
        patch.setattr(Server, "run", fail)
        with serve(config_of(node)) as thread:
            wait_until(lambda: not thread.running, "the thread ends")
    [bug] = [record for record in caplog.records if "event=bug" in record.getMessage()]
    assert bug.exc_info is not None
    with serve(config_of(node)) as thread:
        Path(command_endpoint(node.run_dir, node.namespace).removeprefix("ipc://")).unlink()
        wait_until(lambda: not thread.running, "the thread ends")
    assert "event=stopped" in caplog.text
    assert "start the coordinator again" in caplog.text
    with serve(config_of(node)) as thread:
        FakeEngine(node, "a").joined()
        assert thread.running


def test_an_idle_thread_sleeps(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """It wakes up for its bounds and its ticks, a few times a second."""
    real, turns = Server._wait, []
    monkeypatch.setattr(Server, "_wait", lambda self, left: (turns.append(left), real(self, left)))
    with serve(config_of(node)):
        FakeEngine(node, "a").joined()
        before = len(turns)
        time.sleep(1.0)
        assert 0 < len(turns) - before < 50


OUTLIVED = """
import os, sys, time
from kvshm.config import Config
from kvshm.coordinator.in_process import serve
with serve(Config(run_dir=sys.argv[1], namespace=sys.argv[2])) as thread:
    print("serving", flush=True)
    input()
    parent = os.getpid()
    if os.fork():
        os._exit(0)  # without an end in order: the files stay
    while os.getppid() == parent:
        time.sleep(0.01)
    links = [os.readlink(entry.path) for entry in os.scandir("/proc/self/fd") if entry.is_symlink()]
    print(thread.running, [link for link in links if link.startswith("/memfd")], flush=True)
    input()
print("left", flush=True)
"""


def test_a_child_that_outlives_it_holds_nothing(node: Node) -> None:
    """Neither lock nor tables, nor a socket that would seem to be served; and its end ends
    nothing."""
    place = str(node.run_dir), node.namespace
    program = node.processes.python("program", "-c", OUTLIVED, *place)
    program.wait_out(lambda line: line == "serving")
    engine = FakeEngine(node, "a")
    engine.joined()
    since = engine.mark()
    program.say("fork")
    assert program.wait_out(lambda line: line != "serving") == "False []"
    with serve(config_of(node)) as thread:
        engine.joined(since)
        program.say("end")
        program.wait_out(lambda line: line == "left")
        assert thread.running
        FakeEngine(node, "b").joined()


@pytest.mark.parametrize(("owner", "name"), [(service, "_Lock"), (Server, "open")])
def test_a_child_forked_while_it_starts_holds_nothing(
    node: Node, owner: object, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forked when lock or sockets have been made, and the thread does not have them yet."""
    make = getattr(owner, name)
    children: list[int] = []
    waiting, end = os.pipe()

    def made_in_a_fork(*args: Any, **kwargs: Any) -> object:
        built = make(*args, **kwargs)
        if not children:
            if child := forked_child():
                children.append(child)
            else:
                os.close(end)
                os.read(waiting, 1)
                os._exit(0)
        return built

    monkeypatch.setattr(owner, name, made_in_a_fork)
    with serve(config_of(node)):
        FakeEngine(node, "a").joined()
    with serve(config_of(node)):
        FakeEngine(node, "b").joined()
    os.close(end)
    assert os.waitpid(children[0], 0)[1] == 0
    os.close(waiting)


def test_a_child_does_not_keep_the_lock_where_sockets_are_not_listed(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "_UNIX_SOCKETS", Path("/proc/no/such/file"))
    lock = lock_path(node.run_dir, node.namespace)

    def has_no_lock() -> None:
        assert os.fspath(lock.resolve()) not in names_open()

    with serve(config_of(node)):
        with pytest.raises(AssertionError):
            has_no_lock()
        assert forked(has_no_lock) == 0


def is_free(node: Node) -> bool:
    try:
        os.close(take_lock(lock_path(node.run_dir, node.namespace)))
    except AlreadyRunning:
        return False
    return True


def test_program_without_descriptors_is_served_again_when_it_has_some(
    node: Node, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing of the program is closed, neither here nor in a child that it forks meanwhile."""
    monkeypatch.setattr(in_process, "TIMING", TIMING.scaled(0.1))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with caplog.at_level(logging.INFO, "kvshm.coordinator"), serve(config_of(node)) as thread:
        engine = FakeEngine(node, "a")
        bit, since = engine.joined()["bit"], engine.mark()
        limit = 2 * num_open_descriptors() + 200
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
        taken: list[int] = []
        try:
            while num_open_descriptors() < limit * 3 // 4 + 1:
                taken.append(os.eventfd(0))
            wait_until(lambda: not thread.running, "it has noticed")
            wait_until(lambda: is_free(node), "it has closed everything, the lock last")
            taken += [os.eventfd(0) for _ in range(20)]  # numbers that the coordinator had

            def all_are_open() -> None:
                for descriptor in taken:
                    os.fstat(descriptor)

            assert [forked(all_are_open), forked(thread.close)] == [0, 0]
            all_are_open()
        finally:
            for descriptor in taken:
                os.close(descriptor)
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert engine.joined(since)["bit"] == bit
        assert thread.running
        assert caplog.text.count("event=exhausted") == 1
        assert caplog.text.count("event=serving") == 2
    assert not engine.all_heard("refused")


def test_program_that_stays_without_descriptors_can_end_it(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch, serve(config_of(node)) as thread:
        patch.setattr(bounds, "num_open_descriptors", lambda: 1 << 30)
        wait_until(lambda: not thread.running, "it has noticed")
        thread.close()
    with serve(config_of(node)) as again:
        assert again.running


def test_memory_of_the_program_is_not_the_coordinators(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bounds, "MAX_MEMORY", 1)
    with serve(config_of(node)) as thread:
        FakeEngine(node, "a").joined()
        time.sleep(4 * TIMING.bounds_check_seconds)
        assert thread.running
