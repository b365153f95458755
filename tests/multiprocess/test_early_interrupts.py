"""Ctrl-C while a program of kvshm is still being imported, or reads its command line."""

from __future__ import annotations

import signal
import sys
import tomllib
from pathlib import Path

import pytest

from ..sources import ROOT
from .processes import Managed, Processes, real_processes

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(120)]
SCRIPTS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
WAITS = "print('here', flush=True)\nwhile True: signal.pause()\n"
IMPORTING = f"import signal\n{WAITS}"
"""These stand in for a module of Python's that every program imports."""
SWALLOWING = f"""\
import signal
try:
    {WAITS.replace(chr(10), chr(10) + "    ")}
except BaseException:
    raise RuntimeError("what is imported fails otherwise")
"""
ANSWERING = "print('here', flush=True); input(); print('still here', flush=True)"
PARSING = f"""\
import pathlib, signal, sys
sys.path.remove(str(pathlib.Path(__file__).parent))
del sys.modules["argparse"]
import argparse
def waits(*_, **__):
    {WAITS.replace(chr(10), chr(10) + "    ")}
argparse.ArgumentParser.__init__ = waits
"""


def start(
    processes: Processes,
    program: str,
    folder: Path,
    argparse: str,
    *words: str,
    ignoring: bool = False,
) -> Managed:
    """Start a program as the script does that pip makes of its entry, and wait until it is there.

    ``argparse``: the source of a module that takes the place of Python's.  SIGINT is heeded
    whatever this process inherited, unless ``ignoring``.
    """
    (folder / "argparse.py").write_text(argparse)
    module, _, name = SCRIPTS[program].partition(":")
    heed = "" if ignoring else "signal.signal(signal.SIGINT, signal.default_int_handler)"
    script = f"import signal, sys\n{heed}\nfrom {module} import {name}; sys.exit({name}())"
    path = f"{folder}:{ROOT}"
    started = processes.start(
        program, sys.executable, "-c", script, *words, environ={"PYTHONPATH": path}
    )
    started.wait_out(lambda line: line == "here")
    return started


@pytest.mark.parametrize("argparse", [IMPORTING, SWALLOWING, PARSING])
@pytest.mark.parametrize("program", SCRIPTS)
def test_an_early_interrupt_ends_a_program_quietly(
    program: str, argparse: str, tmp_path: Path
) -> None:
    words = ("status",) if program == "kvshm" else ()
    with real_processes() as processes:
        started = start(processes, program, tmp_path, argparse, *words)
        started.signal(signal.SIGINT)
        assert started.wait() == 130
        assert str(started.err) == ""


def test_the_coordinator_that_a_command_becomes_ends_as_quietly(tmp_path: Path) -> None:
    """That command loads all others first, and then starts anew in the same process."""
    once = f"""\
import os, pathlib, sys
if "-c" in sys.orig_argv:
    sys.path.remove(str(pathlib.Path(__file__).parent))
    del sys.modules["argparse"]
    import argparse
else:
    {IMPORTING.replace(chr(10), chr(10) + "    ")}
"""
    with real_processes() as processes:
        started = start(processes, "kvshm", tmp_path, once, "coordinator")
        started.signal(signal.SIGINT)
        assert started.wait() == 130
        assert str(started.err) == ""


def test_an_interrupt_that_is_ignored_stays_ignored(tmp_path: Path) -> None:
    """As of what a shell script starts in the background."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with real_processes() as processes:
            started = start(processes, "kvshm", tmp_path, ANSWERING, "status", ignoring=True)
            started.signal(signal.SIGINT)
            started.say("is it there")
            started.wait_out(lambda line: line == "still here")
    finally:
        signal.signal(signal.SIGINT, before)
