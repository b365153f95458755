"""docs/commands.md is what docs/command_pages.py makes of the commands; shells complete them."""

from __future__ import annotations

import re
import subprocess
import sys

import command_pages
import pytest

from kvshm.tools import cli


def test_the_committed_page_is_the_generated_one() -> None:
    assert command_pages.PAGE.read_text("utf-8") == command_pages.page(), "make docs"


def test_every_command_says_what_it_does_what_each_option_means_and_how_it_ends() -> None:
    _, *parts = re.split(r"^## ", command_pages.page(), flags=re.MULTILINE)
    by_name = {part.partition("\n")[0].removeprefix("kvshm "): part for part in parts}
    assert [*by_name] == [*cli.COMMANDS]
    for name, part in by_name.items():
        assert "|  |" not in part, name
        assert name in ("coordinator", "completion") or "**Exit status**" in part


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
