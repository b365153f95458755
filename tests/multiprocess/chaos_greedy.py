"""Opens as many connections as it can to every socket in a run directory, and keeps them.

Run by chaos.py only: RUN_DIR CONNECTIONS SECONDS, all sockets together.
"""

from __future__ import annotations

import resource
import socket
import stat
import sys
import time
from itertools import cycle, islice
from pathlib import Path


def connect(path: Path) -> socket.socket | None:
    """A connection, of whichever kind the socket is; None if it takes none."""
    for kind in (socket.SOCK_STREAM, socket.SOCK_SEQPACKET):
        connection = socket.socket(socket.AF_UNIX, kind)
        connection.setblocking(False)
        try:
            connection.connect(str(path))
            return connection
        except OSError:
            connection.close()
    return None


def main() -> None:
    run_dir, count, seconds = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    sockets = [path for path in run_dir.iterdir() if stat.S_ISSOCK(path.lstat().st_mode)]
    kept = [connect(path) for path in islice(cycle(sockets), count)]
    time.sleep(seconds)
    print(sum(connection is not None for connection in kept), flush=True)


if __name__ == "__main__":
    main()
