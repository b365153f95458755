"""Start prefill engines, decode engines and the proxy on this machine, and show what it does.

    cd examples && python -m disaggregated_prefill [--serve]

Sends prompts through the proxy and, in turns with them, other prompts straight to a decode engine,
which computes these itself.  Exit status 0 only if the decode engines computed nothing of what
the proxy had computed before.  With ``--serve`` everything stays up until Ctrl-C.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from statistics import median

from completions import Result, stream
from local_node import (
    START_TIMEOUT_S,
    Engine,
    EngineSpec,
    clean_environment,
    free_port,
    wait_until,
)
from sharing_node import BLOCK_SIZE, SharingNode
from tiny_model import write_model

ANSWER_TOKENS = 16


@contextlib.contextmanager
def proxy(prefill: list[Engine], decode: list[Engine], port: int, log: Path) -> Iterator[None]:
    """The proxy in front of these engines, which serves on ``port``."""
    urls = [[f"http://127.0.0.1:{e.port}" for e in engines] for engines in (prefill, decode)]
    program = str(Path(__file__).with_name("proxy.py"))
    with log.open("ab") as out:
        process = subprocess.Popen(
            [
                *(sys.executable, program, "--port", str(port)),
                *("--prefill", *urls[0], "--decode", *urls[1]),
            ],
            env=clean_environment(),
            stdout=out,
            stderr=subprocess.STDOUT,
        )
    try:
        for _ in wait_until("the proxy serves", START_TIMEOUT_S):
            if serves(port):
                break
            if process.poll() is not None:
                raise RuntimeError(f"the proxy has ended: {log.read_text()}")
        yield
    finally:
        process.terminate()
        process.wait()


def serves(port: int) -> bool:
    """Whether the proxy finds a decode engine that is well."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=10) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def complete(port: int, model: Path, prompt: list[int]) -> Result:
    body = {"model": str(model), "prompt": prompt, "max_tokens": ANSWER_TOKENS, "logprobs": 5}
    return stream(port, "/v1/completions", body)


def show(port: int, model: Path, decode: list[Engine], options: argparse.Namespace) -> bool:
    """Send the requests, print how they went; whether all were imported."""
    numbers = random.Random(options.seed)

    def prompt() -> list[int]:
        return [numbers.randrange(10, 600) for _ in range(options.tokens)]

    complete(port, model, prompt())  # the first one of each kind makes ready what is used later
    complete(decode[0].port, model, prompt())
    apart: list[float] = []
    alone: list[float] = []
    imported = 0
    for _ in range(options.requests):
        before = sum(engine.prompt_tokens().imported for engine in decode)
        apart.append(complete(port, model, prompt()).ttft_s)
        imported += sum(engine.prompt_tokens().imported for engine in decode) - before
        alone.append(complete(decode[0].port, model, prompt()).ttft_s)
    wanted: int = options.requests * ((options.tokens - 1) // BLOCK_SIZE * BLOCK_SIZE)
    print(f"{options.requests} prompts of {options.tokens} tokens, {len(decode)} decode engines:")
    print(f"imported by decode engines: {imported} of {wanted} tokens")
    for what, seconds in (("through the proxy", apart), ("decode engine alone", alone)):
        print(f"first token, {what}: {1000 * median(seconds):.0f} ms (median)")
    return imported == wanted


def run(options: argparse.Namespace) -> bool:
    with SharingNode() as node:
        node.start_coordinator()
        model = Path(options.model) if options.model else write_model(node.run_dir / "model")
        cores = iter(range(options.prefill + options.decode))
        specs = [
            EngineSpec(f"{kind}-{number}", model, core=next(cores) % options.cores)
            for kind, count in (("prefill", options.prefill), ("decode", options.decode))
            for number in range(count)
        ]
        engines = node.start_engines(*specs)
        node.wait_joined(*engines)
        prefill, decode = engines[: options.prefill], engines[options.prefill :]
        port = options.port or free_port()
        with proxy(prefill, decode, port, node.run_dir / "proxy.log"):
            good: bool = show(port, model, decode, options)
            if options.serve:
                print(f"serving {model} at http://127.0.0.1:{port}/v1 until Ctrl-C", flush=True)
                with contextlib.suppress(KeyboardInterrupt):
                    signal.pause()
    return good


def main() -> int:
    parser = argparse.ArgumentParser(prog="disaggregated_prefill", description="P/D on one machine")
    parser.add_argument("--prefill", type=int, default=1, help="number of prefill engines")
    parser.add_argument("--decode", type=int, default=1, help="number of decode engines")
    parser.add_argument("--model", default="", help="default: a tiny one with random weights")
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=2000, help="of each prompt")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--cores", type=int, default=2, help="engine i computes on core i mod this")
    parser.add_argument("--port", type=int, default=0, help="of the proxy; 0: any that is free")
    parser.add_argument("--serve", action="store_true", help="stay up afterwards")
    return 0 if run(parser.parse_args()) else 1


if __name__ == "__main__":
    sys.exit(main())
