"""The table of docs/models.md: what docs/models.jsonl says of each architecture, and which test has
shown that its kinds of groups are shared.  docs/model_plans.py writes the plans."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

PLANS = Path(__file__).with_name("models.jsonl")
NO_CONFIGURATION = "no configuration class is installed"
NOT_BUILT = "the default configuration lacks something, or the machine does"
VERSIONS = ("0.32", "0.33")
FAMILIES = "tests/vllm/test_families.py::test_imports_equal_local_hits_bit_for_bit"
LATENTS = (
    "schedulers and workers",
    "tests/vllm/test_latents.py::test_a_block_of_another_process_is_the_same_in_every_layer",
)
CONTENTS = "tests/vllm/test_contents.py::test_what_others_may_read_is_what_it_says_in_each_group"
STATES = ("schedulers", f"{CONTENTS}[full and states-False-0]")
CHECKPOINTS = ("schedulers", f"{CONTENTS}[states with checkpoints-False-0]")
ENGINES = {
    "LlamaForCausalLM": f"{FAMILIES}[llama]",
    "Gemma3ForCausalLM": f"{FAMILIES}[gemma3]",
    "GptOssForCausalLM": f"{FAMILIES}[gpt-oss]",
    "Llama4ForCausalLM": f"{FAMILIES}[llama4]",
    "MistralForCausalLM": f"{FAMILIES}[mistral]",
    "Gemma4ForCausalLM": f"{FAMILIES}[gemma4]",
    "Qwen3NextForCausalLM": f"{FAMILIES}[qwen3-next]",
    "Lfm2ForCausalLM": f"{FAMILIES}[lfm2]",
    "NemotronHForCausalLM": f"{FAMILIES}[nemotron-h]",
    "FalconH1ForCausalLM": f"{FAMILIES}[falcon-h1]",
    "JambaForCausalLM": f"{FAMILIES}[jamba]",
}
"""Architectures of which two real engines have shared, with the test."""
SHOWN = {
    frozenset({"full attention"}): ("engines", f"{FAMILIES}[llama]"),
    frozenset({"full attention", "window"}): ("engines", f"{FAMILIES}[gemma3]"),
    frozenset({"full attention", "chunks"}): ("engines", f"{FAMILIES}[llama4]"),
    frozenset({"window"}): ("engines", f"{FAMILIES}[mistral]"),
    frozenset({"latents"}): LATENTS,
    frozenset({"latents", "keys of an indexer"}): LATENTS,
    frozenset({"latents", "window latents"}): LATENTS,
    frozenset({"state (gdn_attn)", "full attention"}): ("engines", f"{FAMILIES}[qwen3-next]"),
    frozenset({"state (short_conv)", "full attention"}): ("engines", f"{FAMILIES}[lfm2]"),
    frozenset({"state (mamba1)", "full attention"}): STATES,
    frozenset({"state (mamba1)"}): STATES,
    frozenset({"state (mamba2)", "full attention"}): ("engines", f"{FAMILIES}[nemotron-h]"),
    frozenset({"state (mamba2)"}): CHECKPOINTS,
    frozenset({"state (gdn_attn)", "latents"}): CHECKPOINTS,
    frozenset({"state (linear)", "latents"}): STATES,
}
"""Kinds of groups that were shared together, by real engines or else at the level that is named."""
HEAD = ("groups", "architectures", "vLLM reuses prefixes", "shared?", "shown by")


@dataclass(frozen=True)
class Plan:
    """How a vLLM keeps the KV of one architecture, and what kvshm says to it."""

    architecture: str
    groups: tuple[str, ...] = ()
    """Kinds of cache with the tokens in a block; of equal ones the number."""
    reuses: str = ""
    """When vLLM itself reuses prefixes: "always" if not told otherwise, "if asked", or "never"."""
    refusal: str | None = None
    """Why kvshm does not share, where vLLM reuses prefixes if there is a way to have it do so."""
    unplanned: str | None = None
    """Why there is no plan."""


Plans = dict[str, dict[str, Plan]]
"""By vLLM's minor version, by architecture."""


def read() -> Plans:
    """Return what docs/models.jsonl says."""
    plans: Plans = defaultdict(dict)
    for line in PLANS.read_text("utf-8").splitlines():
        row = json.loads(line)
        for version in row.pop("vllm"):
            plans[version][row["architecture"]] = Plan(**{**row, "groups": tuple(row["groups"])})
    return plans


def write(plans: Plans) -> None:
    """Write docs/models.jsonl: equal plans of several versions are one line."""
    versions: dict[Plan, list[str]] = defaultdict(list)
    for version in sorted(plans):
        for plan in plans[version].values():
            versions[plan].append(version)
    rows = sorted(versions.items(), key=lambda row: (row[0].architecture.lower(), row[1]))
    lines = (json.dumps({"vllm": having, **asdict(plan)}) + "\n" for plan, having in rows)
    PLANS.write_text("".join(lines), "utf-8")


def table(plans: Plans) -> list[tuple[str, ...]]:
    """Return the rows of the page: architectures whose plans and proof are equal stand in one."""
    names: dict[tuple[str, ...], list[str]] = defaultdict(list)
    for plan, having in _by_plan(plans).items():
        if plan.unplanned is None:
            cells = ("<br>".join(plan.groups), plan.reuses, _decision(plan), proof(plan))
            only = "" if having == plans.keys() else f" ({', '.join(sorted(having))})"
            names[cells].append(plan.architecture.removesuffix("ForCausalLM") + only)
    rows = sorted(names.items(), key=lambda row: (-len(row[1]), row[0]))
    return [(cells[0], ", ".join(sorted(of, key=str.lower)), *cells[1:]) for cells, of in rows]


def left_out(plans: Plans) -> str:
    """Return the sentences on architectures without a plan."""
    why: dict[str, set[str]] = defaultdict(set)
    for plan, having in _by_plan(plans).items():
        if plan.unplanned is not None and having == plans.keys():
            why[plan.unplanned].add(plan.architecture.removesuffix("ForCausalLM"))
    return "".join(
        f"- {reason} ({len(names)}): {', '.join(sorted(names, key=str.lower))}\n"
        for reason, names in sorted(why.items())
    )


def proof(plan: Plan) -> str:
    """Return the level at which sharing was shown, and the test; empty for what is not shared."""
    if plan.refusal is not None:
        return ""
    if plan.architecture in ENGINES:
        return f"engines of this model: `{ENGINES[plan.architecture]}`"
    level, test = SHOWN.get(frozenset().union(*map(kinds, plan.groups)), ("nothing", ""))
    return f"{level} with these kinds of groups: `{test}`"


def kinds(group: str) -> set[str]:
    """Return the kinds of cache in a group, without their numbers."""
    whole = re.sub(r"^\d+ x |,? (of )?\d+( tokens( each)?)?", "", group)
    return set(whole.split(" and "))


def _decision(plan: Plan) -> str:
    return "yes" if plan.refusal is None else f"no: {plan.refusal}"


def _by_plan(plans: Plans) -> dict[Plan, set[str]]:
    having: dict[Plan, set[str]] = defaultdict(set)
    for version, of in plans.items():
        for plan in of.values():
            having[plan].add(version)
    return having


def differences(ours: Iterable[Plan], written: Iterable[Plan]) -> list[str]:
    """Return one line for each architecture that is planned otherwise than was written."""
    before = {plan.architecture: plan for plan in written}
    return [
        f"{plan.architecture}: {plan}, but docs/models.jsonl has {before.get(plan.architecture)}"
        for plan in ours
        if before.get(plan.architecture) != plan
    ]
