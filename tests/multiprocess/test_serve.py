"""``kvshm serve`` over real engines and sockets: what it answers, to whom, and that nobody holds it
up or brings it down."""

from __future__ import annotations

import json
import os
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import islice
from pathlib import Path

import pytest

from kvshm.tools.bounded_server import MAX_CLIENTS
from kvshm.tools.indexer.query import MAX_BODY
from kvshm.tools.serve.app import ASSETS
from kvshm.tools.serve.guard import HEADERS

from . import toys as toy_engines
from .consoles import SERVE, Console
from .joined import TOKENS, Toys, served
from .processes import PATIENCE_SECONDS, Managed, Node, fresh_node, wait_until

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(120)]


@pytest.fixture
def place() -> Iterator[Node]:
    with served() as node:
        yield node


def cli(node: Node, *words: str) -> str:
    where = ("--run-dir", str(node.run_dir), "--namespace", node.namespace)
    command = [sys.executable, "-P", "-m", "kvshm.tools.cli", *words, *where]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout


def test_pages_are_sent_what_status_and_top_print(place: Node, toys: Toys) -> None:
    a, b = toys.pair()
    keys = a.prompt()
    a.compute(keys, range(6))
    console = Console(place)
    sent = console.events()
    (first, status), (second, top) = islice(sent, 2)
    assert (first, second) == ("status", "top")
    printed = json.loads(cli(place, "status", "--json"))
    assert status == printed == console.ask("/status").json
    assert {engine["engine"]: engine["published_blocks"] for engine in top["engines"]} == {
        "a": 6,
        "b": 0,
    }
    assert top.keys() == json.loads(cli(place, "top", "--once", "--json")).keys()
    b.compute(keys[:2], range(2))
    for name, said in sent:
        if name == "top" and [e["published_blocks"] for e in top_engines(said)] == [6, 2]:
            break
    sent.close()


def top_engines(said):
    return sorted(said["engines"], key=lambda engine: engine["engine"])


def test_a_prefix_is_found_with_who_holds_it(place: Node, toys: Toys) -> None:
    a, _ = toys.pair()
    keys = a.prompt()
    a.compute(keys, range(6))
    console = Console(place)
    asked = {"model": "m", "block_size": TOKENS, "seq_hashes": [key.hex() for key in keys]}
    answer = console.ask("/prefix", json.dumps(asked).encode())
    assert answer.status == 200
    held = {name: on["longest_matched"] for name, on in answer.json["default"].items()}
    assert held == {"a": 6 * TOKENS, "b": 0}


@pytest.mark.parametrize(
    ("body", "status", "why"),
    [
        (b"", 400, "Input data was truncated"),
        (b'{"model": "m", "block_size": 1, "seq_hashes": ["zz"]}', 400, "is no hash"),
        (b"[" * 100_000, 400, ""),
        (b" " * (MAX_BODY + 1), 413, "send at most"),
    ],
    ids=["empty", "no hash", "deep", "long"],
)
def test_what_makes_no_sense_is_said_to_make_none(
    place: Node, body: bytes, status: int, why: str
) -> None:
    console = Console(place)
    answer = console.ask("/prefix", body)
    assert answer.status == status
    assert why in answer.body.decode()
    assert console.ask("/healthz").status == 200
    assert not console.process.err.matching(lambda line: "failed" in line or "Traceback" in line)


def test_one_body_is_read_at_a_time_and_a_look_at_the_head_opens_no_page(place: Node) -> None:
    console = Console(place)
    with socket.create_connection(("127.0.0.1", console.port)) as slow:
        slow.sendall(b"POST /prefix HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n{")
        wait_until(lambda: console.ask("/prefix", b"{").status == 503, "the slow one is read")
        assert console.ask("/status").status == 200
    wait_until(lambda: console.ask("/prefix", b"{").status == 400, "the slow one has gone")
    with socket.create_connection(("127.0.0.1", console.port), PATIENCE_SECONDS) as head:
        head.sendall(b"HEAD /events HTTP/1.1\r\nHost: localhost\r\n\r\n")
        answer = b"".join(iter(lambda: head.recv(4096), b""))  # to its end
    assert answer.startswith(b"HTTP/1.1 200 ")


