"""Makes the pictures of docs/console.md: the console beside two engines that share, in a real
browser: all of it, in a dark window, and on a telephone.

    PYTHONPATH=examples .venv/bin/python docs/console_picture.py

Takes three minutes; needs chromium, two cores and 6 GB.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from local_node import Engine, EngineSpec, Node
from playwright import sync_api
from tiny_model import write_model

PICTURES = Path(__file__).resolve().with_name("pictures")
WAYS: dict[str, dict[str, Any]] = {
    "console": {"viewport": {"width": 1280, "height": 800}},
    "console-dark": {"viewport": {"width": 1280, "height": 760}, "color_scheme": "dark"},
    "console-narrow": {"viewport": {"width": 390, "height": 844}},
}
"""The first is of the whole page, the others of what a window shows."""
SECONDS = 100
PROMPT_TOKENS = 1500


@contextmanager
def console(node: Node) -> Iterator[str]:
    """Yield where the console of a node answers."""
    where = ("--run-dir", str(node.run_dir), "--namespace", node.namespace)
    command = (sys.executable, "-P", "-m", "kvshm.tools.cli", "serve", "--listen", "0", *where)
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        yield process.stderr.readline().split()[-1]
        process.terminate()


def send(a: Engine, b: Engine, number: int) -> None:
    """A prompt that ``a`` computes, ``b`` imports, and ``a`` has."""
    prompt = [10 + (number * 7 + token) % 900 for token in range(PROMPT_TOKENS)]
    for engine in (a, b, a):
        engine.complete(prompt, max_tokens=4)
        time.sleep(0.2)  # the other engine hears of the prefix meanwhile


def main() -> None:
    browser = shutil.which("chromium")
    with Node() as node, sync_api.sync_playwright() as playwright:
        node.start_coordinator()
        os.chdir(node.run_dir)  # the page shows how a model is named: by a path, from here
        model = write_model(Path("tiny-llama"))
        one, other = node.start_engines(EngineSpec("a", model, 0), EngineSpec("b", model, 1))
        with console(node) as url:
            started = playwright.chromium.launch(
                executable_path=browser, args=["--no-sandbox", "--disable-dev-shm-usage"]
            )
            pages = {name: started.new_page(**way) for name, way in WAYS.items()}
            for page in pages.values():
                page.goto(url)
            end, number = time.monotonic() + SECONDS, 0
            while time.monotonic() < end:
                one, other = other, one
                send(one, other, number)
                number += 1
            for name, page in pages.items():
                page.screenshot(path=PICTURES / f"{name}.png", full_page=name == "console")
            started.close()


if __name__ == "__main__":
    main()
