"""``kvshm verify-logits``, against servers that are played."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from kvshm.tools import cli, verify_logits
from kvshm.tools.verify_logits import Answer, divergence

Logprobs = dict[str, Any]


def logprobs(*tokens: str, chosen: float = -0.5, other: float = -2.0) -> Logprobs:
    top = [{token: chosen, "token_id:9": other} for token in tokens]
    return {"tokens": tokens, "token_logprobs": [chosen] * len(tokens), "top_logprobs": top}


SAME = logprobs("token_id:1", "token_id:2")


@dataclass
class Played:
    """A server that answers in turn; each answer adds to what it has imported."""

    answers: list[Logprobs | None]
    imports: list[float] = field(default_factory=lambda: [0, 0])
    enabled: bool = True
    asked: list[dict[str, Any]] = field(default_factory=list)
    imported: float = 5.0
    text: str = ""

    def metrics(self) -> str:
        line = f'vllm:kvshm_imported_tokens_total{{engine="0"}} {self.imported}'
        return f"# HELP\n{line}\n" if self.enabled else "vllm:other 1.0\n"

    def complete(self, body: dict[str, Any]) -> dict[str, Any]:
        place = len(self.asked)
        self.asked.append(body)
        self.imported += self.imports[place]
        return {"choices": [{"text": "x", "logprobs": self.answers[place]}]}


@contextmanager
def served(played: Played) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._reply(played.metrics())

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            self._reply(played.text or json.dumps(played.complete(body)))

        def _reply(self, text: str) -> None:
            self.send_response(200 if self.path in ("/metrics", "/v1/completions") else 404)
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def verify(a: Played, b: Played, *options: str, prompt: tuple[str, str] = ("--prompt", "p")) -> int:
    with ExitStack() as stack:
        urls = [stack.enter_context(served(each)) for each in (a, b)]
        place = ["--a", urls[0], "--b", urls[1], "--model", "m", "--wait", "0", *prompt]
        return cli.main(["verify-logits", *place, *options])


def test_answers_that_agree(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "prompt").write_text("of the file")
    a = Played([logprobs("token_id:1", "token_id:2", chosen=-0.4), SAME])
    b = Played([SAME, SAME], imports=[128, 0])
    assert verify(a, b, prompt=("--prompt-file", str(tmp_path / "prompt"))) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "B imported 128 tokens"
    assert said[1].startswith("A computed / A local hit: equal tokens, log-probabilities differ by")
    assert "0.1 at most" in said[1]
    assert said[1].endswith("not judged)")
    assert said[-1] == "the import gives the answer of a local hit"
    asked = [*a.asked, *b.asked]
    assert {body["prompt"] for body in asked} == {"of the file"}
    assert len({body["cache_salt"] for body in asked}) == 1
    assert {(body["model"], body["temperature"], body["logprobs"]) for body in asked} == {
        ("m", 0, 5)
    }


def test_every_run_has_a_salt_of_its_own() -> None:
    salts = set()
    for _ in range(2):
        a = Played([SAME, SAME])
        verify(a, Played([SAME, SAME], imports=[1, 0]))
        salts.add(a.asked[0]["cache_salt"])
    assert len(salts) == 2


@pytest.mark.parametrize("place", ["a hit", "b imported", "b hit"])
def test_answers_that_differ(place: str, capsys: pytest.CaptureFixture[str]) -> None:
    other = logprobs("token_id:1", "token_id:3")
    hit = other if place == "a hit" else SAME
    of_b = [other if place == "b imported" else SAME, other if place == "b hit" else SAME]
    b = Played(of_b, imports=[64, 0])
    assert verify(Played([SAME, hit]), b, "--json") == 1
    reported = json.loads(capsys.readouterr().out)
    judged = [pair["first_differing_token"] for pair in reported["pairs"] if pair["judged"]]
    assert sorted(judged, key=str) == ([1, None] if place != "b imported" else [1, 1])


def test_a_difference_within_the_tolerance_is_none(capsys: pytest.CaptureFixture[str]) -> None:
    near = logprobs("token_id:1", "token_id:2", other=-2.25)
    for options, status in ((("--tolerance", "0.25"), 0), (("--tolerance", "0.2"), 1), ((), 1)):
        b = Played([near, near], imports=[64, 0])
        assert verify(Played([SAME, SAME]), b, *options) == status
    assert "differ by 0.25 at most" in capsys.readouterr().out


def test_no_import_is_reported(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verify_logits, "METRICS_SECONDS", 0.2)
    assert verify(Played([SAME, SAME]), Played([SAME, SAME])) == 3
    assert "nothing was imported" in capsys.readouterr().out


@pytest.mark.parametrize("wrong", ["no kvshm", "no logprobs", "odd logprobs", "no server"])
def test_a_server_that_cannot_be_asked_is_named(
    wrong: str, capsys: pytest.CaptureFixture[str]
) -> None:
    a, b = Played([SAME, SAME]), Played([SAME, SAME], enabled=wrong != "no kvshm")
    if wrong == "no logprobs":
        a.answers[0] = None
    if wrong == "odd logprobs":
        a.answers[0] = {**SAME, "token_logprobs": [1.0]}
    if wrong == "no server":
        place = ["--a", "http://127.0.0.1:1", "--b", "http://127.0.0.1:1"]
        assert cli.main(["verify-logits", *place, "--model", "m", "--prompt", "p"]) == 2
    else:
        assert verify(a, b) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"kvshm verify-logits: {'A' if 'logprobs' in wrong else 'B'}: ")


def answer(*tokens: str, **reported: float) -> Answer:
    found = logprobs(*tokens, **reported)
    return Answer(list(tokens), found["token_logprobs"], found["top_logprobs"])


def test_divergence_ends_with_the_first_token_that_differs() -> None:
    a = Answer(["x", "y", "z"], [-1, -1, -1], [{"x": -1}, {"y": -1, "w": -1.5}, {"z": -1}])
    b = Answer(["x", "w", "z"], [-1.125, -1, -9], [{"x": -1.125}, {"w": -1, "y": -1.25}, {"z": -9}])
    found = divergence(a, b)
    assert (found.first_token, found.max_logprob, found.unmatched) == (1, 0.5, 0)
    assert not found.within(9.0)


def test_a_shorter_answer_differs_where_it_ends() -> None:
    found = divergence(answer("x"), answer("x", "y"))
    assert (found.first_token, found.max_logprob) == (1, 0.0)


def test_candidates_that_only_one_side_has_are_counted_and_judged() -> None:
    a = Answer(["x"], [-1], [{"x": -1, "y": -2}])
    b = Answer(["x"], [-1], [{"x": -1, "z": -2.5}])
    for found in (divergence(a, b), divergence(b, a)):
        assert (found.unmatched, found.max_logprob) == (2, 0.5)
        assert found.within(0.5)
        assert not found.within(0.25)
    ties = divergence(a, Answer(["x"], [-1], [{"x": -1, "z": -2}]))
    assert (ties.unmatched, ties.max_logprob) == (2, 0.0)
    assert ties.within(0.1)
    assert not ties.within(0.0)


def test_nan_is_infinitely_far_and_equal_infinities_are_not() -> None:
    nan, inf = float("nan"), float("inf")
    for one, other in ((nan, nan), (-1.0, nan), (nan, -inf), (-1.0, -inf)):
        for place in ("chosen", "other"):
            a, b = answer("x", **{place: one}), answer("x", **{place: other})
            assert divergence(a, b).max_logprob == divergence(b, a).max_logprob == inf
    a = answer("x", other=-inf)
    assert divergence(a, a).max_logprob == 0.0
    alone = Answer(["x"], [-1], [{"x": -1, "y": nan}]), Answer(["x"], [-1], [{"x": -1}])
    assert divergence(*alone).max_logprob == divergence(*alone[::-1]).max_logprob == inf


def test_nan_answers_are_no_agreement(capsys: pytest.CaptureFixture[str]) -> None:
    nan = logprobs("token_id:1", chosen=float("nan"))
    for options in ((), ("--json",)):
        assert verify(Played([SAME, nan]), Played([nan, nan], imports=[64, 0]), *options) == 1
        said = capsys.readouterr().out
        assert ("NaN" in said, "Infinity" in said, "null" in said) == (False, False, bool(options))
    assert verify(Played([nan, nan]), Played([nan, nan], imports=[64, 0])) == 1
    assert "differ by inf at most" in capsys.readouterr().out


@pytest.mark.parametrize("imports", [[float("nan"), 0], [float("inf"), 0], [-3, 0], [64, -64]])
def test_an_odd_count_of_imports_is_refused(
    imports: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    assert verify(Played([SAME, SAME]), Played([SAME, SAME], imports=imports)) == 2
    assert capsys.readouterr().err.startswith("kvshm verify-logits: B: it")


@contextmanager
def sending(*pieces: bytes, pause: float = 0.0) -> Iterator[str]:
    with closing(socket.create_server(("127.0.0.1", 0))) as server:

        def run() -> None:
            with suppress(OSError), server.accept()[0] as peer:
                peer.recv(1 << 16)
                for piece in pieces:
                    peer.sendall(piece)
                    time.sleep(pause)

        thread = threading.Thread(target=run)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.getsockname()[1]}"
        finally:
            server.shutdown(socket.SHUT_RDWR)
            thread.join()


def asking(url: str, *options: str) -> int:
    """B is asked first."""
    place = ["--a", url, "--b", url, "--model", "m", "--prompt", "p", "--wait", "0"]
    return cli.main(["verify-logits", *place, *options])


HEAD = b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n"


@pytest.mark.parametrize(
    "pieces", [(b"garbage\r\n\r\n",), (HEAD, b"{}"), (b"",), (HEAD, b"\xff" * 1000)]
)
def test_an_answer_that_is_no_http_is_reported(
    pieces: tuple[bytes, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    with sending(*pieces) as url:
        assert asking(url) == 2
    assert capsys.readouterr().err.startswith("kvshm verify-logits: B: http://127.0.0.1:")


@pytest.mark.parametrize("before", [HEAD, b"HTTP/1.1 200 OK\r\nX: ", b""])
def test_the_timeout_is_for_the_whole_answer(
    before: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    begin = time.monotonic()
    with sending(before, *[b" "] * 30, pause=0.1) as url:
        assert asking(url, "--timeout", "0.3") == 2
        took = time.monotonic() - begin
    assert "no whole answer in 0.3 s" in capsys.readouterr().err
    assert took < 2


@pytest.mark.parametrize("url", ["abc", "http://[::1", "http://h:99999999", "file:///etc", ""])
def test_a_url_that_is_none_is_reported(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert asking(url) == 2
    assert capsys.readouterr().err.startswith("kvshm verify-logits: B: ")


@pytest.mark.parametrize("top", [[{"a": None}], [{"a": "x"}], [[["a", [1]]]], [{"a": 10**400}], 7])
def test_odd_candidates_are_reported(top: object, capsys: pytest.CaptureFixture[str]) -> None:
    odd = {"tokens": ["t"], "token_logprobs": [-1.0], "top_logprobs": top}
    assert verify(Played([odd, odd]), Played([odd, odd], imports=[64, 0])) == 2
    assert capsys.readouterr().err == (
        "kvshm verify-logits: A: an answer without log-probabilities\n"
    )


def test_a_deep_answer_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    deep = Played([SAME, SAME], text="[" * 200_000)
    assert verify(deep, Played([SAME, SAME])) == 2
    assert "A: an answer without log-probabilities" in capsys.readouterr().err


@pytest.mark.parametrize("wrong", ["--wait -1", "--wait nan", "--timeout 0", "--timeout inf"])
def test_a_number_that_means_nothing_is_refused(wrong: str) -> None:
    with pytest.raises(SystemExit) as reported:
        asking("http://127.0.0.1:1", *wrong.split())
    assert reported.value.code == 2
