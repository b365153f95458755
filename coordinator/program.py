"""The program ``kvshm-coordinator``: imports what it consists of."""

from __future__ import annotations

import sys
from collections.abc import Callable

from kvshm._base.interrupts import run_program


def main() -> int:
    """Run the coordinator until SIGTERM or SIGINT; return the exit status."""
    return run_program(_load)


def _load() -> Callable[[], int]:
    from .__main__ import main

    return main


if __name__ == "__main__":  # as kvshm coordinator starts it
    sys.exit(main())
