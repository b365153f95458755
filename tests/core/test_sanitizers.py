"""The core under the sanitizers: no data race in the protocol, no byte beyond a segment.

The thread sanitizer knows nothing of fences, so what it proves is the protocol of leases: an
importer under a lease and an exporter that waits need no other synchronisation.  That the
fences of the re-check are where they belong is shown by the model (tests/model).
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

FILES = ("core_driver.c", "core_fuzz.c", "core_scribble.c")
DRIVER = [Path(__file__).with_name(name) for name in FILES]
CORE = Path(__file__).parents[2] / "kvshm" / "native"
PARTS = ("core.c", "duplicates.c", "exporter.c", "importer.c", "lookup.c", "replica.c")
FLAGS = ("-std=c11", "-g", "-O1", "-Wall", "-Wextra", "-pthread", "-fno-sanitize-recover=all")


def compiler() -> str:
    found = shutil.which(os.environ.get("CC", "cc")) or shutil.which("gcc")
    if found is None:
        pytest.skip("no C compiler")
    return found


def build(target: Path, *sources: str, sanitizer: str) -> subprocess.CompletedProcess[str]:
    command = [compiler(), *FLAGS, f"-fsanitize={sanitizer}", f"-I{CORE}"]
    return subprocess.run(
        [*command, *sources, "-o", str(target)], capture_output=True, text=True, check=False
    )


def run(program: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run without address space randomisation, which the thread sanitizer cannot always take."""
    plain = [str(program), *arguments]
    fixed = ["setarch", "-R", *plain] if shutil.which("setarch") else plain
    done = subprocess.run(fixed, capture_output=True, text=True, check=False)
    if "setarch:" in done.stderr:  # not permitted, as in most containers
        done = subprocess.run(plain, capture_output=True, text=True, check=False)
    return done


@pytest.fixture(scope="module", params=["address,undefined", "thread"])
def driver(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("core")
    empty = folder / "empty.c"
    empty.write_text("int main(void) { return 0; }\n")
    if build(folder / "empty", str(empty), sanitizer=request.param).returncode != 0:
        pytest.skip(f"this compiler comes without -fsanitize={request.param}")
    if run(folder / "empty").returncode != 0:
        pytest.skip(f"programs with -fsanitize={request.param} do not run here")
    sources = map(str, [*DRIVER, *(CORE / part for part in PARTS)])
    built = build(folder / "driver", *sources, sanitizer=request.param)
    assert built.returncode == 0, built.stderr
    warnings = [line for line in built.stderr.splitlines() if "warning:" in line]
    assert [w for w in warnings if "-Wtsan" not in w] == []  # gcc: "fences are not supported"
    return folder / "driver"


@pytest.mark.parametrize("what", ["leases", "forced", "deaths", "index", "fuzz", "scribble"])
def test_the_core_is_clean(driver: Path, what: str) -> None:
    done = run(driver, what)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout
