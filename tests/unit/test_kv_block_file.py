"""Files of blocks: written as a whole, for their owner only; hostile ones are refused by name."""

from __future__ import annotations

import json
import os
import signal
import stat
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from kvshm._base.fingerprint import fingerprint
from kvshm.config import Config
from kvshm.errors import ConfigError, KvshmError
from kvshm.tools import cli
from kvshm.tools.kv import block_file, command
from kvshm.tools.kv.block_file import BlockFile, BlockFileError, BlockKey, Description
from kvshm.tools.kv.serve import FileEngine, check_servable

FIELDS = {"model": "toy", "weights": "w"}
KEYS = [bytes([i]) * 32 for i in (1, 2, 3)]
SIZES = [[4, 8], [4, 8]]


def description(**changed: Any) -> Description:
    blocks = [BlockKey(key, bytes(8), depth, 0) for depth, key in enumerate(KEYS)]
    reported = {"fields": FIELDS, "engine": "e", "model": "m", "block_size": 16, "regions": SIZES}
    sums = [checksums(rank) for rank in arrays()]
    reported |= {"blocks": blocks, "checksums": sums, **changed}
    return Description(fingerprint=fingerprint(reported["fields"]), **reported)


@pytest.fixture
def short() -> Iterator[Path]:
    """A run directory: sockets hold 107 bytes of a path."""
    with tempfile.TemporaryDirectory(prefix="kv-") as folder:
        yield Path(folder)


def checksums(rank: list[Any]) -> list[int]:
    return [xxhash.xxh3_64_intdigest(b"".join(map(bytes, row))) for row in zip(*rank, strict=True)]


def arrays() -> list[list[Any]]:
    return [
        [numpy.full((3, n), 10 * rank + region, numpy.uint8) for region, n in enumerate(sizes)]
        for rank, sizes in enumerate(SIZES)
    ]


def tensors() -> dict[str, Any]:
    return {
        f"rank{r}.region{i}": a for r, all_of in enumerate(arrays()) for i, a in enumerate(all_of)
    }


def test_what_is_written_is_read(tmp_path: Path) -> None:
    what = description()
    block_file.write(tmp_path / "f", what, arrays(), force=False)
    file = BlockFile(tmp_path / "f")
    assert file.what == what
    assert file.rows("rank1.region1", 1, 3).tolist() == [[11] * 8] * 2
    assert what.block_bytes == 24


def test_a_file_belongs_to_its_owner_alone(tmp_path: Path) -> None:
    umask = os.umask(0)
    try:
        block_file.write(tmp_path / "f", description(), arrays(), force=False)
        assert os.umask(0) == 0
    finally:
        os.umask(umask)
    assert stat.S_IMODE((tmp_path / "f").stat().st_mode) == 0o600
    assert [path.name for path in tmp_path.iterdir()] == ["f"]


@pytest.mark.parametrize("made", ["file", "link", "folder", "fifo"])
def test_what_exists_is_not_replaced_unless_it_is_a_file_and_that_is_asked(
    tmp_path: Path, made: str
) -> None:
    path = tmp_path / "f"
    match made:
        case "file":
            path.write_text("precious")
        case "link":
            path.symlink_to(tmp_path / "nowhere")
        case "folder":
            path.mkdir()
        case _:
            os.mkfifo(path)
    with pytest.raises(BlockFileError, match="exists already"):
        block_file.write(path, description(), arrays(), force=False)
    if made != "file":
        with pytest.raises(BlockFileError, match="is no file"):
            block_file.write(path, description(), arrays(), force=True)
        return
    assert path.read_text() == "precious"
    block_file.write(path, description(), arrays(), force=True)
    assert BlockFile(path).what == description()


def test_a_failure_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(block_file, "save_file", full)
    with pytest.raises(BlockFileError, match="No space left"):
        block_file.write(tmp_path / "f", description(), arrays(), force=False)
    assert list(tmp_path.iterdir()) == []


