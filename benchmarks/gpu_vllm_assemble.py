"""Put the parts of gpu_vllm_bundle.py together on a GPU machine, over the torch that is there.

    python3 benchmarks/gpu_vllm_assemble.py --folder dist/gpu-vllm --target dist/gpu-vllm-site

Needs no network and no other package than torch and triton, and changes nothing of the Python it
runs on: everything goes into the target folder, which belongs on PYTHONPATH.  Refuses, with the
name of what does not fit: another Python, an older torch, no C compiler, a part that is missing or
damaged.  Then it tries what was put together: vLLM is imported, its kernels are loaded, and where
there is a GPU one engine answers with 8 tokens.  What is complete already is only tried again.
"""

from __future__ import annotations

import argparse
import compileall
import ctypes
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from gpu_vllm_parts import MANIFEST, BundleError, Manifest, faults, sha256_of, unpack

ROOT = Path(__file__).parent.parent
TRIAL = Path(__file__).with_name("gpu_vllm_trial.py")
TRIAL_TIMEOUT_S = 300
MADE_FOR = ("python", "machine", "glibc", "native", "torch", "cuda")
DONE = "complete.json"
"""In the target folder: the manifest of what was put together there."""


def main() -> int:
    options = arguments()
    begun = time.monotonic()
    try:
        if not (options.folder / MANIFEST).exists() and importlib.util.find_spec("vllm"):
            print(f"{options.folder} holds no bundle: this Python's own vLLM is used", flush=True)
        else:
            put_together(options.folder, options.target)
            took = time.monotonic() - begun
            print(f"put together after {took:.0f} s: {options.target}", flush=True)
        if not options.no_trial:
            tried(options.target)
    except (BundleError, OSError) as exc:
        print(f"gpu-vllm-ready: {exc}", file=sys.stderr)
        return 1
    return 0


def put_together(folder: Path, target: Path) -> None:
    """Check that the bundle fits and is whole, and unpack it; BundleError if not."""
    manifest = Manifest.read(folder)
    refuse(list(misfits(manifest.made_for)))
    assemble(folder, manifest, target)
    take_native_module(target)
    # Else the first engines wait half a minute for it; what cannot be compiled is not needed.
    compileall.compile_dir(target, quiet=2, workers=0)


def refuse(reasons: list[str]) -> None:
    """BundleError with all reasons if there are any."""
    if reasons:
        raise BundleError("; ".join(reasons))


def misfits(made_for: Mapping[str, str]) -> Iterator[str]:
    """Yield what of this machine, or of this tree, the bundle was not made for."""
    if unsaid := [name for name in MADE_FOR if not isinstance(made_for.get(name), str)]:
        yield f"{MANIFEST} does not say what the bundle is for: {', '.join(unsaid)}"
        return
    python = ".".join(map(str, sys.version_info[:2]))
    if python != made_for["python"]:
        yield f"the bundle is for Python {made_for['python']}, and this is {python}"
    if platform.machine() != made_for["machine"]:
        yield f"the bundle is for {made_for['machine']}, and this is {platform.machine()}"
    glibc = platform.libc_ver()[1]
    if numbers(glibc) < numbers(made_for["glibc"]):
        yield f"the bundle needs glibc {made_for['glibc']}, and this machine has {glibc or 'none'}"
    native = sha256_of(*sorted((ROOT / "kvshm" / "native").glob("*.[ch]")))
    if native != made_for["native"]:
        yield "kvshm/native is not what the bundle's kvshm was built from: make gpu-vllm-bundle"
    yield from misfits_of_torch(made_for)
    compilers = filter(None, [os.environ.get("CC"), "gcc", "clang"])
    if not any(map(shutil.which, compilers)):
        yield "triton needs a C compiler to launch its kernels, and neither CC nor PATH names one"
    if not (Path(sysconfig.get_path("include")) / "Python.h").is_file():
        yield f"triton needs Python.h, and {sysconfig.get_path('include')} has none"


def misfits_of_torch(made_for: Mapping[str, str]) -> Iterator[str]:
    """Yield what is wrong with the torch and the triton that are there."""
    try:
        import torch
    except ImportError as exc:
        yield f"torch cannot be imported: {exc}"
        return
    if numbers(torch.__version__) < numbers(made_for["torch"]):
        yield f"torch {torch.__version__} is older than {made_for['torch']}"
    if (torch.version.cuda or "none").split(".")[0] != made_for["cuda"]:
        yield f"torch is for CUDA {torch.version.cuda}, and vLLM's kernels for {made_for['cuda']}"
    try:
        import triton  # noqa: F401  # only whether it is there
    except ImportError as exc:
        yield f"triton cannot be imported: {exc}"


def numbers(version: str) -> tuple[int, ...]:
    """The first two numbers of a version: 2.11.0+cu130 -> (2, 11)."""
    return tuple(map(int, re.findall(r"\d+", version)[:2]))


def assemble(folder: Path, manifest: Manifest, target: Path) -> None:
    """Check every part and unpack all archives into the target; does nothing if it holds them."""
    text = (folder / MANIFEST).read_text()
    done = target / DONE
    if done.is_file() and done.read_text() == text:
        return
    refuse(list(faults(folder, manifest)))
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    for archive in manifest.archives:
        unpack(folder, archive, target)
    done.write_text(text)


def take_native_module(target: Path) -> None:
    """Copy kvshm's native module into the tree, whose Python is what is run, unless it has it."""
    for module in (target / "kvshm").glob("_native*.so"):
        own = ROOT / "kvshm" / module.name
        if not own.is_file() or sha256_of(own) != sha256_of(module):
            shutil.copy(module, own)


def tried(target: Path) -> None:
    """Run the trial in a Python of its own; BundleError if it fails."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        print("not tried: vLLM's kernels need libcuda.so.1, which belongs to NVIDIA's driver")
        return
    path = os.pathsep.join(map(str, (ROOT, ROOT / "examples", target.resolve())))
    try:
        done = subprocess.run(
            [sys.executable, str(TRIAL)], env={**os.environ, "PYTHONPATH": path},
            timeout=TRIAL_TIMEOUT_S,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise BundleError(f"the trial has not ended within {TRIAL_TIMEOUT_S} s") from None
    if done.returncode:
        raise BundleError(f"the trial has failed with status {done.returncode}")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--folder", type=Path, default=Path("dist/gpu-vllm"))
    parser.add_argument("--target", type=Path, default=Path("dist/gpu-vllm-site"))
    parser.add_argument("--no-trial", action="store_true", help="only put together")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
