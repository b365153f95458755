"""One server or two in front of the data-parallel ranks of one machine: every rank is an engine,
whoever balances between them, and all metrics count it once."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from completions import Result, stream
from local_node import EngineSpec, clean_environment, free_port, wait_until
from sharing_node import BLOCK_SIZE

from . import cpu_experts
from .engines import PATIENCE_S, TOOL, SharedNode
from .families import write_qwen3_moe
from .oracle import Prompt, prompts, shareable
from .test_data_parallel import known

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.long,
    pytest.mark.nightly,  # two ranks share in test_data_parallel.py, and in make test-all
    pytest.mark.timeout(900),
]

RANKS = 4
Way = Callable[[int], tuple[str, ...]]


@dataclass(frozen=True)
class Serve(EngineSpec):
    """``vllm serve``, which starts several API servers if several ranks are its own."""

    def command(self, port: int) -> list[str]:
        module = super().command(port)
        serve = str(Path(__file__).with_name("serve.py"))
        return [sys.executable, serve, *module[module.index("--model") + 1 :]]


def internal(number: int) -> tuple[str, ...]:
    """The one server balances between all ranks."""
    return ("--data-parallel-size", str(RANKS))


def hybrid(number: int) -> tuple[str, ...]:
    """A server balances between its own two ranks, somebody else between the servers."""
    size = ("--data-parallel-size", str(RANKS), "--data-parallel-size-local", "2")
    return (*size, "--data-parallel-hybrid-lb", "--data-parallel-start-rank", str(2 * number))


def external(number: int) -> tuple[str, ...]:
    """Somebody else balances between servers of one rank, which vLLM has for mixtures only."""
    size = ("--data-parallel-size", "2", "--data-parallel-rank", str(number))
    return (*size, "--enable-expert-parallel")


def spec(model: Path, number: int, arguments: tuple[str, ...], each: int, port: int) -> Serve:
    meet = ("--data-parallel-address", "127.0.0.1", "--data-parallel-rpc-port", str(port))
    # From 0.33 on rank 1 wants a NUMA node 1, unless the second variable is there.
    bound = "|".join(str(rank % 2) for rank in range(max(each, 2)))
    cores = {"VLLM_CPU_OMP_THREADS_BIND": bound, "VLLM_CPU_SIM_MULTI_NUMA": "0"}
    length = ("--max-model-len", "2048")
    return Serve(f"server-{number}", model, 0, 64, (*arguments, *meet, *length), cores)


class Balanced:
    def __init__(self, node: SharedNode, model: Path, way: Way, servers: int, each: int) -> None:
        self.node, self.each, self.ranks, port = node, each, servers * each, free_port()
        node.start_coordinator()
        specs = (spec(model, number, way(number), each, port) for number in range(servers))
        self.servers = node.start_engines(*specs)
        for _ in wait_until("all ranks have joined", PATIENCE_S):
            if len(known(node)) == self.ranks:
                break

    def ask(self, rank: int, prompt: Prompt) -> Result:
        """Have one of all ranks answer, by its number among those of its server."""
        server = self.servers[rank // self.each]
        body = {"prompt": list(prompt), "logprobs": 5, "max_tokens": 16}
        model = {"model": str(server.spec.model)}
        headers = {"X-data-parallel-rank": str(rank % self.each)}
        return stream(server.port, "/v1/completions", {**model, **body}, headers)

    def wait_known(self, entries: int) -> None:
        """Until the ranks know this many blocks of others, all together."""
        for _ in wait_until("the other ranks know the blocks", PATIENCE_S):
            if sum(known(self.node).values()) >= entries:
                break

    def by_vllm(self, name: str) -> dict[int, int]:
        """A counter of kvshm on the servers' pages, by rank."""
        found: dict[int, int] = {}
        for server in self.servers:
            for series, value in server.metrics().items():
                if series.startswith(f"vllm:kvshm_{name}"):
                    (rank,) = re.findall(r'engine="(\d+)"', series)
                    assert int(rank) not in found, "no rank is on two pages"
                    found[int(rank)] = int(value)
        return found

    def by_kvshm(self, name: str) -> list[int]:
        """The same on the page of ``kvshm metrics``, whoever has it."""
        place = ("--run-dir", str(self.node.run_dir), "--namespace", self.node.namespace)
        command = [*TOOL, "metrics", *place]
        page = subprocess.run(
            command, env=clean_environment(), capture_output=True, text=True, check=True
        )
        found = re.findall(rf"^kvshm_{name}\{{.*\}} (\S+)$", page.stdout, re.M)
        return sorted(int(float(value)) for value in found)


@pytest.fixture(
    params=[(internal, 1, RANKS), (hybrid, 2, 2), (external, 2, 1)],
    ids=["internal", "hybrid", "external"],
)
def balanced(
    request: pytest.FixtureRequest, model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Balanced]:
    way, servers, each = request.param
    environment = {}
    if way is external:
        model = write_qwen3_moe(tmp_path_factory.mktemp("mixture"))
        environment = cpu_experts.install(tmp_path_factory.mktemp("plug-in"))
    with SharedNode(environment) as node:
        yield Balanced(node, model, way, servers, each)


def test_ranks_of_all_servers_share_and_every_page_counts_each_once(balanced: Balanced) -> None:
    """Rank n has n prompts from others; nobody balances, so that the sums are known."""
    ranks = range(balanced.ranks)
    expected = dict.fromkeys(ranks, 0)
    for number, prompt in zip(ranks, prompts(balanced.ranks, seed=460), strict=True):
        before = sum(known(balanced.node).values())
        computed = balanced.ask(number, prompt)
        balanced.wait_known(before + (len(ranks) - 1) * shareable(prompt))
        hit = balanced.ask(number, prompt)
        for importer in ranks[number + 1 :]:
            imported = balanced.ask(importer, prompt)
            assert imported == hit
            assert imported.tokens == computed.tokens
            expected[importer] += shareable(prompt) * BLOCK_SIZE
    assert balanced.by_vllm("imported_tokens_total") == expected
    assert balanced.by_vllm("failed_loads_total") == dict.fromkeys(ranks, 0)
    assert balanced.by_kvshm("imported_tokens_total") == sorted(expected.values())
    assert sum(expected.values()) > 0
