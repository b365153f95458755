"""examples/tiny_engine.py, the engine of docs/porting.md, beside others of its kind: whatever
becomes of them and of kvshm, it says the tokens that examples/tiny_engine_alone.py says."""

from __future__ import annotations

import ast
import re
import signal
from typing import NamedTuple

import pytest
import torch
from tiny_engine_alone import Engine

import kvshm
from kvshm.config import Config

from ..unit.pages import ROOT
from .processes import Managed, Node, wait_until

pytestmark = pytest.mark.multiprocess

TINY = ROOT / "examples/tiny_engine.py"
LONG = "A prefix of several blocks, which the first engine computes and others find there; "
# The first has an answer that ends with its block, the last one is a whole block.
PROMPTS = (LONG + "first", LONG + "and two!", LONG + "another end", "sixteen letters.")
MANY = tuple(f"{number}: {LONG}end" for number in (1, 2, 3, 1, 2, 3))
BLOCK_SIZE = 16
SHARED = len(LONG) // BLOCK_SIZE * BLOCK_SIZE
WITHOUT_KVSHM = """
import runpy, sys
sys.modules["kvshm"] = None
sys.argv = sys.argv[1:]
sys.path.insert(0, sys.argv[0].rpartition("/")[0])
runpy.run_path(sys.argv[0], run_name="__main__")
"""


class Said(NamedTuple):
    hit: int
    imported: int
    computed: int
    tokens: str


def read(line: str) -> Said:
    counts = {what: int(number) for what, number in re.findall(r"(\w+) (\d+)[,;]", line)}
    tokens = line.partition("; next ")[2]
    return Said(counts["hit"], counts.get("imported", 0), counts["computed"], tokens)


@pytest.fixture(scope="module")
def alone() -> dict[str, str]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    engine = Engine(num_blocks=64, seed=0)
    said = {p: str(engine.generate(p.encode(), 8)[1]) for p in dict.fromkeys(PROMPTS + MANY)}
    torch.set_num_threads(threads)
    return said


def start(node: Node, *options: str, **settings: str) -> Managed:
    environ = {"KVSHM_RUN_DIR": str(node.run_dir), "KVSHM_NAMESPACE": node.namespace, **settings}
    return node.processes.start("tiny_engine", str(TINY), *options, environ=environ)


def ask(engine: Managed, prompt: str) -> Said:
    since = len(engine.out)
    engine.say(prompt)
    return read(engine.wait_out(lambda line: "next" in line, since))


def wait_known(node: Node, importer: Managed, exporter: Managed, blocks: int) -> int:
    config = Config(run_dir=str(node.run_dir), namespace=node.namespace)
    with kvshm.Reader(config) as reader:

        def shown() -> int:
            epoch = next((e.epoch for e in reader.engines() if e.pid == exporter.pid), None)
            return sum(block.epoch == epoch for block in reader.list())

        def known() -> bool:
            epochs = {engine.pid: engine.epoch for engine in reader.engines()}
            if not {importer.pid, exporter.pid} <= epochs.keys():
                return False
            replica = node.segments.replica(epochs[importer.pid])
            try:
                return replica.count >= shown() >= blocks
            finally:
                replica.close()

        wait_until(known, f"{importer.name} knows {blocks} blocks of {exporter.name}")
        return shown()