def killed_while_writing(path: Path) -> None:
    def kill(*_: Any, **__: Any) -> None:
        for name in ("new", ".tmp"):  # safetensors has names of its own
            (next(path.parent.glob(f".{path.name}.*")) / name).write_text("private")
        os.kill(os.getpid(), signal.SIGKILL)

    if not (pid := os.fork()):
        pytest.MonkeyPatch().setattr(block_file, "save_file", kill)
        try:
            block_file.write(path, description(), arrays(), force=False)
        finally:
            os._exit(1)
    assert os.WTERMSIG(os.waitpid(pid, 0)[1]) == signal.SIGKILL


def test_what_a_killed_dump_leaves_is_private_and_the_next_removes_it(tmp_path: Path) -> None:
    for name in ("f", "other"):
        killed_while_writing(tmp_path / name)
    left = list(tmp_path.iterdir())
    assert [stat.S_IMODE(path.stat().st_mode) for path in left] == [0o700, 0o700]
    (tmp_path / ".f.kvshm-notes").write_text("a file of somebody")
    (tmp_path / ".f.kvshm-link").symlink_to(tmp_path)
    block_file.write(tmp_path / "f", description(), arrays(), force=False)
    found = {path.name for path in tmp_path.iterdir() if not path.name.startswith(".other.")}
    assert found == {"f", ".f.kvshm-notes", ".f.kvshm-link"}
    assert len(list(tmp_path.glob(".other.*"))) == 1


def test_a_dump_leaves_the_folder_of_one_that_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def meanwhile(*given: Any, **named: Any) -> None:
        monkeypatch.setattr(block_file, "save_file", save_file)
        block_file.write(tmp_path / "f", description(), arrays(), force=True)
        save_file(*given, **named)

    monkeypatch.setattr(block_file, "save_file", meanwhile)
    block_file.write(tmp_path / "f", description(engine="outer"), arrays(), force=True)
    assert BlockFile(tmp_path / "f").what.engine == "outer"
    assert [path.name for path in tmp_path.iterdir()] == ["f"]


def test_a_name_taken_meanwhile_is_not_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def slow(*arguments: Any, **named: Any) -> None:
        save_file(*arguments, **named)
        (tmp_path / "f").write_text("precious")

    monkeypatch.setattr(block_file, "save_file", slow)
    with pytest.raises(BlockFileError, match="exists"):
        block_file.write(tmp_path / "f", description(), arrays(), force=False)
    assert (tmp_path / "f").read_text() == "precious"


# -- hostile files

LIES: dict[str, dict[str, str | None]] = {
    "no format": {"format": None},
    "another format": {"format": "kvshm-kv 2"},
    "no keys": {"keys": None},
    "keys are no JSON": {"keys": "["},
    "a short key": {"keys": json.dumps(["00" * 31, "01" * 32, "02" * 32])},
    "a key with a newline": {"keys": json.dumps([f"{'00' * 32}\n", "01" * 32, "02" * 32])},
    "too few keys": {"keys": json.dumps(["00" * 32])},
    "no blocks": {"keys": "[]", "parents": "[]", "depths": "[]", "groups": "[]"},
    "a key twice": {"keys": json.dumps(["00" * 32] * 3)},
    "a negative depth": {"depths": "[0, -1, 2]"},
    "a huge depth": {"depths": f"[0, {1 << 32}, 2]"},
    "a huge group": {"groups": f"[0, {1 << 16}, 0]"},
    "a parent too long": {"parents": json.dumps(["00" * 9] * 3)},
    "too few checksums": {"checksums": json.dumps([["00" * 8] * 3, ["00" * 8] * 2])},
    "checksums of one rank": {"checksums": json.dumps([["00" * 8] * 3])},
    "a checksum that is no number": {"checksums": json.dumps([["zz" * 8] * 3] * 2)},
    "no block size": {"block_size": "0"},
    "a huge block size": {"block_size": str(1 << 64)},
    "no ranks": {"regions": "[]"},
    "a rank without regions": {"regions": "[[4, 8], []]"},
    "too many ranks": {"regions": json.dumps([[4]] * 65)},
    "an empty region": {"regions": "[[4, 0], [4, 8]]"},
    "other sizes": {"regions": "[[4, 8], [4, 9]]"},
    "a rank more": {"regions": "[[4, 8], [4, 8], [4]]"},
    "a rank less": {"regions": "[[4, 8]]"},
    "nested": {"regions": "[" * 5000},
    "fields of another fingerprint": {"fields": '{"model": "other"}'},
    "fields that are no text": {"fields": '{"model": 1}'},
    "half a character": {"fields": '{"model": "\\ud800"}'},
    "a fingerprint that is no number": {"fingerprint": "zz"},
}


