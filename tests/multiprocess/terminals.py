"""A real terminal for tests: tmux, on a server of the test's own."""

from __future__ import annotations

import shutil
import subprocess
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from .processes import wait_until


def tmux_is_missing() -> bool:
    return shutil.which("tmux") is None


class Terminal:
    def __init__(self, argv: Sequence[str], width: int, height: int) -> None:
        self._server = f"kvshm-{uuid.uuid4().hex[:12]}"
        size = ("-x", str(width), "-y", str(height))
        self._tmux("-f", "/dev/null", "new-session", "-d", *size, *argv)

    def _tmux(self, *arguments: str) -> str:
        done = subprocess.run(
            ["tmux", "-L", self._server, *arguments], capture_output=True, text=True, check=True
        )
        return done.stdout

    @property
    def screen(self) -> str:
        return self._tmux("capture-pane", "-p")

    def wait_for(self, wanted: Callable[[str], object], what: str) -> str:
        seen = [""]

        def holds() -> bool:
            seen[0] = self.screen
            return bool(wanted(seen[0]))

        try:
            wait_until(holds, what)
        except AssertionError:
            print(seen[0])
            raise
        return seen[0]

    def resize(self, width: int, height: int) -> None:
        self._tmux("resize-window", "-x", str(width), "-y", str(height))

    def type(self, key: str) -> None:
        self._tmux("send-keys", key)

    def state(self, variable: str) -> str:
        """One of tmux's variables of the terminal, for instance ``alternate_on``."""
        return self._tmux("display-message", "-p", f"#{{{variable}}}").strip()

    def close(self) -> None:
        self._tmux("kill-server")


@contextmanager
def terminal(argv: Sequence[str], width: int, height: int) -> Iterator[Terminal]:
    opened = Terminal(argv, width, height)
    try:
        yield opened
    finally:
        opened.close()