def started_pair(node: Node, **importers: str) -> tuple[Managed, Managed, Said]:
    node.coordinator()
    verify = {name: importers[name] for name in importers if name == "KVSHM_VERIFY"}
    exporter, importer = start(node, **verify), start(node, **importers)
    first = ask(exporter, PROMPTS[0])
    shown = wait_known(node, importer, exporter, SHARED // BLOCK_SIZE)
    assert shown == SHARED // BLOCK_SIZE, "the last block has no bytes of its last token"
    return exporter, importer, first


def test_what_the_first_engine_computed_is_imported_until_it_is_killed(
    node: Node, alone: dict[str, str]
) -> None:
    """It is killed while a second prefix of it is copied."""
    checks = {"KVSHM_VERIFY": "1", "KVSHM_TEST_SYNC_POINT": "COPIED:stop:2"}
    exporter, importer, first = started_pair(node, **checks)
    assert first == (0, 0, len(PROMPTS[0]), alone[PROMPTS[0]])
    second = ask(importer, PROMPTS[1])
    assert second == (0, SHARED, len(PROMPTS[1]) - SHARED, alone[PROMPTS[1]])
    third = ask(importer, PROMPTS[2])
    assert third == (SHARED, 0, len(PROMPTS[2]) - SHARED, alone[PROMPTS[2]])

    assert ask(exporter, MANY[0]).tokens == alone[MANY[0]]
    wait_known(node, importer, exporter, 2 * SHARED // BLOCK_SIZE)
    since = len(importer.out)
    importer.say(MANY[0])
    wait_until(lambda: importer.is_stopped, "the importer to stop at the end of its copy")
    exporter.kill()
    importer.signal(signal.SIGCONT)
    said = read(importer.wait_out(lambda line: "next" in line, since))
    assert said == (0, 0, len(MANY[0]), alone[MANY[0]])


def test_the_first_prompt_of_an_engine_that_has_just_joined_is_imported(
    node: Node, alone: dict[str, str]
) -> None:
    node.coordinator()
    exporter = start(node)
    ask(exporter, PROMPTS[0])
    importer = start(node, PROMPTS[1])  # looked up as soon as ``join`` returns
    said = read(importer.wait_out(lambda line: "next" in line))
    assert said == (0, SHARED, len(PROMPTS[1]) - SHARED, alone[PROMPTS[1]])


def test_blocks_that_are_reused_all_the_time_change_no_token(
    node: Node, alone: dict[str, str]
) -> None:
    """Each cache has room for one prompt and a half."""
    node.coordinator()
    engines = [start(node, "--blocks", "9", KVSHM_VERIFY="1") for _ in range(2)]
    for engine in engines:
        assert ask(engine, PROMPTS[-1]).tokens == alone[PROMPTS[-1]]  # both have started
    since = [len(engine.out) for engine in engines]
    for prompt in MANY * 5:
        for engine in engines:
            engine.say(prompt)
    for engine, before in zip(engines, since, strict=True):
        engine.end_input()
        assert engine.wait() == 0
        said = [read(line).tokens for line in engine.out.matching(bool, before)]
        assert said == [alone[prompt] for prompt in MANY * 5]


@pytest.mark.parametrize("case", ["no coordinator", "no run directory", "no kvshm"])
def test_an_engine_that_cannot_share_says_the_same_tokens(
    node: Node, alone: dict[str, str], case: str
) -> None:
    if case == "no kvshm":
        engine = node.processes.python("tiny_engine", "-c", WITHOUT_KVSHM, str(TINY))
    else:
        place = "/proc/nowhere" if case == "no run directory" else str(node.run_dir)
        engine = start(node, KVSHM_RUN_DIR=place)
    for prompt in PROMPTS * 2:
        said = ask(engine, prompt)
        assert (said.imported, said.tokens) == (0, alone[prompt])
    engine.end_input()
    assert engine.wait() == 0


@pytest.mark.parametrize("verify", ["0", "1"])
def test_a_wrong_block_is_noticed(node: Node, alone: dict[str, str], verify: str) -> None:
    """By the tokens; or the check refuses it, and the engine computes."""
    _, importer, _ = started_pair(node, KVSHM_FAULT="wrong-block", KVSHM_VERIFY=verify)
    said = {prompt: ask(importer, prompt) for prompt in PROMPTS[1:3]}
    wrong = {prompt for prompt, answer in said.items() if answer.tokens != alone[prompt]}
    imported = said[PROMPTS[1]].imported
    assert (wrong, imported) == (set(), 0) if verify == "1" else (wrong and imported == SHARED)


def test_it_is_small_and_uses_the_public_surface_only() -> None:
    source = TINY.read_text("utf-8")
    assert len(source.splitlines()) <= 200
    nodes = list(ast.walk(ast.parse(source)))
    imported = [alias.name for n in nodes if isinstance(n, ast.Import) for alias in n.names]
    imported += [n.module or "" for n in nodes if isinstance(n, ast.ImportFrom)]
    assert [name for name in imported if name.startswith("kvshm")] == ["kvshm"]
    used = {
        n.attr for n in nodes if isinstance(n, ast.Attribute) and ast.unparse(n.value) == "kvshm"
    }
    assert {"join", "allocate"} <= used <= {*kvshm.__all__}
    called = set(re.findall(r"self\.node\.(\w+)", source))
    assert {"publish", "retract"} <= called <= {*dir(kvshm.Node)}