@pytest.mark.parametrize("lie", LIES.values(), ids=LIES)
def test_a_file_that_lies_is_refused(tmp_path: Path, lie: dict[str, str | None]) -> None:
    reported = {**description().metadata(), **lie}
    save_file(
        tensors(), tmp_path / "f", metadata={k: v for k, v in reported.items() if v is not None}
    )
    with pytest.raises(BlockFileError, match=f"{tmp_path}/f is no file of kvshm's blocks: "):
        BlockFile(tmp_path / "f")


@pytest.mark.parametrize("kind", ["float", "flat", "more"])
def test_tensors_of_another_shape_are_refused(tmp_path: Path, kind: str) -> None:
    held = tensors()
    match kind:
        case "float":
            held["rank0.region0"] = numpy.zeros((3, 4), numpy.float32)
        case "flat":
            held["rank0.region0"] = numpy.zeros(12, numpy.uint8)
        case _:
            held["rank2.region0"] = numpy.zeros((3, 4), numpy.uint8)
    save_file(held, tmp_path / "f", metadata=description().metadata())
    with pytest.raises(BlockFileError, match="tensor rank"):
        BlockFile(tmp_path / "f")


@pytest.mark.parametrize("made", ["nothing", "empty", "text", "folder", "fifo", "cut", "long"])
def test_what_is_no_such_file_is_refused(tmp_path: Path, made: str) -> None:
    path = tmp_path / "f"
    block_file.write(tmp_path / "good", description(), arrays(), force=False)
    good = (tmp_path / "good").read_bytes()
    match made:
        case "empty" | "text":
            path.write_text("" if made == "empty" else "no safetensors" * 100)
        case "folder":
            path.mkdir()
        case "fifo":
            os.mkfifo(path)
        case "cut":
            path.write_bytes(good[:-1])
        case "long":
            path.write_bytes(good + b"x")
    with pytest.raises(BlockFileError):
        BlockFile(path)


@settings(deadline=None)
@given(data=st.data())
def test_a_spoilt_file_is_refused_or_read_but_never_crashes(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("spoilt")
    block_file.write(folder / "f", description(), arrays(), force=False)
    content = bytearray((folder / "f").read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, len(content) - 1))
        content[place] = data.draw(st.integers(0, 255))
    (folder / "f").write_bytes(content[: data.draw(st.integers(0, len(content)))])
    try:
        file = BlockFile(folder / "f")
    except BlockFileError:
        return
    for name, _, _, nbytes in file.what.tensors():
        assert file.rows(name, 0, 3).nbytes == 3 * nbytes


@pytest.mark.parametrize("verb", ["serve", "compare"])
def test_a_command_names_the_file_that_it_cannot_use(
    tmp_path: Path,
    short: Path,
    verb: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("KVSHM_RUN_DIR", str(short))
    path = tmp_path / "f"
    path.write_bytes(struct.pack("<Q", 1 << 60) + b"{}")
    names = [str(path)] * (2 if verb == "compare" else 1)
    assert cli.main(["kv", verb, *names]) == (2 if verb == "compare" else 1)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"kvshm kv {verb}: {path} is no file of kvshm's blocks: ")


