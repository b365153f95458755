"""Cut what a GPU machine lacks for real vLLM engines into parts that are small enough to carry.

    python benchmarks/gpu_vllm_bundle.py --kvshm dist/kvshm-*.whl [--part-mib 57]

vLLM's CUDA wheel has 326 MB, mostly kernels that a dense model on a Hopper GPU does not run.  The
bundle has vLLM's Python, the compiled libraries without which it does not start, the packages of
requirements/gpu-vllm.txt and kvshm's own wheel; torch and triton must be on the GPU machine.
Needs a package index.  gpu_vllm_assemble.py puts the parts together.

An archive whose sources have not changed is left as it is; else vLLM's takes about two minutes,
the packages' one.
"""

from __future__ import annotations

import argparse
import hashlib
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from gpu_vllm_parts import Archive, BundleError, Manifest, faults, pack, sha256_of

ROOT = Path(__file__).parent.parent
REQUIREMENTS = ROOT / "requirements" / "gpu-vllm.txt"
VLLM = "0.32.0"
TORCH, CUDA, MACHINE = "2.11", "13", "x86_64"
GLIBC = 31
"""Of the C library's version 2.x: the newest that a wheel may ask for."""
PLATFORMS = ("manylinux1", "manylinux2010", "manylinux2014", "linux",
             *(f"manylinux_2_{minor}" for minor in range(5, GLIBC + 1)))  # fmt: skip
"""pip takes wheels of exactly these."""
LIBRARIES = (
    "vllm/_C_stable_libtorch.abi3.so",
    "vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so",
    "vllm/cumem_allocator.abi3.so",
)
"""vLLM imports the first whatever runs; the second has the attention of Hopper; the third allocates
the KV cache as VMM memory if that is asked for."""
TEXTS = (".py", ".json", ".jinja", ".typed")
LEFT_OUT = {"tests", "__pycache__"}
"""Folders of packages that no engine imports."""


@dataclass(frozen=True)
class Source:
    """What one archive is made from."""

    name: str
    key: str
    wheels: Sequence[str]
    fill: Callable[[Path], None]
    """Writes the archive's files into a folder."""


class Installer:
    """pip, for the GPU machine's Python."""

    def __init__(self, python_version: str) -> None:
        platforms = [f"--platform={name}_{MACHINE}" for name in PLATFORMS]
        self._for = [f"--python-version={python_version}", "--only-binary=:all:", *platforms]

    def download(self, requirement: str, folder: Path) -> None:
        """Fetch one wheel into the folder."""
        self._run("download", "--dest", str(folder), requirement)

    def install(self, folder: Path, *what: str) -> None:
        """Unpack wheels into the folder; for another Python than this one, so nothing is run."""
        self._run("install", "--no-compile", "--target", str(folder), *what)

    def _run(self, command: str, *arguments: str) -> None:
        pip = [sys.executable, "-m", "pip", command, "--quiet", "--disable-pip-version-check"]
        done = subprocess.run([*pip, "--no-deps", *self._for, *arguments])
        if done.returncode:
            raise BundleError(f"pip {command} {' '.join(arguments)} has failed")


def main() -> int:
    options = arguments()
    begun = time.monotonic()
    options.folder.mkdir(parents=True, exist_ok=True)
    try:
        manifest = build(options, Installer(options.python_version))
    except BundleError as exc:
        print(f"gpu-vllm-bundle: {exc}", file=sys.stderr)
        return 1
    for archive in manifest.archives:
        for part in archive.parts:
            print(f"{options.folder / part.file}: {part.nbytes / 2**20:.1f} MiB")
    print(f"complete after {time.monotonic() - begun:.0f} s")
    return 0


