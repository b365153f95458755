"""deploy/Dockerfile builds, and what it makes serves with as little as it may: `make image-check`.

Without a daemon, and over stand-ins for its bases (tests/images.py)."""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
import tomllib
from collections.abc import Iterator
from operator import methodcaller
from pathlib import Path

import pytest

from kvshm.version import __version__
from tests.images import CACHE, ROOT, Store, container
from tests.multiprocess.processes import Managed, Processes
from tests.multiprocess.toys import TOY, finish

IMAGE = "localhost/vllm-kvshm"
RUN_DIR, TOY_INSIDE = "/run/kvshm", "/mnt/toy_engine.py"
GLIBC = 35
"""Minor version of the oldest glibc in an image of vLLM (Ubuntu 22.04)."""


class Image:
    def __init__(self, store: Store) -> None:
        store.make_stand_ins()
        store.build(IMAGE)
        self.config, self.root = store.config(IMAGE), store.unpack(IMAGE)
        # What a container engine makes for a volume.
        (self.root / RUN_DIR[1:]).mkdir()
        (self.root / TOY_INSIDE[1:]).touch()

    def container(self, run_dir: Path) -> list[str]:
        binds = {RUN_DIR: run_dir, TOY_INSIDE: Path(TOY)}
        return [*container(self.root, self.config, binds), f"KVSHM_RUN_DIR={RUN_DIR}"]


class Node:
    """Containers that have a run directory in common."""

    def __init__(self, image: Image, run_dir: Path, processes: Processes) -> None:
        self.within, self.processes = image.container(run_dir), processes
        os.chown(run_dir, 1000, 1000)

    def start(self, name: str, *command: str) -> Managed:
        return self.processes.start(name, *self.within, *command)

    def run(self, *command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([*self.within, *command], capture_output=True, text=True)


@pytest.fixture(scope="module")
def image() -> Iterator[Image]:
    CACHE.mkdir(parents=True, exist_ok=True)
    store = Store(Path(tempfile.mkdtemp(prefix="store-", dir=CACHE)))
    try:
        yield Image(store)
    finally:
        store.remove()


@pytest.fixture
def node(image: Image) -> Iterator[Node]:
    processes = Processes()
    with tempfile.TemporaryDirectory(prefix="kv-") as run_dir:
        try:
            yield Node(image, Path(run_dir), processes)
        finally:
            processes.reap()


def test_it_says_what_it_is(image: Image) -> None:
    assert image.config["User"] == "1000:1000"
    assert not image.config.keys() & {"Entrypoint", "Cmd", "Healthcheck", "ExposedPorts", "Volumes"}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    labels = {f"org.opencontainers.image.{name}": value for name, value in LABELS.items()}
    assert labels.items() <= image.config["Labels"].items()
    assert LABELS["licenses"] == project["license"]


LABELS = {"title": "kvshm", "licenses": "Apache-2.0", "version": __version__}


def test_nothing_of_the_build_is_left(image: Image) -> None:
    folders = ("src", "dist", "root", "tmp", "usr/bin", "usr/local/bin", "home")
    paths = (path for folder in folders for path in (image.root / folder).rglob("*"))
    found = [str(path.relative_to(image.root)) for path in paths]
    assert "usr/local/bin/kvshm" in found
    left = [path for path in found if re.search(r"\.whl$|/gcc|\.cache|pyproject\.toml|\.c$", path)]
    assert left == []
    settings = image.root / "etc" / "pip.conf"
    assert not settings.exists() or settings.read_text() == "", "this machine's are not in it"


def test_its_native_module_loads_with_an_older_glibc(image: Image) -> None:
    (module,) = image.root.glob("usr/**/kvshm/_native.abi3.so")
    needed = [int(minor) for minor in re.findall(rb"GLIBC_2\.(\d+)", module.read_bytes())]
    assert needed
    assert max(needed) <= GLIBC


AT_COLON = methodcaller("partition", ":")


def test_it_is_run_with_as_little_as_is_claimed(node: Node) -> None:
    """Else the tests below would show less than they say."""
    for folder in ("/", "/usr/local/bin", "/etc", "/run", "/home", "/var/tmp"):
        done = node.run("touch", f"{folder}/x")
        assert "Read-only file system" in done.stderr
    for folder in ("/tmp", "/home/kvshm", "/dev/shm", RUN_DIR):
        assert node.run("touch", f"{folder}/x").returncode == 0
    status = node.run("cat", "/proc/self/status").stdout
    found = {name: value.strip() for name, _, value in map(AT_COLON, status.splitlines())}
    assert found["Uid"].split() == found["Gid"].split() == ["1000"] * 4
    assert found["Groups"] == ""
    assert {found["CapPrm"], found["CapBnd"]} == {"0" * 16}
    assert found["NoNewPrivs"] == "1"
    script = "import socket; socket.create_connection(('192.0.2.1', 9), 5)"
    assert "Network is unreachable" in node.run("python3", "-c", script).stderr


def test_a_coordinator_serves_and_its_probe_passes(node: Node) -> None:
    probe = ("kvshm", "status", "--probe", "coordinator")
    assert node.run(*probe).returncode == 1
    coordinator = node.start("coordinator", "kvshm-coordinator")
    coordinator.wait_err("event=serving")
    assert node.run(*probe).returncode == 0
    assert "coordinator healthy" in node.run("kvshm", "status").stdout


def test_engines_share_across_its_containers(node: Node) -> None:
    node.start("coordinator", "kvshm-coordinator").wait_err("event=serving")
    environ = ("KVSHM_ENABLE=1", "KVSHM_VERIFY=1")
    engines = [
        node.start(f"toy-{seed}", *environ, "python3", TOY_INSIDE, "--seed", str(seed))
        for seed in (1, 2)
    ]
    for outcome in finish(engines):
        assert outcome["imported"] > 0
        assert (outcome["wrong"], outcome["violations"]) == (0, [])


def test_vllms_plugin_is_found_in_it(node: Node) -> None:
    """By the entry point through which vLLM loads it."""
    script = "import importlib.metadata as m; print(m.entry_points(group='vllm.general_plugins'))"
    assert "kvshm.hooks.vllm.plugin:activate" in node.run("python3", "-c", script).stdout
