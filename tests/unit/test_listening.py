"""Which addresses to listen at no other machine can reach."""

from __future__ import annotations

import socket

import pytest

from kvshm.tools.listening import parse_place


@pytest.mark.parametrize(
    ("address", "ours"),
    [
        ("127.0.0.1", True),
        ("127.9.9.9", True),
        ("[::1]", True),
        ("[::ffff:127.0.0.1]", True),  # IPv4 as IPv6 writes it
        ("[::ffff:7f00:2]", True),
        ("0.0.0.0", False),
        ("[::]", False),
        ("10.1.2.3", False),
        ("[::ffff:10.1.2.3]", False),
        ("[::ffff:0.0.0.0]", False),
        ("[fe80::1]", False),
    ],
)
def test_a_loopback_address_is_of_this_machine_however_it_is_written(
    address: str, ours: bool
) -> None:
    place = parse_place(f"{address}:9403")
    assert place.family == (socket.AF_INET6 if "[" in address else socket.AF_INET)
    assert place.is_of_this_machine == ours


def test_a_path_is_of_this_machine() -> None:
    assert parse_place("./console").is_of_this_machine
