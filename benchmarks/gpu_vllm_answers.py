"""Runs that ask whether answers are right: after imports to the bit, and beside killed engines."""

from __future__ import annotations

import argparse
import contextlib
import random
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace

from completions import Result
from gpu_vllm_pair import TAIL_TOKENS, Pair, pair, result, rounds, tokens_of
from gpu_vllm_tally import FEWEST_ROUNDS, judged
from local_node import wait_until
from sharing_node import observe

from kvshm._shm.slot_table import SlotTableView
from kvshm._shm.statistics import LEASES_TAKEN

ATTEMPTS = 60
"""Prompts with which an import is tried to be caught under way."""
SWEEP_TIMEOUT_S = 60.0
REFERENCES = 4
CHECKED = {"KVSHM_VERIFY": "1"}


def equal(options: argparse.Namespace, *, graphs: bool) -> bool:
    """Whether answers after imports equal those after local hits in every bit, in turn with either
    engine as the exporter.  One request at a time: else batches change how results are rounded."""
    wrong: list[str] = []
    prompts = blocks = agreed = not_hit = 0
    with pair(options, CHECKED, graphs=graphs) as both:
        for number in rounds(options):
            drawn = random.Random(number)
            prompt = tokens_of(
                number, drawn.randint(3 * both.block_tokens, options.max_tokens - 64)
            )
            if number % 2 == 0:
                both = replace(both, exporter=both.importer, importer=both.exporter)
            computed = both.let_compute(prompt)
            with observe(both.node, both.importer) as seen:
                imported = both.importer.complete(prompt)
            hits = []
            for engine in (both.exporter, both.importer):
                answer, missed = both.let_hit(engine, prompt)
                hits.append(answer)
                if missed:
                    not_hit += 1
                    wrong.append(f"prompt {number}: {engine.spec.name} missed {missed} tokens")
            prompts += 1
            blocks += seen.imported_blocks
            agreed += computed.tokens == imported.tokens
            wrong += [f"prompt {number}: {fault}" for fault in faults_of(imported, hits)]
            if seen.tokens.imported != (expected := both.cached_tokens(prompt)):
                found = f"{seen.tokens.imported} of {expected} tokens"
                wrong.append(f"prompt {number}: {found} were imported")
            if seen.mismatched:
                wrong.append(f"prompt {number}: {seen.mismatched} blocks were copied wrongly")
    if prompts < FEWEST_ROUNDS:
        wrong.append(f"{prompts} prompts, and {FEWEST_ROUNDS} are needed: one in each direction")
    result(
        options, "equal-graphs" if graphs else "equal", prompts=prompts, imported_blocks=blocks,
        not_hit=not_hit, wrong=wrong, same_tokens_as_computed=agreed,
    )  # fmt: skip
    return judged(wrong)


def faults_of(imported: Result, hits: Sequence[Result]) -> Iterator[str]:
    """Yield in what an answer after an import differs from those after local hits."""
    for where, hit in zip(("exporter", "importer"), hits, strict=True):
        if imported != hit:
            share = imported.agreement(hit)
            yield f"differs from a hit of the {where}; {share:.0%} of the tokens agree"


