"""Programs that a test may kill, stop and start again: each on one machine, with a log."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from local_node import clean_environment, wait_until

from .networks import Network

PATIENCE_S = 150.0
"""How long a program may take to serve or to end, on a machine of a fifth of the usual speed."""
LOG_TAIL = 4000


@dataclass
class Service:
    """A program on a machine.  ``serves`` says, seen from that machine, whether it is of use."""

    name: str
    network: Network
    command: Sequence[str]
    log: Path
    serves: Callable[[], bool]
    environment: Mapping[str, str] = field(default_factory=dict)
    process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it, again if it has ended, and wait until it serves."""
        with self.log.open("ab") as log, self.network.entered():
            self.process = subprocess.Popen(
                self.command,
                env={**clean_environment(), **self.environment},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                process_group=0,
            )
            for _ in wait_until(f"{self.name} serves", PATIENCE_S):
                if self.serves():
                    break
                if self.process.poll() is not None:
                    raise RuntimeError(f"{self.name} has ended:\n{self.said()}")

    def end(self, number: int = signal.SIGTERM) -> None:
        """End it by a signal, and make sure that it has ended."""
        assert self.process is not None, f"{self.name} was not started"
        self.process.send_signal(signal.SIGCONT)
        self.process.send_signal(number)
        try:
            self.process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            self.kill()

    def kill(self) -> None:
        """End it as a crash would."""
        assert self.process is not None, f"{self.name} was not started"
        self.process.kill()
        self.process.wait()

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """It does nothing in the ``with``, as on a machine that hangs: nobody is told so."""
        assert self.process is not None, f"{self.name} was not started"
        self.process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self.process.send_signal(signal.SIGCONT)

    def said(self) -> str:
        return self.log.read_text(errors="replace")[-LOG_TAIL:]


@contextmanager
def running(*services: Service) -> Iterator[None]:
    """Start services in their order, and end them in the opposite one."""
    started: list[Service] = []
    try:
        for service in services:
            started.append(service)
            service.start()
        yield
    finally:
        for service in reversed(started):
            if service.process is not None and service.process.poll() is None:
                service.end()
