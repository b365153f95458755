"""One node on the public surface against a plain model, whatever its callers and its peers do.

Two more engines, in processes of their own, publish, reuse, import, are stopped, killed and started
again, and so is the coordinator.  Never is a byte wrong in a block that a load calls good, in any
of the three; what is refused has changed nothing; loads end; and at the end no lease and no file is
left.  Copies are held up while others act, so that races are ordered by events.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import count, takewhile
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvshm import Found, LoadState, MisuseError, Node

from .processes import PATIENCE_SECONDS, wait_until
from .surface_contents import BLOCKS, content, keys_of
from .surface_model import Modelled, identity, pick
from .surface_world import Peer, World

pytestmark = pytest.mark.multiprocess

prompts, numbers, places = st.integers(0, 2), st.integers(1, 6), st.integers(0, 5)
first = st.integers(0, BLOCKS - 1)
sides = st.integers(0, 1)
_kinds = count()


@pytest.fixture(scope="module", autouse=True)
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    SurfaceMachine.world = world = World()
    try:
        yield world
        met = SurfaceMachine.readers_waited_for and SurfaceMachine.readers_died
        assert met or request.session.testsfailed
        world.end()
    finally:
        world.processes.reap()


class SurfaceMachine(RuleBasedStateMachine):
    """Numbers are taken modulo what there is, since what there is depends on other processes."""

    world: World
    readers_waited_for = readers_died = 0

    @initialize()
    def begin(self) -> None:
        kind = f"kind {next(_kinds)}"
        self.world.begin(kind)
        self.own, self._turn = Modelled(self.world.place, kind), 0
        self.peer_publishes(0, 0, 0, 6, True)
        self.peer_publishes(1, 1, 0, 6, True)

    @property
    def node(self) -> Node:
        return self.own.node

    # -- the node

    @rule(prompt=prompts, start=places, number=numbers, at=first)
    def publish(self, prompt: int, start: int, number: int, at: int) -> None:
        keys, free = keys_of(prompt), self.own.free
        blocks = pick(free, at, min(number, len(keys) - start))
        for block, key in zip(blocks, keys[start:], strict=False):
            self.own.write(block, content(key))
        upto = keys[: start + len(blocks)]
        readable = self.node.publish(upto, blocks, start)
        assert 0 <= readable <= len(blocks)
        assert not (self.own.is_paused and readable)
        self.own.published.update(zip(blocks, keys[start:], strict=False))
        assert self.node.publish(upto, blocks, start) == 0

    @rule(at=first, number=numbers, wait=st.booleans())
    def retract(self, at: int, number: int, wait: bool) -> None:
        blocks = pick(sorted(self.own.published), at, number)
        self.node.retract([*blocks, *self.own.free[:1]], wait)
        if not wait:
            self.node.drain()
        self.own.free_blocks(blocks)

    @rule(prompt=prompts, start=places, at=first)
    def load(self, prompt: int, start: int, at: int) -> None:
        self.begin_load(self.look_up(keys_of(prompt), start % 3), at)

    @rule(prompt=prompts, number=numbers, at=first)
    def load_slowly(self, prompt: int, number: int, at: int) -> None:
        """The copy waits for ``let_go``, or for the end, while others act."""
        self.own.hold_copies()
        self.begin_load(self.look_up(keys_of(prompt)[:number], 0), at)

    @rule(prompt=prompts)
    def find(self, prompt: int) -> None:
        self.own.found = [*self.own.found[-4:], self.look_up(keys_of(prompt), 0)]

    @rule(which=first, at=first)
    def load_what_was_found(self, which: int, at: int) -> None:
        if self.own.found:
            self.begin_load(self.own.found[which % len(self.own.found)], at)

    def begin_load(self, found: Found, at: int) -> None:
        targets = pick(self.own.free, at, found.num_blocks)
        if not found or found.loaded or len(targets) < found.num_blocks:
            self.refused(lambda: self.node.load(found, targets))
            return
        load = self.node.load(found, targets)
        self.own.loads.append((load, found.keys[found.start : found.length]))
        self.refused(lambda: self.node.load(found, targets))

    def finds(self, prompt: int) -> bool:
        return bool(self.node.lookup(keys_of(prompt)))

    def look_up(self, keys: list[bytes], start: int) -> Found:
        found = self.node.lookup(keys, start)
        assert start <= found.length <= len(keys)
        assert bool(found) == (found.length > start)
        assert not (self.own.is_paused and found)
        assert found.num_blocks == found.length - start == len(found.lengths)
        assert sum(owner.num_blocks for owner in found.owners) == found.num_blocks
        assert {owner.name for owner in found.owners} <= {"left", "right"}
        return found

    @rule()
    def let_go(self) -> None:
        self.own.let_go()

    @rule(which=first, seconds=st.sampled_from([0, 0.001, None]))
    def wait(self, which: int, seconds: float | None) -> None:
        if self.own.loads and not (seconds is None and self.own.holds_copies):
            load, _ = self.own.loads[which % len(self.own.loads)]
            assert load.wait(seconds) is not LoadState.PENDING or seconds is not None

    @rule(which=first)
    def cancel(self, which: int) -> None:
        if self.own.loads:
            load, _ = self.own.loads[which % len(self.own.loads)]
            load.cancel()

    @rule()
    def pause_or_resume(self) -> None:
        if self.own.is_paused:
            self.node.resume()
        elif self.seldom():
            self.node.pause()
        else:
            return
        self.own.is_paused = not self.own.is_paused

    @rule()
    def reset(self) -> None:
        if self.seldom():
            self.node.reset(identity(self.own.kind))
            self.own.free_blocks(list(self.own.published))
            if self.world.coordinator is not None and not self.seldom():
                assert self.node.wait_joined(PATIENCE_SECONDS)
                there = sum(p.is_there and not p.was_hindered for p in self.world.peers)
                wait_until(lambda: self.node.stats()["peers"] >= there, "it knows the others")

    @rule(prompt=prompts, at=first)
    def publish_while_an_epoch_begins(self, prompt: int, at: int) -> None:
        """The scheduler's half has begun it, and the rank does not serve its memory yet."""
        if self.world.coordinator is None or self.own.loads or not self.seldom():
            return
        assert self.node.wait_joined(PATIENCE_SECONDS)
        with self.own.openings_held_up() as begun:
            self.node.reset()
            self.own.free_blocks(list(self.own.published))
            assert begun.wait(PATIENCE_SECONDS)
            self.publish(prompt, 0, 6, at)
            self.own.check()
        assert self.node.wait_joined(PATIENCE_SECONDS)

    def seldom(self) -> bool:
        self._turn += 1
        return self._turn % 4 == 0

    @rule(prompt=prompts)
    def contains(self, prompt: int) -> None:
        published = {*self.own.published.values()}
        for key, where in zip(keys_of(prompt), self.node.contains(keys_of(prompt)), strict=True):
            assert (where == "own") == (key in published)

    @rule(prompt=prompts, at=first, how=st.integers(0, 10))
    def misuse(self, prompt: int, at: int, how: int) -> None:
        node, keys = self.node, keys_of(prompt)
        published = sorted(self.own.published)
        calls: list[Callable[[], Any]] = [
            lambda: node.publish(keys[:1], [BLOCKS]),
            lambda: node.publish([], [], 0, 1),
            lambda: node.publish(keys, self.own.free[:1], len(keys)) if self.own.free else no(),
            lambda: node.publish(keys, self.own.free[:1]) if self.own.free else no(),
            lambda: node.retract([*published, -1]),
            lambda: node.lookup(keys, len(keys) + 1),
            lambda: node.wait_for(keys, None, -1),
            lambda: node.load(Found(None, keys, 0, None), []),
        ]
        if published:
            block, other = published[at % len(published)], b"\0" * 32
            calls.append(lambda: node.publish([other], [block]))
        self.refused(calls[how % len(calls)])

    @rule(which=first, at=first, publish=st.booleans())
    def misuse_of_a_load(self, which: int, at: int, publish: bool) -> None:
        """Its blocks are refused, unless it has just ended."""
        if not self.own.loads:
            return
        load, _ = self.own.loads[which % len(self.own.loads)]
        block, keys = load.targets[at % len(load.targets)], keys_of(0)
        try:
            self.node.publish(keys[:1], [block]) if publish else self.node.retract([block])
        except MisuseError:
            return
        assert load.state is not LoadState.PENDING
        self.node.retract([block])

    def refused(self, call: Callable[[], Any]) -> None:
        """It is a misuse; the invariant sees that nothing has changed."""
        with pytest.raises(MisuseError):
            call()

    # -- the others

    def peer(self, side: int) -> Peer:
        return self.world.peers[side]

    @rule(side=sides, prompt=prompts, start=places, number=numbers, seen=st.booleans())
    def peer_publishes(self, side: int, prompt: int, start: int, number: int, seen: bool) -> None:
        if (peer := self.peer(side)).is_there:
            length = peer.do("publish", prompt=prompt, start=start, number=number)["length"]
            hindered = self.own.is_paused or peer.was_hindered or self.world.coordinator is None
            if seen and not hindered and length > start:
                found = self.node.wait_for(keys_of(prompt)[:length], PATIENCE_SECONDS, start)
                assert found.length == length, "what a peer has published is never found"

    @rule(side=sides, at=first, number=numbers)
    def peer_reuses(self, side: int, at: int, number: int) -> None:
        if self.peer(side).is_there:
            self.peer(side).do("reuse", first=at, number=number)

    @rule(side=sides, prompt=prompts, held=st.booleans())
    def peer_loads(self, side: int, prompt: int, held: bool) -> None:
        if self.peer(side).is_there:
            self.peer(side).do("load", prompt=prompt, held=held)

    @rule(side=sides, prompt=prompts, at=first, number=numbers)
    def peer_reuses_in_the_copy(self, side: int, prompt: int, at: int, number: int) -> None:
        """The exporter waits its budget for the copy, which is held up, and writes the blocks."""
        before = len(self.own.loads)
        self.own.hold_copies()
        self.begin_load(self.look_up(keys_of(prompt), 0), at)
        if len(self.own.loads) > before:
            self.own.wait_until_copying()
            self.peer_reuses(side, at, 2 + number)
            self.own.let_go()
            self.own.loads[-1][0].wait()

    @rule(side=sides, prompt=prompts, at=first, number=numbers, reset=st.booleans())
    def reuse_under_a_reader(
        self, side: int, prompt: int, at: int, number: int, reset: bool
    ) -> None:
        if self.peer(side).is_there:
            self.publish(prompt, 0, 6, at)
            seen = self.seen_by(self.peer(side), prompt)
            self.peer(side).do("load", prompt=prompt, held=True, seen=seen)
            if reset:
                self.reset()
            self.retract(at, 6 + number, wait=bool(at % 2))
            self.peer(side).do("finish")

    @rule(side=sides, prompt=prompts, at=first)
    def a_reader_is_waited_for(self, side: int, prompt: int, at: int) -> None:
        """What is retracted while a peer copies it drains until the copy has ended, of which not
        one block is lost."""
        reader = self.peer(side)
        if not all(peer.is_there and not peer.was_hindered for peer in self.world.peers):
            return
        found, leased = self.read_slowly(reader, prompt, at)
        forced, retracted = self.own.counted("forced"), list(self.own.published)
        self.node.retract(retracted, wait=False)
        assert self.own.draining() == leased & {*retracted}, "a leased block is not waited for"
        good = reader.do("finish")["good"]
        if len(leased) == found:  # else what it found elsewhere may be gone by now
            assert good == len(leased), "a reader has lost a block"
        self.node.drain()
        assert self.own.counted("forced") == forced
        self.own.free_blocks(retracted)
        SurfaceMachine.readers_waited_for += bool(leased)

    @rule(side=sides, prompt=prompts, at=first)
    def a_reader_dies(self, side: int, prompt: int, at: int) -> None:
        """Nothing is reused: its leases are gone because the coordinator gives them back."""
        if self.seldom() and all(p.is_there for p in self.world.peers) and self.world.coordinator:
            _, leased = self.read_slowly(self.peer(side), prompt, at)
            self.peer(side).kill()
            wait_until(lambda: not self.own.leased(), "the leases of the dead are given back")
            SurfaceMachine.readers_died += bool(leased)

    def read_slowly(self, reader: Peer, prompt: int, at: int) -> tuple[int, set[int]]:
        """Have a peer begin to copy a prompt that this node has, too.  Returns how many blocks it
        has found, and which ones it has leased here."""
        self.publish(prompt, 0, 6, at)
        for peer in self.world.peers:
            peer.do("finish")
        found = reader.do("load", prompt=prompt, held=True, seen=self.seen_by(reader, prompt))
        return found["found"], self.own.leased()

    def seen_by(self, peer: Peer, prompt: int) -> int:
        """How many of the prompt's blocks the peer has to find on this node, sooner or later."""
        if peer.was_hindered or self.world.coordinator is None or not self.node.joined:
            return 0
        state = self.node._open
        if state is None or self.own.is_paused:
            return 0
        published = {*self.own.published.values()}
        return len(list(takewhile(published.__contains__, keys_of(prompt))))

    @rule(side=sides)
    def peer_finishes(self, side: int) -> None:
        if self.peer(side).is_there:
            self.peer(side).do("finish")

    @rule(side=sides, how=st.sampled_from(["stop", "go_on", "go_on", "kill", "reset", "leave"]))
    def peer_is_disturbed(self, side: int, how: str) -> None:
        peer = self.peer(side)
        if how == "go_on":
            peer.go_on()
        elif self.seldom() and how != "reset":
            getattr(peer, how)()
        elif self.seldom() and peer.is_there:
            peer.do("reset")

    @rule(side=sides)
    def peer_comes_back(self, side: int) -> None:
        if not (peer := self.peer(side)).kind:
            peer.join(self.own.kind)
            self.peer_publishes(side, side, 0, 6, True)

    @rule(dies=st.booleans())
    def coordinator_is_disturbed(self, dies: bool) -> None:
        if dies and self.seldom():
            self.world.kill_coordinator()
        elif not dies:
            self.world.start_coordinator()

    # -- what holds

    @invariant()
    def the_model_is_right(self) -> None:
        self.own.check()

    def teardown(self) -> None:
        if not hasattr(self, "own"):
            return
        try:
            self.own.end_loads()
            self.world.start_coordinator()
            for peer in self.world.peers:
                peer.go_on()
                if peer.kind:
                    peer.do("finish")
                    peer.do("reuse", first=0, number=BLOCKS)
            wait_until(lambda: not any(map(self.finds, range(3))), "what is retracted is forgotten")
            self.world.check_no_leases()
        finally:
            self.own.close()
            for peer in self.world.peers:
                peer.leave()
        self.world.check_nothing_served()


def no() -> None:
    raise MisuseError("nothing to misuse")


QUICK = settings(
    max_examples=14,
    stateful_step_count=100,
    deadline=None,
    derandomize=True,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)

TestSurface = SurfaceMachine.TestCase
TestSurface.settings = QUICK


class _ForLong(SurfaceMachine):
    """The same machine, as another test."""


TestSurfaceForLong = pytest.mark.nightly(_ForLong.TestCase)
TestSurfaceForLong.settings = settings(QUICK, max_examples=50, derandomize=False)