def test_everything_a_page_needs_comes_from_here_and_every_answer_is_guarded(place: Node) -> None:
    console = Console(place)
    paths = [*ASSETS, "/status", "/doctor", "/metrics", "/healthz", "/readyz", "/no-such"]
    for path in paths:
        answer = console.ask(path)
        assert answer.status == (404 if path == "/no-such" else 200), path
        wanted = {name.lower(): value for name, value in HEADERS.items()}
        assert wanted.items() <= answer.headers.items(), path
        assert not {"access-control-allow-origin", "server"} & answer.headers.keys()
    assert b"kvshm_build_info" in console.ask("/metrics").body
    assert {check["check"] for check in console.ask("/doctor").json["checks"]} >= {"run directory"}
    for text in (console.ask(path).body.decode() for path in ASSETS):
        assert "http://" not in text.replace("http://www.w3.org/2000/svg", "")
        assert "https://" not in text


def test_other_names_and_other_methods_get_nothing(place: Node) -> None:
    console = Console(place, "--host", "Proxy.example")
    assert console.ask("/status", Host="proxy.example:443").status == 200
    for path in ("/", "/status", "/events", "/metrics", "/healthz"):
        refused = console.ask(path, Host="rebound.example")
        assert refused.status == 421
        assert b"rebound.example" in refused.body
    assert console.ask("/status", Sec_Fetch_Site="cross-site").status == 403
    assert console.ask("/status", method="DELETE").status == 405
    assert console.ask("/prefix").status == 405


