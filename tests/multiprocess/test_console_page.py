"""The page of ``kvshm serve`` in a real browser (Debian's chromium, driven by Playwright), beside
real engines."""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest

from kvshm import LoadState
from kvshm.tools.serve.feed import INTERVAL_SECONDS

from . import toys as toy_engines
from .consoles import Console
from .joined import TOKENS, Toys, ended, served
from .processes import PATIENCE_SECONDS, Managed, Node, fresh_node, wait_until

BROWSER = shutil.which("chromium")
NOT_CHECKED = "KVSHM SERVE'S PAGE NOT CHECKED"
pytestmark = [
    pytest.mark.multiprocess,
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        BROWSER is None and not os.environ.get("CI"), reason=f"{NOT_CHECKED}: no chromium"
    ),
]
sync_api = pytest.importorskip("playwright.sync_api", reason=f"{NOT_CHECKED}: no playwright")
WIDE, NARROW = {"width": 1280, "height": 900}, {"width": 390, "height": 844}
CONTRASTS = Path(__file__).with_name("contrasts.js").read_text()
PATIENCE_MS = 1000 * PATIENCE_SECONDS
MANY = 28
LEFT_OPEN_MINUTES = 30
MOST_GROWN = {"JSHeapUsedSize": 500_000, "Nodes": 40, "JSEventListeners": 0, "rss": 4_000_000}
"""From the fifth minute on.  By then 750 more frames of 80 kB have come, or 60 MB: a page that kept
one in fifty would grow by more, or a console that kept one in ten.  Less is what allocators
keep: of Python's objects the console has no more then, and the page's heap stays as it is after
5,000 frames that are played."""


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync_api.sync_playwright() as playwright:
        started = playwright.chromium.launch(
            executable_path=BROWSER, args=["--no-sandbox", "--disable-dev-shm-usage"]
        )
        yield started
        started.close()


class Page:
    """A page that is open, and what it has asked for and complained of."""

    def __init__(self, page: Any, console: Console) -> None:
        self.page, self.console = page, console
        self.asked: list[str] = []
        self.complaints: list[str] = []
        page.set_default_timeout(PATIENCE_MS)
        page.on("request", lambda request: self.asked.append(request.url))
        page.on("console", self._heard)
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.goto(console.url)
        self.wait("connection", "live")

    def _heard(self, message: Any) -> None:
        if message.type in ("error", "warning"):
            self.complaints.append(f"{message.text} {message.location}")

    def text(self, name: str) -> str:
        return str(self.page.inner_text(f"#{name}"))

    def wait(self, name: str, text: str) -> None:
        sync_api.expect(self.page.locator(f"#{name}")).to_contain_text(text, timeout=PATIENCE_MS)

    def rows(self, name: str) -> list[list[str]]:
        script = "rows => rows.map(row => [...row.cells].map(cell => cell.textContent))"
        return list(self.page.eval_on_selector_all(f"#{name} tbody tr", script))

    def run(self, script: str) -> Any:
        return self.page.evaluate(script)


Opens = Callable[..., Page]


@pytest.fixture
def opens(browser: Any) -> Iterator[Opens]:
    contexts = []

    def open_page(console: Console, **options: Any) -> Page:
        contexts.append(browser.new_context(viewport=options.pop("viewport", WIDE), **options))
        return Page(contexts[-1].new_page(), console)

    yield open_page
    for context in contexts:
        context.close()


@pytest.fixture
def place() -> Iterator[Node]:
    with served() as node:
        yield node