def with_holes(path: Path, size: int) -> None:
    block = BlockKey(KEYS[0], bytes(8), 0, 0)
    what = description(regions=[[size]], blocks=[block], checksums=[[0]])
    tensor = {"dtype": "U8", "shape": [1, size], "data_offsets": [0, size]}
    header = json.dumps({"__metadata__": what.metadata(), "rank0.region0": tensor}).encode()
    with open(path, "wb") as holes:
        holes.write(struct.pack("<Q", len(header)) + header)
        holes.truncate(8 + len(header) + size)


def test_memory_is_not_taken_for_a_file_that_is_larger(tmp_path: Path) -> None:
    path, size = tmp_path / "f", 1 << 40
    with_holes(path, size)
    with pytest.raises(KvshmError, match=f"{size} bytes: .* are available"):
        FileEngine(BlockFile(path), Config(), tmp_path)


_WITH_LESS_MEMORY = """if True:
    import resource, sys
    from kvshm.tools.cli import main
    resource.setrlimit(resource.RLIMIT_AS, (6 << 30, 6 << 30))
    sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.parametrize(("verb", "status"), [("serve", 1), ("compare", 2)])
def test_a_file_larger_than_the_address_space_is_reported(
    verb: str, status: int, tmp_path: Path, short: Path
) -> None:
    with_holes(tmp_path / "f", 1 << 40)
    names = [str(tmp_path / "f")] * (2 if verb == "compare" else 1)
    done = subprocess.run(
        [sys.executable, "-c", _WITH_LESS_MEMORY, "kv", verb, *names],
        env={**os.environ, "KVSHM_RUN_DIR": str(short)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == status, done.stderr
    assert done.stderr.startswith(f"kvshm kv {verb}: {tmp_path / 'f'} cannot be read: Cannot alloc")


def test_a_damaged_block_is_not_served(tmp_path: Path, short: Path) -> None:
    path = tmp_path / "f"
    block_file.write(path, description(), arrays(), force=False)
    with closing(FileEngine(BlockFile(path), Config(), short)):
        pass
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(BlockFileError, match="is damaged: 1 blocks of rank 1"):
        FileEngine(BlockFile(path), Config(), short)


def test_a_file_of_another_layout_is_not_served() -> None:
    with pytest.raises(BlockFileError, match="layout 1, protocol 1"):
        check_servable(description(fields={"kvshm_abi": "layout 1, protocol 1"}), Config())
    with pytest.raises(ConfigError, match="KVSHM_ROLE=consumer rules out exporting"):
        check_servable(description(), Config.from_env({"KVSHM_ROLE": "consumer"}))
    check_servable(description(), Config())


@pytest.mark.parametrize(
    "wrong",
    [
        [],
        ["dump"],
        ["dump", "f", "--limit", "0"],
        ["dump", "f", "--keys", "xyz"],
        ["dump", "f", "--keys", ","],
        ["dump", "f", "--keys", "@/nowhere"],
        ["compare", "a"],
        ["compare", "a", "b", "--tolerance", "-1"],
        ["compare", "a", "b", "--tolerance", "nan"],
        ["compare", "a", "b", "--dtype", "int4"],
    ],
)
def test_a_wrong_command_line_is_reported(
    wrong: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        status = cli.main(["kv", *wrong])
    except SystemExit as exc:
        status = exc.code
    assert status == 2
    assert "kvshm kv" in capsys.readouterr().err


def test_without_its_libraries_the_command_says_how_to_get_them(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def missing(_: object) -> int:
        raise ModuleNotFoundError("No module named 'safetensors'", name="safetensors")

    monkeypatch.setitem(command.VERBS, "compare", missing)
    assert cli.main(["kv", "compare", "a", "b"]) == 2
    reported = "kvshm kv compare needs safetensors: pip install 'kvshm[kv]'\n"
    assert capsys.readouterr().err == reported
