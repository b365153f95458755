"""Where gpu_vllm_runs.py, and the engines that it starts, find all that they need: in the tree, in
its examples, and in what was put together for this machine.  PYTHONPATH comes behind."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
NO_VLLM = (
    "vLLM is neither in this Python nor in dist/gpu-vllm-site, where "
    "benchmarks/gpu_vllm_assemble.py puts it together"
)


def folders(root: Path, *, has_vllm: bool) -> list[str]:
    """Return the folders of a tree to import from; the parts of vLLM only if this Python has no
    vLLM of its own."""
    sites = ["gpu-site"] if has_vllm else ["gpu-vllm-site", "gpu-site"]
    there = [site for name in sites if (site := root / "dist" / name).is_dir()]
    return list(map(str, [root, root / "examples", *there]))


def find_all() -> None:
    """Let this process, and those that it starts, import what a run needs.  Ends it with 2 if vLLM
    is nowhere."""
    put_first(folders(ROOT, has_vllm=find_spec("vllm") is not None))
    if find_spec("vllm") is None:
        print(NO_VLLM, file=sys.stderr)
        sys.exit(2)


def put_first(found: Sequence[str]) -> None:
    """Let this process, and those that it starts, import from these folders first."""
    before = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys([*found, *before]))
    sys.path[:] = dict.fromkeys([*found, *sys.path])
