"""The engines that kvshm shares with, as what suites that run over all of them see of one.

An engine under test is an ``EngineSpec``: its command starts a server of OpenAI's completions with
those numbers of vLLM's /metrics that say where prompt tokens came from.  All else that these suites
look at lies in shared memory, alike for every engine.  What only one engine has is tested in its
own folder.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from local_node import EngineSpec
from sharing_node import BLOCK_SIZE

SERVER = Path(__file__).parents[1] / "examples" / "transformers_server.py"


@dataclass(frozen=True)
class TransformersSpec(EngineSpec):
    def command(self, port: int) -> list[str]:
        where = ["--model", str(self.model), "--port", str(port), "--core", str(self.core)]
        cache = ["--page-size", str(BLOCK_SIZE), "--num-blocks", str(self.num_blocks)]
        patient = ["--import-wait", "60"]  # what is tested is what an import brings
        return [sys.executable, str(SERVER), *where, *cache, *patient, *self.arguments]

    @staticmethod
    def longest_prompt(tokens: int) -> tuple[str, ...]:
        """A cache of any size will do."""
        return ()


ENGINES: dict[str, type[EngineSpec]] = {"vllm": EngineSpec, "transformers": TransformersSpec}
