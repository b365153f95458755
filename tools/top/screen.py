"""Shows frames in a terminal until ``q``.  Uses rich.

Looks are made on a thread, so that keys are answered while a look waits for a stopped engine.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import termios
import tty
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from threading import Event, Thread
from types import FrameType

from rich.console import Console, ConsoleDimensions, Group
from rich.live import Live
from rich.text import Text

from ..output import EXIT_TERMINATED
from .frame import frame
from .view import View

PLAIN_WIDTH = 200
"""Of frames that are not written to a terminal, without $COLUMNS."""


def print_frame(view: View) -> None:
    """Print one frame as text; in colour on a terminal, unless NO_COLOR is set."""
    terminal = sys.stdout.isatty()
    width = None if terminal or "COLUMNS" in os.environ else PLAIN_WIDTH
    console = Console(width=width, highlight=False, markup=False, emoji=False)
    with console.capture() as text:  # rich would end the program if the reader has gone
        for line in frame(view, console.width, None):
            line.rstrip()
            console.print(line, soft_wrap=True)
    print(text.get(), flush=True)


class Screen:
    """The alternate screen of a terminal.  Main thread only, since it handles signals."""

    def __init__(self, look: Callable[[], View], interval: float) -> None:
        """``look``: makes the next view, on another thread; ``interval``: seconds between looks."""
        self._look, self._interval = look, interval
        self._view: View | None = None
        self._failure: BaseException | None = None
        self._ended = Event()
        self._woken, self._waker = os.pipe()
        os.set_blocking(self._waker, False)

    def run(self, first: View) -> None:
        """Show views until ``q`` or Ctrl-C, and restore the terminal; raise what a look raises."""
        self._view = first
        console = Console(highlight=False, markup=False, emoji=False)
        thread = Thread(target=self._make_views, name="kvshm-top-looks", daemon=True)
        try:
            with (
                self._signals(),
                _keys_at_once(),
                Live(console=console, screen=True, auto_refresh=False) as live,
            ):
                thread.start()
                self._follow(live)
        except KeyboardInterrupt:
            pass
        finally:
            self._ended.set()
            if thread.ident is not None:
                thread.join()  # the reader's memory is unmapped after this
            for end in (self._woken, self._waker):
                os.close(end)
        if self._failure is not None:
            raise self._failure

    def _follow(self, live: Live) -> None:
        while self._failure is None:
            assert self._view is not None
            if all(size := os.get_terminal_size(sys.stdout.fileno())):
                live.console.size = ConsoleDimensions(*size)  # $COLUMNS may be of earlier
            width, height = live.console.size
            lines = frame(self._view, width, height - 1)
            live.update(Group(*lines, Text("q ends", "dim")), refresh=True)
            if self._wait():
                return

    def _wait(self) -> bool:
        """Wait until there is something to show; return whether the user has asked for the end."""
        keys = _keyboard()
        ready, _, _ = select.select([self._woken, *keys], [], [])
        if self._woken in ready:
            os.read(self._woken, 4096)
        for key in {*keys} & {*ready}:
            typed = os.read(key, 4096)
            return not typed or b"q" in typed or b"Q" in typed
        return False

    def _make_views(self) -> None:
        while not self._ended.wait(self._interval):
            try:
                self._view = self._look()
            except BaseException as exc:  # raised again by the main thread
                self._failure = exc
                return
            finally:
                self._wake()

    def _wake(self) -> None:
        with suppress(BlockingIOError):  # it is awake already
            os.write(self._waker, b".")

    @contextmanager
    def _signals(self) -> Iterator[None]:
        """Show the frame anew when the terminal changes its size, and end in good order."""

        def resized(_number: int, _frame: FrameType | None) -> None:
            self._wake()

        def terminated(_number: int, _frame: FrameType | None) -> None:
            sys.exit(EXIT_TERMINATED)

        wanted = {signal.SIGWINCH: resized, signal.SIGTERM: terminated}
        before = {number: signal.signal(number, handler) for number, handler in wanted.items()}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def _keyboard() -> list[int]:
    typing = sys.stdin is not None and sys.stdin.isatty()  # None: it was closed
    return [sys.stdin.fileno()] if typing else []


@contextmanager
def _keys_at_once() -> Iterator[None]:
    """Get keys unshown and without Enter.  Ctrl-Z and Ctrl-\\ do nothing: the shell would go on in
    the alternate screen."""
    if not (keys := _keyboard()):
        yield
        return
    (terminal,) = keys
    before = termios.tcgetattr(terminal)
    tty.setcbreak(terminal)
    changed = termios.tcgetattr(terminal)
    changed[6][termios.VSUSP] = changed[6][termios.VQUIT] = os.fpathconf(terminal, "PC_VDISABLE")
    termios.tcsetattr(terminal, termios.TCSADRAIN, changed)
    try:
        yield
    finally:
        termios.tcsetattr(terminal, termios.TCSADRAIN, before)
