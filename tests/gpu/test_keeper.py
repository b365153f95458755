"""A keeper of engines whose caches lie in GPU memory: it survives them, and they import from it."""

from __future__ import annotations

import tempfile

from .keepers import engines_import_from_a_keepers_files, engines_import_when_all_have_ended


def test_engines_on_a_gpu_import_from_a_keeper_when_all_have_ended() -> None:
    with tempfile.TemporaryDirectory(prefix="kv-") as run_dir:
        engines_import_when_all_have_ended(run_dir)


def test_engines_on_a_gpu_import_what_a_keeper_has_read_from_files() -> None:
    with (
        tempfile.TemporaryDirectory(prefix="kv-") as run_dir,
        tempfile.TemporaryDirectory(prefix="kv-") as folder,
    ):
        engines_import_from_a_keepers_files(run_dir, folder)
