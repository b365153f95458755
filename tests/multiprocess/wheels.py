"""Several versions of kvshm as wheels, each installed in an environment of its own.

The first is this tree.  The others are made from copies of it: a next release, which has nothing
but another version; and a newer one whose protocol and layout are raised too, and where a field of
what engines say when they join has another name, as a changed protocol may well have it.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from kvshm._node.protocol import PROTOCOL_VERSION
from kvshm._shm.layout import LAYOUT_VERSION, digest, numbers
from kvshm.version import __version__

ROOT = Path(__file__).parents[2]
NEWER_VERSION = "99.0.0"
_NOT_SOURCE = shutil.ignore_patterns(".*", "build", "dist", "*.egg-info", "*.so", "__pycache__")
NEXT_VERSION = "98.0.0"
_VERSION = f'__version__ = "{__version__}"'
_NEXT = (("kvshm/version.py", _VERSION, f'__version__ = "{NEXT_VERSION}"'),)
_NEWER = (
    ("kvshm/version.py", _VERSION, f'__version__ = "{NEWER_VERSION}"'),
    (
        "kvshm/_node/protocol.py",
        f"PROTOCOL_VERSION = {PROTOCOL_VERSION}\n",
        f"PROTOCOL_VERSION = {PROTOCOL_VERSION + 1}\n",
    ),
    (
        "kvshm/_node/protocol.py",
        "class EngineInfo(msgspec.Struct, frozen=True, kw_only=True):",
        "class EngineInfo(\n"
        '    msgspec.Struct, frozen=True, kw_only=True, rename={"num_blocks": "block_count"}\n'
        "):",
    ),
    (
        "kvshm/_shm/layout.py",
        f"\nLAYOUT_VERSION = {LAYOUT_VERSION}\n",
        f"\nLAYOUT_VERSION = {LAYOUT_VERSION + 1}\n",
    ),
    (
        "kvshm/native/layout.h",
        f"KVSHM_LAYOUT_VERSION = {LAYOUT_VERSION},",
        f"KVSHM_LAYOUT_VERSION = {LAYOUT_VERSION + 1},",
    ),
    (
        "kvshm/native/layout.h",
        f"{digest(numbers()):#010x}u",
        f"{digest({**numbers(), 'LAYOUT_VERSION': LAYOUT_VERSION + 1}):#010x}u",
    ),
)


class Installed(NamedTuple):
    python: tuple[str, ...]
    version: str
    protocol: int
    layout: int


def _run(*command: str | Path, cwd: Path) -> None:
    environ = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "KVSHM"))}
    done = subprocess.run(command, cwd=cwd, env=environ, capture_output=True, text=True)
    assert done.returncode == 0, f"{command} ended with {done.returncode}:\n{done.stderr}"


def _install(room: Path, patch: Sequence[tuple[str, str, str]]) -> tuple[str, ...]:
    """Build a wheel of a patched copy of this tree, install it, return its Python."""
    tree, wheels, venv = room / "tree", room / "wheels", room / "venv"
    shutil.copytree(ROOT, tree, symlinks=True, ignore=_NOT_SOURCE)
    for name, old, new in patch:
        text = (tree / name).read_text("utf-8")
        assert text.count(old) == 1, f"{name} has {text.count(old)} of {old!r}"
        (tree / name).write_text(text.replace(old, new), "utf-8")
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check")
    _run(*pip, "wheel", "--no-deps", "--no-build-isolation", "-w", wheels, ".", cwd=tree)
    _run(sys.executable, "-m", "venv", "--without-pip", venv, cwd=room)
    python = venv / "bin/python"
    _run(*pip, "--python", python, "install", next(wheels.glob("*.whl")), cwd=room)
    return (str(python), "-I")


class Versions(NamedTuple):
    present: Installed
    next: Installed
    newer: Installed


def install_all(room: Path) -> Versions:
    rooms = room / "present", room / "next", room / "newer"
    for each in rooms:
        each.mkdir()
    with ThreadPoolExecutor() as pool:
        present, following, newer = pool.map(_install, rooms, ((), _NEXT, _NEWER))
    return Versions(
        Installed(present, __version__, PROTOCOL_VERSION, LAYOUT_VERSION),
        Installed(following, NEXT_VERSION, PROTOCOL_VERSION, LAYOUT_VERSION),
        Installed(newer, NEWER_VERSION, PROTOCOL_VERSION + 1, LAYOUT_VERSION + 1),
    )


def said_by(installed: Installed, *arguments: str) -> tuple[int, str]:
    done = subprocess.run(
        [*installed.python, "-m", *arguments], capture_output=True, text=True, cwd="/"
    )
    return done.returncode, re.sub(r"\s+", " ", done.stdout + done.stderr)
