"""Which transport an engine gets: by its device, or by the setting KVSHM_TRANSPORT."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from kvshm.errors import ConfigError, TransportError
from kvshm.interfaces import AUTO_TRANSPORTS, check_installed, choose_transport, load_transport
from kvshm.transport.loopback import LoopbackTransport
from kvshm.transport.posix_shm import PosixShmTransport
from tests import other_package

BROKEN = (
    "unbuilt = other_package_of_nobody:Transport",
    "renamed = other_package_transport:NoMore",
    "old = other_package_transport:ProcMemory",
)


@pytest.fixture
def other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another package is installed."""
    monkeypatch.syspath_prepend(other_package.install(tmp_path, *BROKEN))


def test_by_default_the_device_decides_whatever_else_is_installed(other: None) -> None:
    assert choose_transport("auto", "cpu") is PosixShmTransport
    with pytest.raises(TransportError, match="no transport for KV caches on tpu"):
        choose_transport("auto", "tpu")


@pytest.mark.parametrize(("device", "name"), AUTO_TRANSPORTS.items())
def test_what_is_chosen_for_a_device_says_that_it_works_there(device: str, name: str) -> None:
    chosen = choose_transport("auto", device)
    assert (chosen.name, device in chosen.devices) == (name, True)
    assert choose_transport(name, device) is chosen


def test_a_transport_of_another_package_is_chosen_by_its_name(other: None) -> None:
    chosen = choose_transport(other_package.NAME, "cpu")
    assert chosen.__module__ == "other_package_transport"
    check_installed(other_package.NAME)


def test_a_name_that_is_not_installed_is_named_with_those_that_are() -> None:
    reported = (
        r"^KVSHM_TRANSPORT='procfs' is not an installed transport \(installed: cuda_ipc, "
        r"loopback, posix_shm\); correct it, .* or unset it for the default \(auto\)$"
    )
    for ask in (check_installed, lambda name: choose_transport(name, "cpu")):
        with pytest.raises(ConfigError, match=reported):
            ask("procfs")
    with pytest.raises(TransportError, match="no transport 'procfs'"):
        load_transport("procfs")


@pytest.mark.parametrize(
    ("name", "device", "reported"),
    [
        ("cuda_ipc", "cpu", "KVSHM_TRANSPORT=cuda_ipc is for KV caches on cuda, not cpu"),
        ("cuda_ipc", "rocm", "KVSHM_TRANSPORT=cuda_ipc is for KV caches on cuda, not rocm"),
        ("posix_shm", "cuda", "KVSHM_TRANSPORT=posix_shm is for KV caches on cpu, not cuda"),
        ("loopback", "cpu", "KVSHM_TRANSPORT=loopback works only within one process"),
        ("old", "cpu", "KVSHM_TRANSPORT=old works only within one process"),
        ("unbuilt", "cpu", "transport 'unbuilt' cannot be loaded: No module named"),
        ("renamed", "cpu", "transport 'renamed' cannot be loaded: .* no attribute 'NoMore'"),
    ],
)
def test_a_transport_that_does_not_work_here_is_named(
    other: None, name: str, device: str, reported: str
) -> None:
    check_installed(name)
    with pytest.raises(TransportError, match=f"^{reported}"):
        choose_transport(name, device)


def test_whether_it_is_installed_is_found_out_without_importing_it(other: None) -> None:
    check_installed("unbuilt")
    code = (
        "import sys; from kvshm.interfaces import check_installed; check_installed('cuda_ipc');"
        "print([name for name in sys.modules if name.startswith('kvshm.transport')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_those_for_tests_are_still_loaded_by_name() -> None:
    assert load_transport("loopback") is LoopbackTransport
