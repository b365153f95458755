"""What was searched before is not searched again.

A search that ended as it should leaves a stamp: its outcome, and the hash of all that decides it.
The stamp stands for the search for as long as that hash is the same: the files of the model, the
program that runs and judges the search, the arguments, and the versions of spin and the compiler.
Remove the folder (``make clean`` does) and everything is searched.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
from collections.abc import Callable
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import NamedTuple

from . import search as searching
from .cases import Case
from .search import Outcome, commands, search

FOLDER = Path(__file__).parents[2] / ".cache" / "model"


class Searched(NamedTuple):
    """An outcome, the hash of what decides it, and whether an earlier session has found it."""

    outcome: Outcome
    content: str
    earlier: bool


def searched(
    case: Case, folder: Path = FOLDER, search: Callable[[Case], Outcome] = search
) -> Searched:
    """Return the outcome of a search: the stamped one, or one that is found now.  Blocks for as
    long as a search does; raises SearchFailed."""
    content = content_of(case)
    stamp = folder / f"{re.sub(r'[^a-z0-9_]+', '-', case.name.lower())}.json"
    if stamp.exists():
        stamped = json.loads(stamp.read_text())
        if stamped["content"] == content:
            return Searched(Outcome(**stamped["outcome"]), content, earlier=True)
    outcome = search(case)
    if outcome.violated == case.violates:
        folder.mkdir(parents=True, exist_ok=True)
        written = stamp.with_suffix(f".{os.getpid()}")
        written.write_text(json.dumps({"content": content, "outcome": asdict(outcome)}))
        written.replace(stamp)
    return Searched(outcome, content, earlier=False)


def content_of(case: Case) -> str:
    """The hash of all that decides how a search ends."""
    digest = hashlib.sha256()
    for path in (*files_of(searching.MODELS / f"{case.model}.pml"), Path(searching.__file__)):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    wherever = str(commands(case)).replace(searching.MODELS.as_posix(), "")
    digest.update(f"{case.violates} {wherever}".encode())
    digest.update(version("spin", "-V") + version("cc", "--version"))
    return digest.hexdigest()


def files_of(model: Path) -> list[Path]:
    names = re.findall(r'^\s*#\s*include\s+"(.+?)"', model.read_text(), re.MULTILINE)
    return [model, *(path for name in names for path in files_of(model.with_name(name)))]


@cache
def version(*command: str) -> bytes:
    return subprocess.run(command, capture_output=True, check=False).stdout
