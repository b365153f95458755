"""Who may ask the console of ``kvshm serve``."""

from __future__ import annotations

import base64
import os
from pathlib import Path

import pytest

from kvshm.errors import ConfigError
from kvshm.tools.serve.guard import OPEN_PATHS, Guard, host_name, read_name, read_token

TOKEN = "a-token-of-the-test"
HERE = {"host": "localhost:9403"}


@pytest.mark.parametrize(
    "host",
    [
        "localhost",
        "localhost:9403",
        "LOCALHOST.",
        "127.0.0.1:9403",
        "[::1]:9403",
        "10.1.2.3",
        "box",
    ],
)
def test_names_that_lead_nowhere_else_are_answered_to(host: str) -> None:
    assert Guard(frozenset({"box"})).refusal("/events", {"host": host}) is None


@pytest.mark.parametrize(
    "host",
    ["", "evil.example", "localhost.evil.example", "127.0.0.1.evil.example", "[::1].evil", "boxes"],
)
def test_other_names_are_refused_on_every_path(host: str) -> None:
    guard = Guard(frozenset({"box"}))
    for path in ("/", "/events", "/healthz", "/no-such"):
        refused = guard.refusal(path, {"host": host} if host else {})
        assert refused is not None
        assert refused.status == 421
        assert "--host" in refused.why


@pytest.mark.parametrize("site", ["cross-site", "same-site"])
def test_pages_of_others_may_link_to_the_console_and_nothing_else(site: str) -> None:
    asked = HERE | {"sec-fetch-site": site}
    assert Guard().refusal("/", asked) is None
    refused = Guard().refusal("/doctor", asked)
    assert refused is not None
    assert refused.status == 403
    assert Guard().refusal("/doctor", HERE | {"sec-fetch-site": "same-origin"}) is None


@pytest.mark.parametrize("origin", ["http://evil.example", "null", "http://localhost", "x"])
def test_what_another_page_sends_is_refused_without_hints_of_the_browser(origin: str) -> None:
    refused = Guard().refusal("/prefix", HERE | {"origin": origin})
    assert refused is not None
    assert refused.status == 403
    assert Guard().refusal("/prefix", HERE | {"origin": "http://localhost:9403"}) is None


@pytest.mark.parametrize(
    ("given", "name"),
    [("Proxy.example.", "proxy.example"), ("b\u00fccher.example", "xn--bcher-kva.example")],
)
def test_a_name_is_answered_to_as_browsers_send_it(given: str, name: str) -> None:
    assert read_name(given) == name


@pytest.mark.parametrize("given", ["", ".", "https://proxy", "proxy:443", "a b:c", "[::1", "a..b"])
def test_what_no_browser_sends_as_a_name_is_refused(given: str) -> None:
    with pytest.raises(ConfigError, match="--host="):
        read_name(given)


def basic(text: str) -> str:
    return f"Basic {base64.b64encode(text.encode()).decode()}"


@pytest.mark.parametrize("given", [f"Bearer {TOKEN}", f"bearer {TOKEN}", basic(f"anybody:{TOKEN}")])
def test_a_token_lets_in(given: str) -> None:
    assert Guard(token=TOKEN).refusal("/events", HERE | {"authorization": given}) is None


@pytest.mark.parametrize(
    "given",
    [
        "",
        TOKEN,
        "Bearer",
        "Bearer ",
        f"Bearer {TOKEN}x",
        f"Bearer {TOKEN[:-1]}",
        basic(TOKEN),
        basic(f"{TOKEN}:"),
        "Basic %%%",
        "Basic /////w==",
        f"Digest {TOKEN}",
        "Bearer \udcff\u00e9",
    ],
)
def test_nothing_else_does_but_for_probes(given: str) -> None:
    for path in ("/", "/events", "/metrics", "/console.js", "/no-such"):
        refused = Guard(token=TOKEN).refusal(path, HERE | {"authorization": given})
        assert refused is not None
        assert refused.status == 401
        assert TOKEN not in refused.why
    for path in OPEN_PATHS:
        assert Guard(token=TOKEN).refusal(path, HERE) is None


@pytest.mark.parametrize(
    ("host", "name"),
    [
        ("a:1", "a"),
        ("[::1]", "::1"),
        ("[::1]:80", "::1"),
        ("A.B.:80", "a.b"),
        (":80", ""),
        ("", ""),
    ],
)
def test_the_name_in_a_host_header(host: str, name: str) -> None:
    assert host_name(host) == name


def written(path: Path, text: str, mode: int = 0o600) -> Path:
    path.write_text(text)
    path.chmod(mode)
    return path


def test_a_token_is_read_from_a_file_of_ones_own(tmp_path: Path) -> None:
    assert read_token(written(tmp_path / "token", f"{TOKEN}\n")) == TOKEN


@pytest.mark.parametrize(
    ("text", "mode", "why"),
    [
        (TOKEN, 0o640, "chmod 600"),
        (TOKEN, 0o604, "chmod 600"),
        ("short", 0o600, "openssl rand"),
        ("", 0o600, "openssl rand"),
        ("two words are no token", 0o600, "openssl rand"),
        ("é" * 20, 0o600, "cannot be read"),
    ],
)
def test_a_bad_token_file_is_named_with_its_remedy(
    tmp_path: Path, text: str, mode: int, why: str
) -> None:
    path = written(tmp_path / "token", text, mode)
    with pytest.raises(ConfigError, match=why) as caught:
        read_token(path)
    assert f"--token-file={str(path)!r}" in str(caught.value)
    assert TOKEN not in str(caught.value)


def test_what_is_no_file_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(fifo := tmp_path / "fifo", 0o600)
    for path in (fifo, Path("/dev/zero"), tmp_path):
        with pytest.raises(ConfigError, match="--token-file="):
            read_token(path)


def test_no_token_file_is_an_error_too(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        read_token(tmp_path / "none")
