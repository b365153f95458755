"""``kvshm doctor`` on real nodes: a healthy one, and processes and mounts that are made wrong."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tarfile
from collections.abc import Sequence
from pathlib import Path

import pytest

from kvshm._ground.declined import declined_file  # type: ignore[attr-defined]

from . import toys
from .processes import Managed, Node, wait_until
from .sandbox import fresh_tmpfs, skip_unless_permitted

pytestmark = pytest.mark.multiprocess

SLEEPS = "import sys; print('open', flush=True); sys.stdin.read()"


def doctor(
    node: Node, *options: str, around: Sequence[str] = (), **environ: str
) -> subprocess.CompletedProcess[str]:
    place = ("--run-dir", str(node.run_dir), "--namespace", node.namespace)
    command = [*around, sys.executable, "-m", "kvshm.tools.cli", "doctor", *place, *options]
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ, **environ})


def results(node: Node, around: Sequence[str] = ()) -> dict[str, tuple[str, str]]:
    """Result and text of each check."""
    told = json.loads(doctor(node, "--json", around=around).stdout)
    return {check["check"]: (check["result"], check["found"]) for check in told["checks"]}


def process(node: Node, **environ: str) -> Managed:
    """One that was started as an engine is, with this in its environment, and waits."""
    place = {"KVSHM_RUN_DIR": str(node.run_dir), "KVSHM_NAMESPACE": node.namespace}
    started = node.processes.start(
        "sleeps", sys.executable, "-c", SLEEPS, environ={"KVSHM_ENABLE": "1", **place, **environ}
    )
    started.wait_out(lambda line: line == "open")
    return started
