"""What an index and its users expect of a release: `make release-check` asks it of dist/release."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from email.message import Message
from email.parser import Parser
from pathlib import Path

import pytest
from make_release import with_whole_links

from kvshm.version import __version__
from tests.core.test_sanitizers import CORE, DRIVER, PARTS

ROOT = Path(__file__).parents[1]
RELEASE = ROOT / "dist" / "release"
BUILDER = ROOT / ".venv-release" / "bin" / "python"
ARCHITECTURES = ("x86_64", "aarch64")
GLIBC = (2, 28)
TAG = os.environ.get("TAG", "")
"""Of a version; empty: this is a trial."""
RELATIVE = r"\]\((?!https?://|#)"


def run(*command: str | Path, cwd: Path = ROOT, **environ: str) -> str:
    done = subprocess.run(
        command, env=os.environ | environ, cwd=cwd, capture_output=True, text=True
    )
    assert done.returncode == 0, f"{command} ended with {done.returncode}:\n{done.stderr}"
    return done.stdout


def wheel_of(architecture: str) -> Path:
    (found,) = RELEASE.glob(f"kvshm-{__version__}-cp311-abi3-manylinux_2_28_{architecture}.whl")
    return found


@pytest.fixture(scope="module", params=ARCHITECTURES)
def wheel(request: pytest.FixtureRequest) -> zipfile.ZipFile:
    return zipfile.ZipFile(wheel_of(request.param))


def about(wheel: zipfile.ZipFile, name: str) -> bytes:
    return wheel.read(f"kvshm-{__version__}.dist-info/{name}")


def metadata(wheel: zipfile.ZipFile) -> Message:
    return Parser().parsestr(about(wheel, "METADATA").decode())


def sums(folder: Path) -> dict[str, str]:
    return {each.name: hashlib.sha256(each.read_bytes()).hexdigest() for each in folder.iterdir()}


def test_the_same_commit_gives_the_same_bytes_elsewhere(tmp_path: Path) -> None:
    elsewhere = tmp_path / "a longer päth"
    elsewhere.mkdir()
    habits = {"TMPDIR": str(elsewhere), "CFLAGS": "-O0", "LDFLAGS": "-g", "TZ": "Asia/Kolkata"}
    habits |= {"LC_ALL": "C", "PYTHONHASHSEED": "7", "SOURCE_DATE_EPOCH": "1"}
    before = os.umask(0o077)
    try:
        run(BUILDER, "release/make_release.py", tmp_path / "again", cwd=ROOT, **habits)
    finally:
        os.umask(before)
    assert sums(RELEASE) == sums(tmp_path / "again")
    assert len(sums(RELEASE)) == 1 + len(ARCHITECTURES)


def test_an_index_takes_it() -> None:
    run(BUILDER, "-m", "twine", "check", "--strict", *RELEASE.iterdir())


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_wheels_run_wherever_their_tag_says(architecture: str) -> None:
    told = run(BUILDER, "-m", "auditwheel", "show", wheel_of(architecture))
    found = re.search(rf'tag:\s+"manylinux_(\d+)_(\d+)_{architecture}"', told)
    assert found, told
    assert (int(found[1]), int(found[2])) <= GLIBC


def test_nothing_of_the_machine_is_in_a_wheel(wheel: zipfile.ZipFile) -> None:
    machine = [str(Path.home()), str(ROOT), "/tmp/"]
    code = wheel.read("kvshm/_native.abi3.so")
    assert [each for each in machine if each.encode() in code] == []
    assert about(wheel, "licenses/LICENSE") == (ROOT / "LICENSE").read_bytes()


def test_the_bill_of_materials_names_what_a_wheel_needs(wheel: zipfile.ZipFile) -> None:
    bill = json.loads(about(wheel, "sboms/kvshm.cdx.json"))
    assert bill["bomFormat"] == "CycloneDX"
    needs = metadata(wheel).get_all("Requires-Dist") or []
    always = {re.split(r"\W", each)[0] for each in needs if "extra ==" not in each}
    assert {part["name"] for part in bill["components"]} == always != set()
    itself = bill["metadata"]["component"]
    assert itself["purl"] == f"pkg:pypi/kvshm@{__version__}"
    (own,) = (each for each in bill["dependencies"] if each["ref"] == itself["bom-ref"])
    assert own["dependsOn"] == sorted(part["bom-ref"] for part in bill["components"])


def test_the_tag_is_the_version_and_the_changelog_has_it(wheel: zipfile.ZipFile) -> None:
    told = metadata(wheel)
    assert told["Version"] == __version__
    heads = re.findall(r"^## (?:\[?)([^\]\s]+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert heads[0] == ("Unreleased" if ".dev" in __version__ else __version__)
    if TAG:
        assert f"v{__version__}" == TAG
        assert ".dev" not in __version__
        assert told.get_all("Project-URL")
        assert re.findall(RELATIVE, str(told.get_payload())) == []


@pytest.mark.parametrize(
    ("link", "whole"),
    [
        ("[results\nthere](docs/gpu.md#x)", "[results\nthere](HOME/blob/v1/docs/gpu.md#x)"),
        ("![An import](docs/a.svg)", "![An import](HOME/raw/v1/docs/a.svg)"),
        ("[vLLM](https://vllm.ai)", "[vLLM](https://vllm.ai)"),
        ("[above](#why)", "[above](#why)"),
    ],
)
def test_on_an_index_links_lead_into_the_repository(link: str, whole: str) -> None:
    assert with_whole_links(link, "HOME", "v1") == whole


def test_every_link_of_the_readme_is_completed() -> None:
    text = (ROOT / "README.md").read_text()
    assert re.findall(RELATIVE, text)
    assert re.findall(RELATIVE, with_whole_links(text, "https://a.example", "v1")) == []


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("aarch64") / "driver"
    sources = [*DRIVER, *(CORE / each for each in PARTS)]
    how = ("-target", "aarch64-linux-musl", "-static", "-std=c11", "-O2", "-pthread")
    run(BUILDER, "-m", "ziglang", "cc", *how, f"-I{CORE}", *sources, "-o", made)
    return made


@pytest.mark.parametrize("what", ["leases", "forced", "deaths", "index", "fuzz", "scribble"])
def test_the_core_runs_on_aarch64(driver: Path, what: str) -> None:
    assert run("qemu-aarch64", driver, what)


def test_engines_share_by_the_wheel(tmp_path: Path) -> None:
    """The demo, from the wheel, beside the packages of this environment, without this tree."""
    packages = tmp_path / "packages"
    packages.mkdir()
    for path in Path(sysconfig.get_paths()["purelib"]).iterdir():
        if "kvshm" not in path.name:
            (packages / path.name).symlink_to(path)
    run(sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv")
    python = tmp_path / "venv" / "bin" / "python"
    own = run(python, "-c", "import sysconfig; print(sysconfig.get_paths()['purelib'])").strip()
    Path(own, "packages.pth").write_text(f"{packages}\n")
    run(python, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", wheel_of("x86_64"))
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    where = "import kvshm; print(kvshm.__file__)"
    home = run(python, "-c", where, cwd=tmp_path, PYTHONPATH="")
    assert home.startswith(str(tmp_path / "venv"))
    assert "blocks and answered" in run(python, "examples/demo.py", cwd=tmp_path, PYTHONPATH="")
