"""Builds what is released: a source archive, and a wheel for each architecture.

    .venv-release/bin/python release/make_release.py dist/release

All of it comes from the commit that is checked out, and is the same to the last byte wherever and
whenever it is built (https://reproducible-builds.org): times are those of the commit, the compiler
and its libc are pinned, both by ziglang's version, as are Python's headers by its minor version,
nothing has a path of the machine in it, and neither umask nor environment reach it.  zig compiles
for another architecture as for its own, against the symbols of glibc 2.28.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).parents[1]
GLIBC = "2.28"
ARCHITECTURES = ("x86_64", "aarch64")
OWNER_MAY_WRITE = 0o644, 0o755
PYTHON = sys.executable
HEADERS = (3, 11)
"""Of which Python: the least that the wheels are for."""
KEPT = ("HOME", "PATH", "TMPDIR")
"""Of the environment; CFLAGS, say, would change what is built."""
SETTLED = {"LC_ALL": "C.UTF-8", "PYTHONHASHSEED": "0", "TZ": "UTC"}


def run(*command: str | Path, cwd: Path, **environ: str) -> str:
    """Run a command and return what it prints; its errors end the build."""
    kept = {name: os.environ[name] for name in KEPT if name in os.environ}
    settled = {**kept, **SETTLED, **environ}
    done = subprocess.run(command, cwd=cwd, env=settled, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(map(str, command))} ended with {done.returncode}")
    return done.stdout


def check_out(into: Path) -> str:
    """Write the commit's files into a folder, and return its time in seconds since 1970."""
    if not (ROOT / ".git").exists():
        raise SystemExit(f"{ROOT} is no clone of kvshm: what is released is what git has")
    archive = into.with_suffix(".tar")
    run("git", "archive", "--output", archive, "HEAD", cwd=ROOT)
    with tarfile.open(archive) as files:
        files.extractall(into, filter="data")
    return run("git", "log", "-1", "--format=%ct", cwd=ROOT).strip()


def complete_links(tree: Path) -> None:
    """Have the links of README lead into the repository: an index has no files beside it."""
    project = tomllib.loads((tree / "pyproject.toml").read_text())["project"]
    home = project.get("urls", {}).get("Repository")
    if home is None:
        return
    (version,) = re.findall(
        r'^__version__ = "(.+)"$', (tree / "kvshm/version.py").read_text(), re.M
    )
    readme = tree / project["readme"]
    readme.write_text(with_whole_links(readme.read_text(), home.rstrip("/"), f"v{version}"))


def with_whole_links(text: str, home: str, tag: str) -> str:
    def whole(found: re.Match[str]) -> str:
        kind = "raw" if found[1] else "blob"
        return f"{found[1]}{found[2]}({home}/{kind}/{tag}/{found[3]})"

    return re.sub(r"(!?)(\[[^\]]*\])\((?![a-z]+:|#)([^)\s]+)\)", whole, text)


def build_source(tree: Path, out: Path, seconds: str) -> Path:
    made = out.parent / "made"
    run(PYTHON, "-m", "build", "--sdist", "--no-isolation", "--outdir", made, tree, cwd=tree)
    (found,) = made.glob("*.tar.gz")
    even_out(found, out / found.name, int(seconds))
    return out / found.name


def even_out(archive: Path, into: Path, seconds: int) -> None:
    """Copy a source archive without what differs between builds: owners, times, order."""
    with (
        tarfile.open(archive) as old,
        into.open("wb") as file,
        gzip.GzipFile("", "wb", mtime=seconds, fileobj=file) as packed,
        tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as new,
    ):
        for member in sorted(old.getmembers(), key=lambda each: each.name):
            member.uid = member.gid = 0
            member.uname = member.gname = ""
            member.mtime, member.pax_headers = seconds, {}
            member.mode = OWNER_MAY_WRITE[member.isdir() or bool(member.mode & 0o100)]
            new.addfile(member, old.extractfile(member) if member.isfile() else None)


def build_wheel(source: Path, architecture: str, out: Path, seconds: str) -> Path:
    """Build a wheel out of the source archive, as an installer would, with a bill of materials."""
    with tempfile.TemporaryDirectory() as room:
        with tarfile.open(source) as files:
            files.extractall(room, filter="data")
        (tree,) = Path(room).iterdir()
        wheels = tree.parent / "wheels"
        command = ("pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", wheels)
        run(PYTHON, "-m", *command, ".", cwd=tree, **compilers(architecture, tree, seconds))
        (found,) = wheels.glob("*.whl")
        add_materials(found, tree, seconds)
        platform = f"manylinux_{GLIBC.replace('.', '_')}_{architecture}"
        retag = ("wheel", "tags", "--remove", "--platform-tag", platform, found)
        run(PYTHON, "-m", *retag, cwd=wheels, SOURCE_DATE_EPOCH=seconds)
        (found,) = wheels.glob("*.whl")
        return Path(shutil.move(found, out / found.name))


def compilers(architecture: str, tree: Path, seconds: str) -> Mapping[str, str]:
    compiler = f"{shlex.quote(PYTHON)} -m ziglang cc -target {architecture}-linux-gnu.{GLIBC}"
    compiler += f" {shlex.quote(f'-ffile-prefix-map={tree}=.')} -g0"
    return {
        "CC": compiler,
        "LDSHARED": f"{compiler} -shared -Wl,-s",
        "SOURCE_DATE_EPOCH": seconds,
        "_PYTHON_HOST_PLATFORM": f"linux-{architecture}",
        "ZIG_GLOBAL_CACHE_DIR": str(ROOT / ".cache" / "zig"),  # where nobody else can write
    }


def add_materials(wheel: Path, tree: Path, seconds: str) -> None:
    """Put a CycloneDX bill of materials into a wheel (https://peps.python.org/pep-0770/)."""
    folder = wheel.parent / "unpacked"
    run(PYTHON, "-m", "wheel", "unpack", "--dest", folder, wheel, cwd=tree)
    (content,) = folder.iterdir()
    (about,) = content.glob("*.dist-info")
    (about / "sboms").mkdir()
    requirements = tree / "requirements.txt"
    requirements.write_text(required(about / "METADATA"))
    told = ("--output-reproducible", "--of", "JSON", "--pyproject", "pyproject.toml")
    target = ("-o", about / "sboms" / "kvshm.cdx.json")
    run(PYTHON, "-m", "cyclonedx_py", "requirements", *told, *target, requirements, cwd=tree)
    complete(about / "sboms" / "kvshm.cdx.json", about.name.removesuffix(".dist-info"))
    environ = {"SOURCE_DATE_EPOCH": seconds}
    run(PYTHON, "-m", "wheel", "pack", "--dest-dir", wheel.parent, content, cwd=tree, **environ)
    shutil.rmtree(folder)


def complete(materials: Path, release: str) -> None:
    """Say which version this is, and that it needs what is listed: its tool knows neither."""
    told = json.loads(materials.read_text())
    name, version = release.split("-")
    about = told["metadata"]["component"]
    about |= {"version": version, "purl": f"pkg:pypi/{name}@{version}"}
    needed = sorted(each["bom-ref"] for each in told["components"])
    (own,) = (each for each in told["dependencies"] if each["ref"] == about["bom-ref"])
    own["dependsOn"] = needed
    materials.write_text(json.dumps(told, indent=2, sort_keys=True) + "\n")


def required(metadata: Path) -> str:
    """What the wheel always needs, a line each."""
    lines = metadata.read_text().splitlines()
    needs = [line.partition(": ")[2] for line in lines if line.startswith("Requires-Dist: ")]
    return "".join(f"{each}\n" for each in needs if "extra ==" not in each)


def main() -> None:
    """Command line: print the name and the SHA-256 of each file."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("out", type=Path, help="a folder, which is emptied")
    out = parser.parse_args().out.resolve()
    if sys.version_info[:2] != HEADERS:
        wanted = ".".join(map(str, HEADERS))
        raise SystemExit(f"a release is built by Python {wanted}: make PYTHON3=python{wanted} ...")
    os.umask(0o022)
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    with tempfile.TemporaryDirectory() as room:
        tree = Path(room) / "tree"
        tree.mkdir()
        seconds = check_out(tree)
        complete_links(tree)
        built = Path(room) / "out"
        built.mkdir()
        source = build_source(tree, built, seconds)
        files = [source, *(build_wheel(source, each, built, seconds) for each in ARCHITECTURES)]
        for each in files:
            print(hashlib.sha256(each.read_bytes()).hexdigest(), each.name)
            shutil.move(each, out / each.name)


if __name__ == "__main__":
    main()
