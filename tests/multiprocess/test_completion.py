"""What shells offer for the command ``kvshm``, asked of the shells themselves."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kvshm.tools.cli import COMMANDS

pytest.importorskip("shtab")
pytestmark = pytest.mark.multiprocess

KVSHM = (sys.executable, "-P", "-m", "kvshm.tools.cli")
ASK_BASH = """
source "$1"; shift
COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1))
_shtab_kvshm kvshm "${COMP_WORDS[COMP_CWORD]}" "${COMP_WORDS[COMP_CWORD - 1]}"
printf '%s\\n' "${COMPREPLY[@]}"
"""
ASK_ZSH = """
zmodload zsh/zpty
zpty shell zsh -f -i
zpty -w shell "PS1=; fpath=($1 \\$fpath); autoload -Uz compinit; compinit -u -D"
zpty -w shell "zstyle ':completion:*' list-packed no; LISTMAX=0; stty columns 200; print ready''-"
zpty -r -m shell seen '*ready-*'
zpty -w -n shell "$2"$'\\t\\t'
zpty -r -m shell seen "*$3*"
print -r -- "$seen"
"""


def script(shell: str) -> str:
    done = subprocess.run([*KVSHM, "completion", shell], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        (["kvshm", ""], [*COMMANDS, "dump-index"]),
        (["kvshm", "sta"], ["status"]),
        (["kvshm", "status", "--pro"], ["--probe"]),
        (["kvshm", "up", "MODEL", "--as", ""], ["shell", "systemd", "compose"]),
        (["kvshm", "kv", ""], ["dump", "serve", "compare"]),
    ],
    ids=lambda words: " ".join(words[1:]) if words[0] == "kvshm" else "",
)
def test_bash_offers(tmp_path: Path, typed: list[str], offered: list[str]) -> None:
    (tmp_path / "kvshm").write_text(script("bash"))
    asked = ["bash", "-c", ASK_BASH, "bash", tmp_path / "kvshm", *typed]
    done = subprocess.run(asked, capture_output=True, text=True)
    assert done.stderr == ""
    assert sorted(done.stdout.split()) == sorted(offered)


@pytest.mark.skipif(  # .ci/run installs it
    not (shutil.which("zsh") or os.environ.get("CI")), reason="zsh is not installed"
)
@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("kvshm ", f"status*-- {COMMANDS['status'].HELP}"),
        ("kvshm sta", "kvshm status"),
        ("kvshm up MODEL --as ", "systemd"),
    ],
)
def test_zsh_offers(tmp_path: Path, typed: str, offered: str) -> None:
    (tmp_path / "_kvshm").write_text(script("zsh"))
    environ = {**os.environ, "TERM": "dumb", "HOME": str(tmp_path)}
    asked = ["zsh", "-f", "-c", ASK_ZSH, "zsh", tmp_path, typed, offered]
    done = subprocess.run(asked, env=environ, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
