"""The program ``kvshm``: imports the command line, which takes half a second."""

from __future__ import annotations

import sys
from collections.abc import Callable

from kvshm._base.interrupts import run_program


def main() -> int:
    """Run the command that the command line names; return the exit status."""
    return run_program(_load)


def _load() -> Callable[[], int]:
    from .cli import main

    return main


if __name__ == "__main__":
    sys.exit(main())
