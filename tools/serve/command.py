"""``kvshm serve``: its command line."""

from __future__ import annotations

import argparse
import socket
from contextlib import closing
from pathlib import Path

from kvshm.errors import ConfigError

from ..listening import DEFAULT_ADDRESS, Place, parse_place
from ..options import add_place, find_place

HELP = "show the node live in a browser"
DEFAULT_PORT = 9403


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Serve a page that shows the node live: who copies from whom, where prompt tokens come "
        "from, what is wrong and what to do about it. It needs nothing from the network, and no "
        "prompt is ever shown: kvshm knows hashes only. Beside the page: /status (the JSON of "
        "kvshm status), /metrics, /healthz, /readyz. docs/console.md shows it."
    )
    parser.epilog = (
        "exit status: 0 ended by SIGTERM or SIGINT; 1 it cannot listen there; 2 wrong command line "
        "or setting, or starlette, uvicorn or prometheus_client is missing"
    )
    parser.add_argument(
        "--listen",
        metavar="PATH|[ADDR:]PORT",
        type=parse_place,
        default=Place(socket.AF_INET, (DEFAULT_ADDRESS, DEFAULT_PORT)),
        help="a Unix socket, which only this user can use (it has a / in its name), or an address: "
        "one of the loopback interface, which every user of this machine can use, or any other, "
        f"which needs --token-file (default: {DEFAULT_ADDRESS}:{DEFAULT_PORT})",
    )
    parser.add_argument(
        "--token-file",
        metavar="FILE",
        type=Path,
        help="answer only who gives the word in this file, which only its owner can read, as the "
        "password or as a bearer token. It is sent as it is: put a proxy with TLS in between",
    )
    parser.add_argument(
        "--host",
        metavar="NAME",
        action="append",
        default=[],
        help="answer to this name, too, as that of a proxy (may be repeated); localhost, the name "
        "of this machine and addresses are always answered to",
    )
    add_place(parser, "only this namespace (default: $KVSHM_NAMESPACE, else all; '': all)")


def run(asked: argparse.Namespace) -> int:
    from .app import Console  # needs starlette and prometheus_client
    from .guard import Guard, read_name, read_token
    from .node import Node
    from .server import serve

    if not (asked.listen.is_of_this_machine or asked.token_file):
        raise ConfigError(
            f"--listen={asked.listen.address[0]} can be reached from other machines: give "
            "--token-file, too, or a path, or a loopback address"
        )
    token = read_token(asked.token_file) if asked.token_file else ""
    guard = Guard(frozenset({socket.gethostname().lower(), *map(read_name, asked.host)}), token)
    run_dir, namespace = find_place(asked)
    with closing(Node(run_dir, namespace)) as node:
        serve(Console(node), guard, asked.listen)
    return 0