def test_it_shows_who_copies_from_whom_and_asks_nobody_else(
    place: Node, toys: Toys, opens: Opens
) -> None:
    _, b, _, found = toys.prefix()
    console = Console(place)
    shown = opens(console)
    assert ended(b.node.load(found, range(6))).state is LoadState.DONE
    sync_api.expect(shown.page.locator("#graph path.edge title")).to_contain_text(
        "b from a", timeout=PATIENCE_MS
    )
    assert shown.rows("copies")[0][:3] == ["b", "a", "shm"]
    engines = {row[0]: row for row in shown.rows("engines")}
    assert engines["a"][2] == "6"
    assert shown.text("state") == "healthy"
    assert shown.page.title() == "kvshm: healthy"
    assert shown.text("faults") == "nothing"
    assert {url.partition("//")[2].partition("/")[0] for url in shown.asked} == {
        console.url.split("/")[2]
    }
    assert shown.complaints == []


def ask(shown: Page, hashes: str, answer: str) -> None:
    """Type hashes into the form, and wait for its answer to these."""
    shown.run("document.getElementById('prefix-answer').replaceChildren()")
    shown.page.fill("#prefix-hashes", hashes)
    shown.page.press("#prefix-hashes", "Tab")
    shown.page.keyboard.press("Enter")
    shown.wait("prefix-answer", answer)


def test_a_prefix_is_asked_for_by_its_hashes(place: Node, toys: Toys, opens: Opens) -> None:
    a, _ = toys.pair()
    keys = a.prompt()
    a.compute(keys, range(6))
    shown = opens(Console(place))
    shown.wait("prefix-model", f"m, blocks of {TOKENS} tokens")
    shown.page.fill("#prefix-hashes", ",\n".join(f'"{key.hex()}"' for key in keys))
    shown.page.click("#prefix button")
    shown.wait("prefix-answer", f"a: {6 * TOKENS} tokens in its own cache")
    ends = [int.from_bytes(key[-8:], "big") for key in keys[:2]]  # as vLLM's KV events have them
    ask(shown, str(ends), f"a: {2 * TOKENS} tokens in its own cache")
    ask(shown, f"0x{keys[0][-8:].hex()}", f"a: {TOKENS} tokens in its own cache")
    ask(shown, "zz", "is no hash")


ENDS = [1234567890123456, 7, 2**64 - 1]


def test_a_hash_that_may_be_two_things_is_refused(place: Node, toys: Toys, opens: Opens) -> None:
    """16 digits: kvshm dump prints as many of the beginning, and a number in KV events, which is
    a hash's end, may have as many."""
    a = toys.join("a")
    keys = [bytes([place]) * 24 + end.to_bytes(8, "big") for place, end in enumerate(ENDS)]
    assert a.compute(keys, range(3)) == 3
    shown = opens(Console(place))
    shown.wait("prefix-model", "m, blocks of")
    both = str(ENDS[0])
    for hashes in (both, f"{both} {both}", f"{keys[0].hex()} {keys[1].hex()[:15]}e"):
        ask(shown, hashes, "16 digits may be the beginning of a hash")
    ask(shown, f"0{both}", f"a: {TOKENS} tokens in its own cache")
    ask(shown, str(ENDS), f"a: {3 * TOKENS} tokens in its own cache")


def test_names_of_engines_are_text_and_nothing_else(place: Node, toys: Toys, opens: Opens) -> None:
    toys.join("<img src=x onerror=document.title=1>")
    shown = opens(Console(place))
    shown.wait("engines", "<img src=x onerror=document.title=1>")
    assert shown.run("document.querySelectorAll('main img').length") == 0
    assert shown.complaints == []


def test_it_sees_deaths_and_comes_back_after_the_consoles_own(place: Node, opens: Opens) -> None:
    engine, other = (toy_engines.start(place, seed) for seed in (1, 2))
    toy_engines.result(engine)
    toy_engines.result(other)
    first = Console(place, "--listen", "0")
    shown = opens(first)
    engine.kill()
    shown.wait("faults", "its process has ended")
    assert shown.page.title() != "kvshm: healthy"
    first.process.signal(signal.SIGSTOP)
    shown.wait("connection", "nothing heard")
    assert shown.page.title() == "kvshm: unknown"
    first.process.signal(signal.SIGCONT)
    shown.wait("connection", "live")
    first.process.kill()
    shown.wait("connection", "trying again")
    assert shown.text("state") == "unknown"
    Console(place, "--listen", str(first.port))
    shown.wait("connection", "live")


