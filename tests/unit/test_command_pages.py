"""docs/commands/ is what docs/command_pages.py makes of the commands, and shells complete them."""

from __future__ import annotations

import subprocess
import sys

import command_pages
import pytest

from kvshm.tools import cli


def test_the_committed_pages_are_the_generated_ones() -> None:
    committed = {page.name: page.read_text("utf-8") for page in command_pages.FOLDER.glob("*")}
    assert committed == command_pages.pages(), "make docs"
    assert command_pages.DOCTOR.read_text("utf-8") == command_pages.doctor_page(), "make docs"


def test_every_command_says_what_it_does_what_each_option_means_and_how_it_ends() -> None:
    for name, page in command_pages.pages().items():
        assert "|  |" not in page, name
        assert name in ("README.md", "coordinator.md", "completion.md") or "**Exit status**" in page
    assert [*command_pages.pages()] == [f"{name}.md" for name in cli.COMMANDS] + ["README.md"]


def test_bash_completes_commands_and_options(subtests: pytest.Subtests) -> None:
    for words, completed in [
        (["st"], ["status"]),
        (["dump", "--lea"], ["--leased"]),
        (["kv", "com"], ["compare"]),
        (["doctor", "--bundle", "/etc/os-rel"], ["/etc/os-release"]),
        (["kv", "compare", "/etc/os-rel"], ["/etc/os-release"]),
        (["top", "--run-dir", "/et"], ["/etc"]),
    ]:
        with subtests.test(words=words, completed=completed):
            typed = " ".join(["kvshm", *words])
            script = (
                f'eval "$({sys.executable} -m kvshm.tools.cli completion bash)"\n'
                f"COMP_WORDS=({typed}); COMP_CWORD={len(words)}; COMP_LINE='{typed}'\n"
                "_shtab_kvshm\n"
                'echo "${COMPREPLY[@]}"\n'
            )
            done = subprocess.run(["bash", "-c", script], capture_output=True, text=True)
            assert (done.stdout.split(), done.stderr) == (completed, "")
