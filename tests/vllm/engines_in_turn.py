"""An OpenAI-compatible server whose engine changes: one after the other, in its own process."""

from __future__ import annotations

import contextlib
import gc
import itertools
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any
from unittest import mock

BLOCK_SIZE = 128  # tokens, on a CPU


class WrongGroup:
    """Has this process import wrong blocks for one KV cache group.  ``kind``:

    neighbours  the transport copies neighbours of the right blocks, unverified
    position    blocks of other positions of the prompt, as right as their owner shows them
    group       blocks of the next group, as right as their owner shows them
    drafts      right blocks, of which the layers of a drafter are zeroed then (class Drafts)
    """

    def __init__(self) -> None:
        self.group: int | None = None
        self.kind = ""
        self._blocks: set[int] = set()
        self.imported: list[int] = []
        """The group's blocks that the last request has imported, behind no local hit."""

    def install(self) -> None:
        self._install_neighbours()
        from kvshm._engine.prefix_search import PrefixSearch

        longest = PrefixSearch.longest

        def elsewhere(search: Any, epoch: Any, hashes: Any, *more: int) -> Any:
            found = longest(search, epoch, hashes, *more)
            if self.group is None or self.kind in ("neighbours", "drafts"):
                return found
            return found._replace(runs=tuple(self._runs(search.groups.all, epoch, hashes, found)))

        PrefixSearch.longest = elsewhere  # type: ignore[method-assign]  # the fault

    def _runs(self, groups: Any, epoch: Any, hashes: Any, found: Any) -> Iterator[Any]:
        """The runs of what was found, but those of the group are of other blocks."""
        runs = iter(found.runs)
        for part in found.parts:
            left = part.num_blocks
            while left:
                run = next(runs)
                left -= run.num_blocks
                if part.group != self.group:
                    yield run
            if part.group == self.group:
                for index in range(part.first, part.first + part.num_blocks):
                    yield from self._other(groups, epoch, hashes, index)

    def _other(self, groups: Any, epoch: Any, hashes: Any, index: int) -> Any:
        """The run of the block that is imported in place of the group's block ``index``."""
        wanted = groups[self.group]
        other = groups[(wanted.number + (self.kind == "group")) % len(groups)]
        at = index * wanted.block_size // other.block_size
        for place in sorted(range(len(hashes) // other.scale), key=lambda i: abs(i - at)):
            if (other.number, place) != (wanted.number, index):
                runs = epoch.peers.lookup(
                    hashes, place, place + 1, group=other.number, scale=other.scale
                )
                if runs:
                    return runs
        raise AssertionError(f"nobody has another block for block {index} of group {self.group}")

    def _install_neighbours(self) -> None:
        from kvshm._shm.slot_table import SlotTableView
        from kvshm.hooks.connector import KvshmConnector
        from kvshm.transport.posix_shm import PosixAttachment

        allocated = KvshmConnector.update_state_after_alloc
        begin_copy = PosixAttachment.begin_copy
        checksum = SlotTableView.checksum

        def update_state_after_alloc(
            connector: Any, request: Any, blocks: Any, num_external_tokens: int
        ) -> None:
            ids = blocks.get_block_ids()
            own = [] if self.group is None else ids[self.group]
            self._blocks = set(own) if self.kind == "neighbours" else set()
            self.imported = own[: num_external_tokens // BLOCK_SIZE]
            allocated(connector, request, blocks, num_external_tokens)

        def misdirected(attachment: Any, source: Any, target: Any, *more: Any) -> Any:
            return begin_copy(attachment, self._misdirect(source, target), target, *more)

        def no_checksum(table: Any, rank: Any, block: Any) -> int:
            return 0 if self._blocks else checksum(table, rank, block)

        KvshmConnector.update_state_after_alloc = update_state_after_alloc
        PosixAttachment.begin_copy = misdirected
        SlotTableView.checksum = no_checksum

    def _misdirect(self, source: Sequence[int], target: Sequence[int]) -> list[int]:
        pairs = zip(source, target, strict=True)
        return [block ^ 1 if into in self._blocks else block for block, into in pairs]


class Drafts:
    """What the drafter of the present engine, if it has one, has drafted."""

    def __init__(self, wrong: WrongGroup) -> None:
        self._wrong, self._said = wrong, list[Any]()

    def install(self, runner: Any) -> set[str]:
        """Listen to an engine's drafter; returns the names of its layers."""
        if (drafter := getattr(runner, "drafter", None)) is None:
            return set()
        names = set(getattr(drafter, "_draft_attn_layer_names", ()))
        layers = runner.compilation_config.static_forward_context
        propose = drafter.propose

        def noted(*args: Any, **kwargs: Any) -> Any:
            if self._wrong.kind == "drafts":
                for name, block in itertools.product(names, self._wrong.imported):
                    layers[name].kv_cache[block].zero_()
            drafts = propose(*args, **kwargs)
            self._said.append(drafts if isinstance(drafts, list) else drafts.tolist())
            return drafts

        drafter.propose = noted
        return names

    def take(self) -> list[Any]:
        said, self._said = self._said, []
        return said


class Turns:
    """The present engine, if there is one."""

    def __init__(self) -> None:
        self.wrong = WrongGroup()
        self.drafts = Drafts(self.wrong)
        self._llm: Any = None
        self._ended = contextlib.ExitStack()

    def begin(self, arguments: dict[str, Any], environment: Mapping[str, str]) -> dict[str, Any]:
        """End the present engine and make another; returns how it keeps its KV cache."""
        from vllm import LLM, envs

        self.end()
        envs.disable_envs_cache()
        self._ended.enter_context(mock.patch.dict(os.environ, environment))
        common = {"dtype": "bfloat16", "enforce_eager": True, "max_model_len": 2048}
        self._llm = LLM(**common, disable_log_stats=False, **arguments)
        engine = self._llm.llm_engine
        core = engine.engine_core.engine_core
        cache = core.scheduler.kv_cache_config
        specs = [group.kv_cache_spec for group in cache.kv_cache_groups]
        layers = self.drafts.install(core.model_executor.driver_worker.worker.model_runner)
        return {
            "shares": engine.vllm_config.kv_transfer_config is not None,
            "groups": [(type(spec).__name__, spec.block_size) for spec in specs],
            "drafting": [bool(layers & {*g.layer_names}) for g in cache.kv_cache_groups],
        }

    def end(self) -> None:
        if self._llm is not None:
            self._llm.llm_engine.engine_core.shutdown()
            self._llm = None
            gc.collect()
        self._ended.close()

    def reset(self) -> None:
        assert self._llm.reset_prefix_cache()

    def load(self, adapter: Mapping[str, Any]) -> None:
        """As vLLM's own server loads one: before it is asked for."""
        assert self._llm.llm_engine.add_lora(adapter_of(adapter))

    def complete(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """One chunk of a stream of completions that holds all tokens."""
        from vllm import SamplingParams

        how = {name: body[name] for name in ("temperature", "seed", "ignore_eos", "max_tokens")}
        # As vLLM's own server passes them on.
        extra = {"kv_transfer_params": params} if (params := body.get("kv_transfer_params")) else {}
        asked = SamplingParams(logprobs=body["logprobs"], extra_args=extra, **how)
        adapter = adapter_of(body["adapter"]) if "adapter" in body else None
        (answered,) = self._llm.generate(
            [prompt_of(body)], asked, use_tqdm=False, lora_request=adapter
        )
        said = answered.outputs[0]
        tops = [{f"token_id:{t}": p.logprob for t, p in top.items()} for top in said.logprobs]
        choice = {"token_ids": list(said.token_ids), "text": said.text}
        return {
            "choices": [{**choice, "logprobs": {"top_logprobs": tops}}],
            "usage": {"prompt_tokens": len(answered.prompt_token_ids)},
        }


def adapter_of(said: Mapping[str, Any]) -> Any:
    from vllm.lora.request import LoRARequest

    return LoRARequest(**said)


def prompt_of(body: Mapping[str, Any]) -> dict[str, Any]:
    """``pictures`` and ``sounds``: seeds of those that take the places of placeholders; ``ids``:
    what the client calls the pictures."""
    prompt: dict[str, Any] = {"prompt_token_ids": body["prompt"]}
    if seeds := body.get("pictures"):
        prompt["multi_modal_data"] = {"image": list(map(picture, seeds))}
    if seeds := body.get("sounds"):
        prompt["multi_modal_data"] = {"audio": list(map(sound, seeds))}
    if ids := body.get("ids"):
        prompt["multi_modal_uuids"] = {"image": ids}
    return prompt


def picture(seed: int) -> Any:
    """Large squares of random colours."""
    import numpy as np
    from PIL import Image

    colours = np.random.default_rng(seed).integers(0, 255, (6, 6, 3), dtype=np.uint8)
    return Image.fromarray(colours).resize((336, 336), Image.Resampling.NEAREST)


def stop_in_the_next_load() -> None:
    """Before it copies, as KVSHM_TEST_SYNC_POINT would."""
    from kvshm._base import syncpoints

    syncpoints._visits = itertools.count(1)
    syncpoints._arm(syncpoints.parse_trigger("COPY_BEGINS:stop"))


def sound(seed: int) -> Any:
    """Ten tones, each of half a second, and how many numbers there are of a second."""
    import numpy as np

    rate = 16_000
    tones = np.random.default_rng(seed).uniform(100, 4000, 10)
    times = np.arange(rate // 2) / rate
    tone = [np.sin(2 * np.pi * each * times) for each in tones]
    return np.concatenate(tone).astype(np.float32), rate


def metrics() -> str:
    from prometheus_client import generate_latest

    return str(generate_latest().decode())


def handler(turns: Turns) -> type[BaseHTTPRequestHandler]:
    def wrong(group: int, kind: str = "") -> None:
        turns.wrong.group, turns.wrong.kind = group, kind

    commands: dict[str, Callable[..., Any]] = {
        "/begin": turns.begin,
        "/reset_prefix_cache": turns.reset,
        "/load": lambda **body: turns.load(body),
        "/wrong": wrong,
        "/stop": stop_in_the_next_load,
        "/drafts": lambda: {"drafts": turns.drafts.take()},
        "/end": turns.end,
    }

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._answer(metrics() if self.path == "/metrics" else "")

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])) or "{}")
            if self.path == "/v1/completions":
                self._answer(f"data: {json.dumps(turns.complete(body))}\n\n")
                return
            result = commands[self.path](**body)
            self._answer("" if result is None else json.dumps(result))

        def _answer(self, text: str) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(text.encode())

    return Handler


def main(port: str) -> None:
    import cpu_mamba  # beside this script
    import vllm  # noqa: F401 - takes 7 seconds; the first health check waits for it

    cpu_mamba.without_prefill_checkpoints()
    cpu_mamba.with_mamba_1()
    turns = Turns()
    turns.wrong.install()
    HTTPServer(("127.0.0.1", int(port)), handler(turns)).serve_forever()


if __name__ == "__main__":
    main(*sys.argv[1:])
