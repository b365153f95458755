"""The asyncio forms: an event loop goes on while they wait."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable
from typing import TypeVar

import pytest

from kvshm import LoadState, MisuseError

from .joined import Toys, content
from .processes import PATIENCE_SECONDS

pytestmark = pytest.mark.multiprocess

T = TypeVar("T")


class Ticks:
    def __init__(self) -> None:
        self._count = 0
        self._more = asyncio.Event()
        self._task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(0)
            self._count += 1
            self._more.set()

    async def turns(self, number: int) -> None:
        until = self._count + number
        while self._count < until:
            self._more.clear()
            await self._more.wait()

    def end(self) -> None:
        self._task.cancel()


def run(what: Awaitable[T]) -> T:
    async def bounded() -> T:
        return await asyncio.wait_for(what, PATIENCE_SECONDS)

    return asyncio.run(bounded())


def test_a_loop_goes_on_while_a_load_is_awaited(toys: Toys) -> None:
    _a, b, keys, found = toys.prefix()

    async def go() -> None:
        ticks = Ticks()
        with b.copies_held_up():
            load = b.node.load(found, range(6))
            assert await load.wait_async(0) is LoadState.PENDING
            waiting = asyncio.ensure_future(load.wait_async())
            await ticks.turns(100)
            assert not waiting.done()
        assert await waiting is LoadState.DONE
        assert await load is LoadState.DONE
        ticks.end()

    run(go())
    assert b.holds(range(6), keys) == [True] * 6


def test_a_loop_goes_on_while_it_waits_for_keys(toys: Toys) -> None:
    a, b = toys.pair()
    keys = a.prompt()

    async def go() -> None:
        ticks = Ticks()
        assert not await b.node.wait_for_async(keys, 0.001)
        waiting = asyncio.ensure_future(b.node.wait_for_async(keys))
        await ticks.turns(100)
        assert not waiting.done()
        a.compute(keys, range(6))
        assert (await waiting).length == 6
        with pytest.raises(MisuseError, match="not tokens"):
            await b.node.wait_for_async(keys, None, 7)
        ticks.end()

    run(go())


def test_a_loop_goes_on_while_readers_are_waited_for(toys: Toys) -> None:
    """The copy is held up until the loop has turned, and the exporter waits for it."""
    a = toys.join("a", patient=True)
    b = toys.join("b")
    keys = a.prompt()
    a.compute(keys, range(6))
    found = b.node.wait_for(keys, PATIENCE_SECONDS)

    async def go() -> None:
        ticks = Ticks()
        with b.copies_held_up():
            load = b.node.load(found, range(6))
            retracting = asyncio.ensure_future(a.node.retract_async(range(6)))
            await ticks.turns(100)
            assert not retracting.done()
        await retracting
        a.write(0, b"others")
        assert await load is LoadState.DONE
        with pytest.raises(MisuseError, match="does not exist"):
            await a.node.retract_async([-1])
        ticks.end()

    run(go())
    assert b.read(0) == content(keys[0])


def test_other_threads_wake_a_waiting_loop(toys: Toys) -> None:
    a, b = toys.pair()
    keys = a.prompt()

    async def go() -> int:
        publishing = threading.Thread(target=a.compute, args=(keys, range(6)))
        waiting = asyncio.ensure_future(b.node.wait_for_async(keys))
        publishing.start()
        found = await waiting
        publishing.join()
        return found.length

    assert run(go()) == 6