def killed(options: argparse.Namespace) -> bool:
    """Whether either engine serves on with right answers when the other is killed mid-import."""
    found: dict[str, object] = {}
    # The pool is left last: a request ends when its engine has.
    with ThreadPoolExecutor(1) as pool, pair(options, CHECKED) as both:
        known = [tokens_of(number, options.max_tokens // 2) for number in range(1, 1 + REFERENCES)]
        for prompt in known:
            both.let_compute(prompt)
        hits = [both.let_hit(both.exporter, prompt) for prompt in known]
        answers = [answer for answer, _ in hits]
        missed = sum(missed for _, missed in hits)
        found["references_are_hits"] = {"right": not missed, "tokens_not_hit": missed}
        found["importer"] = importer_killed(options, both, pool)
        found["exporter_answers_as_before"] = answers == list(map(both.exporter.complete, known))
        (again,) = both.node.start_engines(both.importer.spec)
        both.node.wait_joined(both.exporter, again)
        both = replace(both, importer=again)
        found["its_successor_answers_alike"] = answers == list(map(again.complete, known))
        found["exporter"] = exporter_killed(options, both, pool)
        found["importer_answers_as_before"] = answers == list(map(again.complete, known))
    result(options, "killed", **found)
    return judged([f"{name}: {value}" for name, value in found.items() if not good(value)])


def good(value: object) -> bool:
    """Whether a finding and all findings in it are as they should be."""
    return bool(value.get("right")) if isinstance(value, dict) else value is True


@dataclass(frozen=True)
class Caught:
    """An import under way, whose engine is stopped."""

    attempt: int
    leases: int
    """On the exporter's blocks."""
    answers: Mapping[str, Result]
    """The exporter's to the same prompt, computed and hit."""
    not_hit: int
    """Tokens that the exporter's hit did not hit, of all attempts."""
    answer: Future[Result]
    """The importer's, to come."""
    counted: Mapping[str, int]
    """The importer's counters before."""


def importer_killed(
    options: argparse.Namespace, both: Pair, pool: ThreadPoolExecutor
) -> dict[str, object]:
    """Kill the importer while it holds leases; the coordinator gives them back."""
    try:
        found = caught(options, both, pool, first=100)
    except TimeoutError as exc:
        return {"right": False, "why": str(exc)}
    both.importer.kill()
    begun = time.monotonic()
    with contextlib.suppress(TimeoutError):
        for _ in wait_until("the leases of the dead engine are swept", SWEEP_TIMEOUT_S):
            if not both.node.leased(both.exporter):
                break
    left = len(both.node.leased(both.exporter))
    died = found.answer.exception() is not None
    return {
        "right": died and not left and not found.not_hit, "attempts": found.attempt,
        "tokens_not_hit": found.not_hit, "leases_at_its_death": found.leases,
        "swept_after_s": round(time.monotonic() - begun, 2), "left": left,
    }  # fmt: skip


def exporter_killed(
    options: argparse.Namespace, both: Pair, pool: ThreadPoolExecutor
) -> dict[str, object]:
    """Kill the exporter while the importer reads its blocks: the answer is that of an import or
    that of the computed prompt."""
    try:
        found = caught(options, both, pool, first=1000)
    except TimeoutError as exc:
        return {"right": False, "why": str(exc)}
    both.exporter.kill()
    both.importer.signal(signal.SIGCONT)
    answer = found.answer.result()
    after = both.node.counted(both.importer)
    shares = {name: answer.agreement(other) for name, other in found.answers.items()}
    names = ("loads_done", "loads_failed", "recheck_failed", "discarded", "mismatched")
    return {
        "right": 1.0 in shares.values() and after["mismatched"] == 0 and not found.not_hit,
        "attempts": found.attempt, "tokens_not_hit": found.not_hit,
        "leases_at_its_death": found.leases,
        "equal_in_every_bit_to": [n for n, other in found.answers.items() if answer == other],
        "tokens_agree": shares, **{name: after[name] - found.counted[name] for name in names},
    }  # fmt: skip


def caught(options: argparse.Namespace, both: Pair, pool: ThreadPoolExecutor, first: int) -> Caught:
    """Stop the importer with SIGSTOP while it holds leases on the exporter's blocks.  TimeoutError
    if no attempt catches it so."""
    not_hit = 0
    for attempt in range(1, ATTEMPTS + 1):
        prompt = tokens_of(first + attempt, options.max_tokens - TAIL_TOKENS - 16)
        computed = both.let_compute(prompt)
        hit, missed = both.let_hit(both.exporter, prompt)
        answers = {"computed": computed, "hit": hit}
        not_hit += missed
        counted = both.node.counted(both.importer)
        # Opened before: a stopped engine hands nothing out.
        with (
            contextlib.closing(both.node.table(both.importer)) as own,
            contextlib.closing(both.node.table(both.exporter)) as other,
        ):
            answer = pool.submit(both.importer.complete, prompt)
            if until_leased(own, counted[LEASES_TAKEN.label], answer):
                both.importer.signal(signal.SIGSTOP)
                if leases := sum(bool(slot.leases) for slot in other.slots()):
                    return Caught(attempt, leases, answers, not_hit, answer, counted)
                both.importer.signal(signal.SIGCONT)
        answer.result()
    raise TimeoutError(f"none of {ATTEMPTS} imports could be caught under way")


def until_leased(table: SlotTableView, before: int, answer: Future[Result]) -> bool:
    """Wait until the engine has taken leases; False if it has answered without."""
    while table.counters.read(LEASES_TAKEN) == before:
        if answer.done():
            return False
        time.sleep(0.0001)  # a lease lasts for milliseconds at least
    return True
