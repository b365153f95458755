"""The site in a browser, as a visitor without any network but the site's own sees it."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from playwright import sync_api

from kvshm.version import __version__

SITE = Path(__file__).parents[1] / "dist" / "site"
PAGES = ("index", "architecture", "api", "operations", "models", "performance", "console")
WIDTHS = (1280, 390)


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    serve = partial(Quiet, directory=str(SITE))
    with ThreadingHTTPServer(("127.0.0.1", 0), serve) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync_api.sync_playwright() as playwright:
        started = playwright.chromium.launch(
            executable_path=shutil.which("chromium"),
            args=["--no-sandbox", "--disable-dev-shm-usage"],
        )
        yield started
        started.close()


@pytest.fixture(params=WIDTHS)
def page(browser: Any, address: str, request: pytest.FixtureRequest) -> Iterator[Any]:
    """Yields a page; afterwards all it asked for came from the site, and nothing was missing."""
    opened = browser.new_page(viewport={"width": request.param, "height": 900})
    asked: list[str] = []
    missing: list[str] = []
    opened.on("request", lambda each: asked.append(each.url))
    opened.on("response", lambda each: missing.append(each.url) if each.status >= 400 else None)
    yield opened
    opened.close()
    assert [url for url in asked if not url.startswith((address, "data:", "blob:"))] == []
    assert missing == []
    assert asked


@pytest.mark.parametrize("name", PAGES)
def test_pages_fit_the_window(page: Any, address: str, name: str) -> None:
    page.goto(f"{address}/{__version__}/{name}.html")
    page.wait_for_load_state("networkidle")
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert page.inner_text("h1")


def test_visitors_are_led_to_this_version_and_can_choose_others(page: Any, address: str) -> None:
    page.goto(address)
    page.wait_for_url(f"**/{__version__}/index.html")
    sync_api.expect(page.locator(".md-version__current").first).to_contain_text(__version__)


def test_the_search_finds_pages(page: Any, address: str) -> None:
    page.goto(f"{address}/{__version__}/index.html")
    page.wait_for_load_state("networkidle")
    page.keyboard.press("s")
    page.keyboard.type("drain budget")
    first = page.locator(".md-search-result__link").first
    sync_api.expect(first).to_be_visible()
    assert "drain" in page.inner_text(".md-search-result").lower()