def test_a_coordinator_that_ends_and_another_one_are_seen(opens: Opens) -> None:
    with fresh_node() as node:
        coordinator = node.coordinator()
        engine = Toys(node, "served").join("a")
        shown = opens(Console(node))
        shown.wait("state", "healthy")
        coordinator.kill()
        shown.wait("faults", "no coordinator runs")
        node.coordinator()
        shown.wait("state", "healthy")
        shown.wait("faults", "nothing")
        engine.close()


@contextmanager
def crowd(node: Node) -> Iterator[list[Managed]]:
    """Engines, of which some import from others."""
    options = ("--requests", "3", "--peers", "3", "--model", "meta-llama/Llama-3.1-8B-Instruct")
    engines = [toy_engines.start(node, seed, *options) for seed in range(MANY)]
    for engine in engines:
        toy_engines.result(engine)
    yield engines


NODES = "document.getElementsByTagName('*').length"


def test_many_engines_fit_any_width_and_the_page_does_not_grow(opens: Opens) -> None:
    """A page that is left open is one that is sent frame after frame: as many as of 30 minutes."""
    with fresh_node() as node:
        node.coordinator()
        with crowd(node) as engines:
            console = Console(node)
            for viewport in (WIDE, NARROW):
                for scheme in ("light", "dark"):
                    shown = opens(console, viewport=viewport, color_scheme=scheme)
                    wait_until(lambda p=shown: len(p.rows("engines")) == MANY, "all are shown")
                    wait_until(lambda p=shown: p.text("doctor-text") != "looking", "it is checked")
                    assert shown.run("document.documentElement.scrollWidth <= innerWidth")
                    assert shown.run(CONTRASTS) == []
                    assert shown.complaints == []
            toy_engines.all_more(engines[:2])
            shown.run("stream.close(), stream = null")  # from here on only what is played
            twice = "view.faults.push(...Array(4).fill({kind: 'log', engines: [], text: 'same'}))"
            shown.run(f"{twice}, show()")
            before = shown.run(NODES)
            shown.run("for (let i = 0; i < 1800; i += 1) { view.time += 1; show(); }")
            hours = (
                "for (let i = 1; i <= 400; i += 1) { points = [...points, {time: 30 * i, seconds: "
                "30, local: 1, peer: 1, computed: 1, copied_bytes: 0, discarded: 0}]"
                ".slice(-MOST_POINTS); showHour(); }"
            )
            shown.run(hours)
            grown = shown.run(NODES)
            shown.run(hours)
            assert shown.run(NODES) == grown <= before + 120 * (3 + 7) + 4


