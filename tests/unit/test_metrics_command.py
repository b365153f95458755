"""The command line of ``kvshm metrics``."""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from kvshm.tools.listening import parse_address

from .served import ServedNode

WITHOUT = """
import sys
sys.modules["prometheus_client"] = None
from kvshm.tools import cli
sys.exit(cli.main(sys.argv[1:]))
"""
"""The command as if prometheus_client were not installed."""


def metrics(*arguments: str, program: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    environ = {k: v for k, v in os.environ.items() if not k.startswith("KVSHM_")}
    command = [sys.executable, *(program or ("-m", "kvshm.tools.cli")), "metrics", *arguments]
    return subprocess.run(command, env=environ, capture_output=True, text=True)


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("9402", ("127.0.0.1", 9402)),
        ("0.0.0.0:0", ("0.0.0.0", 0)),
        ("localhost:65535", ("localhost", 65535)),
        ("[::1]:9402", ("::1", 9402)),
    ],
)
def test_addresses(text: str, address: tuple[str, int]) -> None:
    assert parse_address(text) == address


def test_what_is_no_address_is_refused(subtests: pytest.Subtests) -> None:
    for text in ["", ":1", "x", "1:", "1.2.3.4", "::1", "::1:9402", "65536", "-1", "²", "[]:1"]:
        with (
            subtests.test(text=text),
            pytest.raises(argparse.ArgumentTypeError, match="is not a port"),
        ):
            parse_address(text)


def test_engines_of_one_namespace_or_of_all(served: ServedNode) -> None:
    served.serve("first", 1, model="a \\ model")
    place = ("--run-dir", str(served.run_dir))
    done = metrics(*place)
    assert (done.returncode, done.stderr) == (0, "")
    labels = f'engine="first",model="a \\\\ model",namespace="{served.namespace}"'
    assert f"\nkvshm_lookups_total{{{labels}}} 0.0\n" in done.stdout
    elsewhere = metrics(*place, "--namespace", "elsewhere", "--json")
    reported = json.loads(elsewhere.stdout)
    assert [name for name, family in reported.items() if family["samples"]] == ["kvshm_build_info"]
    assert (elsewhere.returncode, elsewhere.stderr) == (0, "")


def test_a_file_is_replaced_as_a_whole_or_not_at_all(served: ServedNode, tmp_path: Path) -> None:
    file, place = tmp_path / "kvshm.prom", ("--run-dir", str(served.run_dir))
    file.write_text("old")
    before = file.open()
    assert metrics(*place, "--output", str(file)).returncode == 0
    assert before.read() == "old"
    before.close()
    assert "\nkvshm_build_info{" in file.read_text()
    assert os.listdir(tmp_path) == ["kvshm.prom"]
    nowhere = metrics(*place, "--output", str(tmp_path / "none" / "kvshm.prom"))
    assert nowhere.returncode == 2
    assert nowhere.stderr.endswith(f"there is no directory {tmp_path / 'none'}\n")
    assert len(nowhere.stderr.splitlines()) == 1


def test_a_port_in_use_is_named(served: ServedNode) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = metrics("--run-dir", str(served.run_dir), "--listen", str(port))
    assert (done.returncode, done.stdout) == (1, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith("kvshm metrics: [Errno 98]")
    assert f"('127.0.0.1', {port}): " in line
    assert line.lower().endswith("address already in use")


def test_what_does_not_go_together_is_refused() -> None:
    for other in (("--listen",), ("--output", "x")):
        done = metrics("--json", *other)
        assert (done.returncode, done.stdout) == (2, "")
        assert "--json prints; it does not go with" in done.stderr
    assert metrics("--listen", "--output", "x").returncode == 2


def test_without_prometheus_client_it_says_how_to_get_it_and_json_works(
    served: ServedNode,
) -> None:
    place = ("--run-dir", str(served.run_dir))
    done = metrics(*place, program=("-c", WITHOUT))
    assert (done.returncode, done.stdout) == (2, "")
    wanted = "kvshm metrics needs prometheus_client: pip install 'kvshm[ops]'\n"
    assert done.stderr == wanted
    assert metrics(*place, "--json", program=("-c", WITHOUT)).returncode == 0
