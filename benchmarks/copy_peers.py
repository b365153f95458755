"""Other caches' own ways to bring blocks from a neighbour's memory, for bench_copy.py.

Each starts its servers on the loopback interface, and a client in a process of its own, which is
this program: if that does not answer in time, the row has failed, and nothing else.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

CLIENT_SECONDS = 90.0
START_SECONDS = 20.0
POOL_FACTOR = 4
"""Room in servers and pools, as a multiple of what is copied."""


class Failed(Exception):
    """It did not start, or did not copy; says why."""


def _last_line(text: str) -> str:
    return next((line for line in reversed(text.splitlines()) if line.strip()), "it said nothing")


def run_client(name: str, folder: Path, numbers: list[int]) -> list[float]:
    """Seconds of each round, as the client says."""
    path = os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))
    argv = [sys.executable, __file__, name, *map(str, numbers)]
    environment = {**os.environ, "PYTHONPATH": path}
    try:
        ended = subprocess.run(
            argv,
            env=environment,
            capture_output=True,
            text=True,
            timeout=CLIENT_SECONDS,
            check=True,
        )
        said: list[float] = json.loads(_last_line(ended.stdout))
    except subprocess.TimeoutExpired:
        raise Failed(f"the client did not answer within {CLIENT_SECONDS:g} s") from None
    except subprocess.CalledProcessError as exc:
        raise Failed(f"the client ended with {exc.returncode}: {_last_line(exc.stderr)}") from None
    except ValueError as exc:
        raise Failed(f"the client's answer cannot be read: {exc}") from None
    return said


# -- Mooncake: an application's client without memory of its own, which shares a pool with the
#    node's real client; that one copies


def mooncake(folder: Path, size: int, count: int, rounds: int) -> list[float]:
    from local_node import free_port  # of examples, which bench_copy.py finds once it runs

    master, metrics, serves = free_port(), free_port(), free_port()
    nbytes = POOL_FACTOR * size * count
    with _program(
        folder, "mooncake_master", rpc_address="127.0.0.1", rpc_port=master, metrics_port=metrics
    ), _program(
        folder, "mooncake_client", host="127.0.0.1", port=serves, protocol="tcp",
        master_server_address=f"127.0.0.1:{master}", metadata_server="P2PHANDSHAKE",
        global_segment_size=nbytes,
    ):  # fmt: skip
        return run_client("mooncake", folder, [serves, size, count, rounds])


@contextmanager
def _program(folder: Path, name: str, **options: object) -> Iterator[None]:
    """One of Mooncake's programs, once its port is served."""
    told = [f"--{option}={value}" for option, value in options.items()]
    port = int(str(options.get("rpc_port", options.get("port"))))
    with tempfile.TemporaryFile("w+") as said:
        argv = [str(folder / "mooncake" / name), *told, "--logtostderr"]
        try:
            process = subprocess.Popen(argv, stdout=said, stderr=said)
        except OSError as exc:
            raise Failed(f"{name} cannot be started: {exc.strerror}") from None
        try:
            end = time.monotonic() + START_SECONDS
            while not _listens(port):
                if process.poll() is not None or time.monotonic() > end:
                    said.seek(0)
                    raise Failed(f"{name} does not serve: {_last_line(said.read())}")
                time.sleep(0.05)
            yield
        finally:
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(10)
            process.kill()
            process.wait()


def _listens(port: int) -> bool:
    lines = [
        line.split()
        for name in ("tcp", "tcp6")
        for line in Path("/proc/net", name).read_text().splitlines()[1:]
    ]
    return any(line[1].endswith(f":{port:04X}") and line[3] == "0A" for line in lines)


def mooncake_client(serves: int, size: int, count: int, rounds: int) -> list[float]:
    from mooncake.store import MooncakeDistributedStore

    store = MooncakeDistributedStore()
    nbytes = size * count
    _expect(store.setup_dummy(POOL_FACTOR * nbytes, 16 << 20, f"127.0.0.1:{serves}"), "setup_dummy")
    pool = store.alloc_from_mem_pool(2 * nbytes)
    if not pool:
        raise SystemExit("alloc_from_mem_pool gave nothing")
    _expect(store.register_buffer(pool, 2 * nbytes), "register_buffer")
    keys = [f"block-{number}" for number in range(count)]
    places = [pool + number * size for number in range(count)]
    into = [place + nbytes for place in places]
    for result in store.batch_put_from(keys, places, [size] * count):
        _expect(result, "batch_put_from")
    took = []
    for _ in range(rounds):
        begin = time.perf_counter()
        read = store.batch_get_into(keys, into, [size] * count)
        took.append(time.perf_counter() - begin)
        if any(nbytes_read != size for nbytes_read in read):
            raise SystemExit(f"batch_get_into read {min(read)} bytes, wanted {size}")
    return took


def _expect(result: Any, what: str) -> None:
    if result:
        raise SystemExit(f"{what}: {result}")


# -- LMCache: its MP server copies for an engine's worker, which registers its KV cache with it


def lmcache(folder: Path, size: int, count: int, rounds: int) -> list[float]:
    """Only whether its server starts: nothing but an engine's connector has it copy."""
    from lmcache_store import lmcache_store  # it needs examples, too

    try:
        with lmcache_store(folder, max(1, POOL_FACTOR * size * count >> 30)):
            pass
    except (OSError, SystemExit) as exc:
        raise Failed(f"its server does not start: {_last_line(str(exc))}") from None
    raise Failed(
        "its server starts, but copies only for an engine's connector, which is not driven here; "
        "bench_load.py --lmcache has both"
    )


PEERS: dict[str, Callable[[Path, int, int, int], list[float]]] = {
    "mooncake": mooncake,
    "lmcache": lmcache,
}
"""Each, for a folder with its package, the bytes and number of blocks, and rounds: seconds of each
round.  They raise Failed."""
CLIENTS: dict[str, Callable[..., list[float]]] = {"mooncake": mooncake_client}


def main() -> None:
    name, *numbers = sys.argv[1:]
    print(json.dumps(CLIENTS[name](*map(int, numbers))), flush=True)
    os._exit(0)  # its threads need not end


if __name__ == "__main__":
    main()