def test_with_a_token_only_probes_go_without(place: Node, tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("a-token-of-the-test\n")
    token.chmod(0o600)
    console = Console(place, "--listen", "0.0.0.0:0", "--token-file", str(token))
    refused = console.ask("/status")
    assert refused.status == 401
    assert refused.headers["www-authenticate"].startswith("Basic ")
    assert console.ask("/status", Authorization="Bearer a-token-of-the-test").status == 200
    assert next(console.events(Authorization="Bearer a-token-of-the-test"))[0] == "status"
    assert console.ask("/healthz").status == 200


def test_an_address_of_the_network_needs_a_token(place: Node) -> None:
    started = place.processes.python(
        "serve", *SERVE, "--listen", "0.0.0.0:0", "--run-dir", str(place.run_dir)
    )
    assert started.wait() == 2
    started.wait_err("--listen=0.0.0.0 can be reached from other machines: give --token-file")


def test_a_unix_socket_is_for_its_user_and_goes_with_the_console(place: Node) -> None:
    path = place.run_dir / "console"
    console = Console(place, "--listen", str(path))
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert console.ask("/status").status == 200
    console.process.kill()
    again = Console(place, "--listen", str(path))  # in the place of what the killed one has left
    wait_until(lambda: again.ask("/readyz").status == 200, "it has looked")
    taken = place.processes.python("serve", *SERVE, "--listen", str(path))
    assert taken.wait() == 1
    taken.wait_err("cannot listen on")
    path.unlink()
    other = Console(place, "--listen", str(path))
    assert again.process.terminate() == 0
    assert other.ask("/healthz").status == 200  # its socket was left to it
    assert other.process.terminate() == 0
    assert not path.exists()


def test_clients_that_go_away_early_leave_no_word_in_the_log(place: Node) -> None:
    console = Console(place)
    for sent in (
        b"POST /prefix HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{",
        b"POST /prefix HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"GET / HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n",
        b"\x16\x03\x01\r\n\r\n",
    ):
        for _ in range(3):
            with socket.create_connection(("127.0.0.1", console.port)) as client:
                client.sendall(sent)
    wait_until(lambda: answers(console), "it serves on")
    assert console.ask("/prefix", b"{").status == 400
    assert not console.process.err.matching(lambda line: "serving" not in line)


def test_a_run_directory_that_cannot_be_read_is_said_in_a_line(place: Node) -> None:
    console = Console(place)
    wait_until(lambda: console.ask("/readyz").status == 200, "it has looked")
    aside = place.run_dir.rename(f"{place.run_dir}-aside")
    place.run_dir.touch()
    page = console.events()
    assert next(page)[0] == "failed"
    for path in ("/status", "/metrics", "/readyz"):
        answer = console.ask(path)
        assert answer.status == 503
        assert b"the engines cannot be read: " in answer.body
    place.run_dir.unlink()
    aside.rename(place.run_dir)
    assert next(each for each, _ in page if each != "failed") == "status"
    assert console.ask("/readyz").status == 200
    assert len(console.process.err.matching(lambda line: "serving" not in line)) == 1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_it_ends_at_once_while_pages_are_open(place: Node, number: signal.Signals) -> None:
    console = Console(place)
    pages = [console.events() for _ in range(3)]
    for page in pages:
        next(page)
    console.process.signal(number)
    assert console.process.wait() == 0
    for page in pages:
        list(page)
    assert not console.process.err.matching(lambda line: "serving" not in line)


def test_slow_clients_and_too_many_of_them_hold_nobody_up(place: Node) -> None:
    console = Console(place)
    with ExitStack() as open_ones:
        for _ in range(MAX_CLIENTS + 20):
            silent = open_ones.enter_context(socket.create_connection(("127.0.0.1", console.port)))
            silent.send(b"GET / HT")
        reader = open_ones.enter_context(socket.create_connection(("127.0.0.1", console.port)))
        wait_until(lambda: answers(console), "silent clients are given up")
        reader.sendall(b"GET /events HTTP/1.1\r\nHost: localhost\r\n\r\n")  # and never reads
        assert next(console.events())[0] == "status"
    with ExitStack() as open_ones:
        for _ in range(MAX_CLIENTS):
            page = open_ones.enter_context(socket.create_connection(("127.0.0.1", console.port)))
            page.sendall(b"GET /events HTTP/1.1\r\nHost: localhost\r\n\r\n")
        wait_until(lambda: answers(console), "pages leave room for what ends soon")
        last = [name for name, _ in console.events()]
        assert last == ["failed"]  # and the stream ends: there are enough pages
    assert len(os.listdir(f"/proc/{console.process.pid}/fd")) < MAX_CLIENTS


def answers(console: Console) -> bool:
    try:
        return console.ask("/healthz").status == 200
    except OSError:
        return False


def test_it_looks_at_the_node_again_and_again_only_while_a_page_is_open(place: Node) -> None:
    """Counted by what it reads of the system: each look reads the run directory's tables."""
    console = Console(place)
    page = console.events()
    for _ in range(4):
        before = reads(console.process)
        next(page), next(page)
    assert reads(console.process) > before
    page.close()
    wait_until(lambda: not looks(console.process, 2.0), "nothing is read without a page")
    assert not looks(console.process, 5.0)


def reads(process: Managed) -> int:
    counts = Path(f"/proc/{process.pid}/io").read_text()
    return int(counts.partition("syscr: ")[2].split()[0])


def looks(process: Managed, seconds: float) -> bool:
    """Whether it reads anything within this time, which has to pass for that."""
    before = reads(process)
    time.sleep(seconds)
    return reads(process) > before


def test_engines_that_die_or_hang_are_seen_and_end_no_page(place: Node, toys: Toys) -> None:
    engine, hung = (toy_engines.start(place, seed) for seed in (1, 2))
    for each in (engine, hung):
        toy_engines.result(each)
    console = Console(place)
    page = console.events()
    next(page)
    engine.kill()
    hung.signal(signal.SIGSTOP)
    codes: set[str] = set()
    for name, said in page:
        if name == "status":
            spaces = said["namespaces"]
            codes |= {c for s in spaces for e in s["engines"] for c in e["codes"]}
            if "ended" in codes:
                break
    page.close()
    hung.signal(signal.SIGCONT)


def test_a_node_without_anything_is_shown_and_waited_for() -> None:
    with fresh_node() as node:
        console = Console(node)
        page = console.events()
        assert next(page) == ("status", {"state": "down", "namespaces": []})
        node.coordinator()
        for name, said in page:
            if name == "status" and said["namespaces"]:
                break
        page.close()