def build(options: argparse.Namespace, installer: Installer) -> Manifest:
    """Make what has changed since the last bundle; remove what no longer belongs to it."""
    limit = round(options.part_mib * 2**20)
    try:
        old = Manifest.read(options.folder)
    except BundleError:
        old = Manifest({})
    made_for = {
        "vllm": VLLM, "python": options.python_version, "torch": TORCH, "cuda": CUDA,
        "machine": MACHINE, "glibc": f"2.{GLIBC}", "native": native_sources(),
    }  # fmt: skip
    manifest = Manifest(made_for)
    for source in (
        vllm(options.cache, installer),
        packages(options.python_version, installer),
        own_wheel(options.kvshm, installer),
    ):
        archives = (*manifest.archives, archive_of(source, old, options.folder, limit))
        contents = {**manifest.contents, source.name: list(source.wheels)}
        manifest = Manifest(made_for, archives, contents)
    kept = {part.file for archive in manifest.archives for part in archive.parts}
    for path in options.folder.glob("*.tar.xz.*"):
        if path.name not in kept:
            path.unlink()
    manifest.write(options.folder)
    return manifest


def archive_of(source: Source, old: Manifest, folder: Path, limit: int) -> Archive:
    """Return the archive as it stands if it was made from the same, else make it."""
    key = f"{source.key}-{limit}"
    known = old.archive(source.name)
    if known and known.key == key and not list(faults(folder, Manifest({}, (known,)))):
        return known
    with tempfile.TemporaryDirectory(prefix="kv-", dir=folder) as directory:
        staging = Path(directory)
        source.fill(staging)
        remove_what_no_engine_imports(staging)
        return pack(staging, folder, source.name, key, limit)


def vllm(cache: Path, installer: Installer) -> Source:
    """vLLM's own wheel, of which only the Python and ``LIBRARIES`` are taken."""

    def fill(staging: Path) -> None:
        cache.mkdir(parents=True, exist_ok=True)
        pattern = f"vllm-{VLLM}-*.whl"
        if not list(cache.glob(pattern)):
            installer.download(f"vllm=={VLLM}", cache)
        (wheel,) = cache.glob(pattern)
        with zipfile.ZipFile(wheel) as archive:
            names = set(archive.namelist())
            if missing := set(LIBRARIES) - names:
                raise BundleError(f"{wheel.name} lacks {', '.join(sorted(missing))}")
            taken = [n for n in names if n.endswith(TEXTS) or ".dist-info/" in n or n in LIBRARIES]
            archive.extractall(staging, taken)

    return Source("vllm", digest(VLLM, *LIBRARIES, *TEXTS), [f"vllm=={VLLM}"], fill)


def packages(python_version: str, installer: Installer) -> Source:
    """The packages that torch does not bring along."""
    lines = [line for line in REQUIREMENTS.read_text().splitlines() if not line.startswith("#")]
    return Source(
        "packages",
        digest(python_version, *lines, *PLATFORMS, *LEFT_OUT),
        lines,
        lambda staging: installer.install(staging, "--requirement", str(REQUIREMENTS)),
    )


def own_wheel(wheel: Path, installer: Installer) -> Source:
    """kvshm's wheel, whose metadata has its entry points and whose native module is needed."""
    if not wheel.is_file():
        raise BundleError(f"{wheel} is missing: run 'make wheel'")
    return Source(
        "kvshm",
        sha256_of(wheel),
        [wheel.name],
        lambda staging: installer.install(staging, str(wheel)),
    )


def remove_what_no_engine_imports(staging: Path) -> None:
    """Leave out tests, compiled Python and console scripts of another machine's interpreter."""
    shutil.rmtree(staging / "bin", ignore_errors=True)
    for folder in [path for path in staging.rglob("*") if path.name in LEFT_OUT]:
        shutil.rmtree(folder, ignore_errors=True)


def native_sources() -> str:
    """Return the sha256 of kvshm's C files, from which its wheel was built."""
    return sha256_of(*sorted((ROOT / "kvshm" / "native").glob("*.[ch]")))


def digest(*words: str) -> str:
    return hashlib.sha256("\n".join(sorted(words)).encode()).hexdigest()


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kvshm", type=Path, required=True, help="kvshm's wheel")
    parser.add_argument("--folder", type=Path, default=Path("dist/gpu-vllm"))
    parser.add_argument("--cache", type=Path, default=Path("dist/gpu-vllm-wheel"))
    parser.add_argument("--python-version", default="3.12", help="of the GPU machine")
    parser.add_argument(
        "--part-mib", type=float, default=57, help="MiB of a part at most; a transfer often has "
        "room for 64, of which the tree takes some",
    )  # fmt: skip
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