@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_a_page_left_open_for_half_an_hour_does_not_grow(opens: Opens) -> None:
    """In real time what ``test_many_engines_fit_any_width_and_the_page_does_not_grow`` plays."""
    with fresh_node() as node:
        node.coordinator()
        with crowd(node) as engines:
            shown = opens(Console(node))
            wait_until(lambda: len(shown.rows("engines")) == MANY, "all are shown")
            full = "{local: 1, peer: 1, computed: 1, copied_bytes: 0, discarded: 0, seconds: 30, "
            hour = f"points = [...Array(MOST_POINTS).keys()].map(i => ({full} time: 30 * i}}))"
            shown.run(f"{hour}; showHour()")  # it grows for an hour, else
            shown.run("heard = 0; stream.addEventListener('top', () => { heard += 1; })")
            found = []
            for _ in range(LEFT_OPEN_MINUTES // 5):
                work_on(engines, 5 * 60, shown)
                found.append(sizes_of(shown))
            print(*found, sep="\n")
            assert shown.run("heard") > LEFT_OPEN_MINUTES * 60 / INTERVAL_SECONDS / 2
            for name, most in MOST_GROWN.items():
                assert found[-1][name] <= found[0][name] + most, (name, found)
            assert shown.complaints == []


def work_on(engines: list[Managed], seconds: float, shown: Page) -> None:
    """Have two engines at a time publish and look up, for so long."""
    end = time.monotonic() + seconds
    for first in cycle(range(0, len(engines), 2)):
        results = toy_engines.all_more(engines[first : first + 2])
        assert not any(result["wrong"] for result in results)
        shown.page.wait_for_timeout(1000)  # a page's rate of work, and time is what is tried here
        if time.monotonic() > end:
            return


def sizes_of(shown: Page) -> dict[str, int]:
    """What the page and the console hold: the least of three looks."""
    found = []
    for _ in range(3):
        found.append(sizes_now(shown))
        shown.page.wait_for_timeout(700)
    return {name: min(each[name] for each in found) for name in MOST_GROWN}


def sizes_now(shown: Page) -> dict[str, int]:
    """When the page's garbage is collected."""
    session = shown.page.context.new_cdp_session(shown.page)
    session.send("Performance.enable")
    session.send("HeapProfiler.collectGarbage")
    found = session.send("Performance.getMetrics")["metrics"]
    session.detach()
    of_page = {each["name"]: int(each["value"]) for each in found}
    status = Path(f"/proc/{shown.console.process.pid}/status").read_text()
    rss = 1024 * int(status.partition("VmRSS:")[2].split()[0])
    return {**of_page, "rss": rss}


def test_all_of_it_is_reached_by_keyboard_and_named_for_a_reader(
    place: Node, toys: Toys, opens: Opens
) -> None:
    toys.pair()
    shown = opens(Console(place))
    shown.wait("prefix-model", "m, blocks")
    reached = []
    for _ in range(20):
        shown.page.keyboard.press("Tab")
        name = "(e => e.id || e.className || e.tagName + e.textContent)(document.activeElement)"
        reached.append(shown.run(name))
    assert reached[0] == "skip"
    assert {"prefix-model", "prefix-hashes", "doctor-run"} <= set(reached)
    assert any("As a table" in each for each in reached)
    nameless = shown.run(
        "[...document.querySelectorAll('section, svg[role=img], [role=region], button, select, "
        "textarea')].filter(e => !(e.ariaLabel || e.getAttribute('aria-labelledby') || "
        "e.textContent.trim() || e.labels?.length)).map(e => e.outerHTML)"
    )
    assert nameless == []
    for named in shown.run(
        "[...document.querySelectorAll('[aria-labelledby]')].flatMap(e => "
        "e.getAttribute('aria-labelledby').split(' '))"
    ):
        assert shown.run(f"document.getElementById({named!r}) !== null"), named


def test_a_page_that_is_not_seen_asks_for_nothing(place: Node, opens: Opens) -> None:
    console = Console(place)
    shown = opens(console)
    hide = "Object.defineProperty(document, 'hidden', {value: %s, configurable: true}); "
    shown.run(hide % "true" + "document.dispatchEvent(new Event('visibilitychange'))")
    shown.wait("connection", "resting")
    wait_until(lambda: console_pages(console) == 0, "the stream is closed")
    shown.run(hide % "false" + "document.dispatchEvent(new Event('visibilitychange'))")
    shown.wait("connection", "live")


def console_pages(console: Console) -> int:
    """How many connections the console has: each has one answer, and only a page's goes on."""
    inodes = {os.readlink(f"/proc/{console.process.pid}/fd/{fd}") for fd in fds(console)}
    lines = Path("/proc/net/tcp").read_text().splitlines()[1:]
    established = {f"socket:[{line.split()[9]}]" for line in lines if line.split()[3] == "01"}
    return len(inodes & established)


def fds(console: Console) -> list[str]:
    return os.listdir(f"/proc/{console.process.pid}/fd")
