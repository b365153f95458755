"""What is in the wheel, and what it says of itself."""

from __future__ import annotations

import configparser
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
COMPONENTS = ("coordinator", "transport", "hooks", "tools")


@pytest.fixture(scope="module")
def names(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def entry_points(wheel: Path) -> Iterator[str]:
    with zipfile.ZipFile(wheel) as archive:
        path = next(n for n in archive.namelist() if n.endswith("/entry_points.txt"))
        parser = configparser.ConfigParser()
        parser.read_string(archive.read(path).decode())
    for section in parser.sections():
        yield from (value.split(":")[0] for value in parser[section].values())


@pytest.mark.parametrize("name", COMPONENTS)
def test_link_shows_component_to_type_checkers(name: str) -> None:
    assert (ROOT / "kvshm" / name).readlink() == Path("..", name)


def test_wheel_fits_every_python_from_311_on(wheel: Path) -> None:
    assert "-cp311-abi3-" in wheel.name


def test_wheel_installs_one_name(names: set[str]) -> None:
    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"kvshm"}
    assert len(tops) == 2


def test_wheel_holds_every_module_and_no_c_source(names: set[str]) -> None:
    expected = {path.relative_to(ROOT).as_posix() for path in (ROOT / "kvshm").rglob("*.py")}
    for component in COMPONENTS:
        files = (ROOT / component).rglob("*.py")
        expected |= {f"kvshm/{path.relative_to(ROOT).as_posix()}" for path in files}
    assert {name for name in names if name.endswith(".py")} == expected
    assert {"kvshm/py.typed", "kvshm/_native.abi3.so", "kvshm/_native.pyi"} <= names
    assert "kvshm/hooks/vllm/known_sources.json" in names
    assets = (ROOT / "tools" / "serve" / "assets").iterdir()
    assert {f"kvshm/tools/serve/assets/{path.name}" for path in assets} <= names
    assert not [name for name in names if name.endswith((".c", ".h"))]


def test_doubles_of_the_tests_stay_out_of_the_wheel(names: set[str]) -> None:
    doubles = {path.name for path in (ROOT / "tests" / "doubles").glob("*.py")}
    assert doubles
    assert {name for name in names if Path(name).name in doubles} == set()


def test_entry_points_lead_to_modules(wheel: Path, names: set[str]) -> None:
    modules = set(entry_points(wheel))
    assert {m.replace(".", "/") + ".py" for m in modules} <= names
    assert "kvshm.hooks.vllm.plugin" in modules
