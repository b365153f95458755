"""``kvshm verify-logits`` says of two real engines what the oracle says of them."""

from __future__ import annotations

import pytest

from .conftest import Pair
from .oracle import random_prompt

pytestmark = [pytest.mark.vllm, pytest.mark.long, pytest.mark.timeout(900)]


def test_an_import_gives_the_answer_of_a_local_hit(pair: Pair) -> None:
    node, a, b = pair
    urls = [f"http://127.0.0.1:{engine.port}" for engine in (a, b)]
    text = " ".join(f"w{number % 97}" for number in random_prompt(900, 600))
    asked = ["--a", urls[0], "--b", urls[1], "--model", str(a.spec.model), "--prompt", text]
    done = node.kvshm("verify-logits", *asked)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "the import gives the answer of a local hit" in done.stdout
