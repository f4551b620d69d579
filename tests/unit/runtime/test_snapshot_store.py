"""States as files: whole or not there, and nothing is unpickled that is not what was stored."""

from __future__ import annotations

import contextlib
import errno
import os
import pickle
import signal
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import pytest
from tests.support.programs import run_python

from phalanx.runtime import (
    Payload,
    SnapshotFolder,
    SnapshotName,
    Stamp,
    check_folder,
    encode,
    join_snapshots,
    load_snapshot,
    store_snapshot,
)
from phalanx.supervision import SpecError

NAME = SnapshotName(7, 1, 4)
Reader: TypeAlias = Callable[[], Any]


def store(value: Any, folder: Path | None = None, number: int = 7) -> Payload:
    return store_snapshot(encode(value, "it"), Stamp(number, 1, 4, 2, 1.5), folder)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return check_folder("where", tmp_path / "states")


@pytest.fixture
def folder(path: Path) -> Iterator[SnapshotFolder]:
    folder = SnapshotFolder(path)
    yield folder
    folder.close()


def read(folder: SnapshotFolder, name: SnapshotName = NAME) -> Any:
    fd = folder.open(name)
    try:
        return load_snapshot(fd, 0, os.fstat(fd).st_size)
    finally:
        os.close(fd)


@pytest.fixture(params=["memory", "disk"])
def stored(
    request: pytest.FixtureRequest, folder: SnapshotFolder
) -> Iterator[Callable[[Any], Reader]]:
    """Stores a value, and returns what reads it."""
    with contextlib.ExitStack() as payloads:

        def keep(value: Any) -> Reader:
            payload = store(value, None if request.param == "memory" else folder.path)
            payloads.callback(payload.close)
            if request.param == "disk":
                return partial(read, folder)
            assert payload.file is not None
            return partial(load_snapshot, payload.file, 0, os.fstat(payload.file).st_size)

        yield keep


@pytest.mark.parametrize(
    "value", [None, {"count": 3}, [b"x" * 100_000, bytearray(70_000)], "ü" * 50_000]
)
def test_what_is_stored_is_what_is_read(stored: Callable[[Any], Reader], value: Any) -> None:
    assert stored(value)() == value


def test_tensors_are_read_in_place_and_can_be_written(stored: Callable[[Any], Reader]) -> None:
    torch = pytest.importorskip("torch")
    value = {"w": torch.arange(50_000.0), "small": torch.ones(3)}
    read = stored(value)

    for _ in range(2):  # what is written is the reader's own
        found = read()
        assert torch.equal(found["w"], value["w"])
        assert torch.equal(found["small"], value["small"])
        found["w"].add_(1)


def test_memory_cannot_be_changed_by_anybody() -> None:
    payload = store([1, 2, 3])
    assert payload.file is not None

    with pytest.raises(PermissionError):
        os.pwrite(payload.file, b"x", 0)
    with pytest.raises(PermissionError):
        os.ftruncate(payload.file, 0)
    payload.close()


def test_several_in_one_file_are_read_each_for_itself(folder: SnapshotFolder) -> None:
    memory = store("first")
    store(["second"] * 5000, folder.path)
    assert memory.file is not None
    disk = folder.open(NAME)

    whole, spans = join_snapshots([(fd, os.fstat(fd).st_size) for fd in (memory.file, disk)])

    assert [load_snapshot(whole, *span) for span in spans] == ["first", ["second"] * 5000]
    os.close(whole)
    os.close(disk)
    memory.close()


@pytest.mark.parametrize("size", [10, 60_000])
def test_a_snapshot_that_was_cut_short_or_altered_anywhere_is_found_out(
    folder: SnapshotFolder, size: int
) -> None:
    store(b"x" * size, folder.path)
    file = folder.path / str(NAME)
    whole = file.read_bytes()

    for length in (0, 5, 127, 128, len(whole) - 1):
        file.write_bytes(whole[:length])
        with pytest.raises(ValueError, match=r"torn|no snapshot"):
            folder.open(NAME)
    for at in (0, 9, 17, 40, 60, 90, 130, len(whole) // 2, len(whole) - 1):
        file.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        with pytest.raises(ValueError, match=r"torn|altered|no snapshot|format"):
            folder.open(NAME)
    file.write_bytes(whole + b"more")
    with pytest.raises(ValueError, match="torn"):
        folder.open(NAME)
    file.write_bytes(whole)
    assert read(folder) == b"x" * size


def test_a_reader_checks_again_before_it_unpickles(folder: SnapshotFolder) -> None:
    store("abc" * 100, folder.path)
    fd = folder.open(NAME)
    with (folder.path / str(NAME)).open("r+b") as file:
        file.seek(200)
        file.write(b"!")

    with pytest.raises(ValueError, match="altered"):
        load_snapshot(fd, 0, os.fstat(fd).st_size)
    os.close(fd)


def test_what_is_not_ours_or_not_plain_is_not_read(folder: SnapshotFolder) -> None:
    file = folder.path / str(NAME)
    with pytest.raises(ValueError, match="No such file"):
        folder.open(NAME)

    store("x", folder.path)
    file.chmod(0o666)
    with pytest.raises(ValueError, match="others may have written"):
        folder.open(NAME)
    file.chmod(0o600)

    other = file.rename(folder.path / "elsewhere")
    file.symlink_to(other)
    with pytest.raises(ValueError, match="symbolic links"):
        folder.open(NAME)
    file.unlink()

    other.rename(folder.path / str(SnapshotName(8, 1, 4)))
    with pytest.raises(ValueError, match="another: cut-0+7"):
        folder.open(SnapshotName(8, 1, 4))

    os.mkfifo(file)
    with pytest.raises(ValueError, match="plain file"):
        folder.open(NAME)
    file.unlink()
    pickled = pickle.dumps("evil")
    file.write_bytes(pickled)
    with pytest.raises(ValueError, match="no snapshot"):
        folder.open(NAME)


def test_names_are_found_in_order_and_nothing_else_is_touched(folder: SnapshotFolder) -> None:
    for number in (12, 7):
        store("x", folder.path, number)
    for foreign in ("notes.txt", "cut-7.rank-1-of-4", ".cut-000000000007.rank-1-of-4.99"):
        (folder.path / foreign).write_text("mine")

    assert folder.unfinished() == {".cut-000000000007.rank-1-of-4.99": 7}
    folder.tidy()
    names = folder.names()
    folder.remove(names)

    assert names == [NAME, SnapshotName(12, 1, 4)]
    assert {path.name for path in folder.path.iterdir()} == {"notes.txt", "cut-7.rank-1-of-4"}


STORES = """
import os, resource, signal, sys
from pathlib import Path
from phalanx.runtime import Stamp, encode, store_snapshot
{first}
try:
    store_snapshot(encode(b"x" * 100_000, "it"), Stamp(7, 1, 4, 2, 1.5), Path(sys.argv[1]))
except OSError as error:
    sys.exit(error.errno)
"""


@pytest.mark.parametrize(
    ("first", "status"),
    [
        ("resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))", errno.EFBIG),
        ("os.fsync = lambda _: os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL),
    ],
    ids=["a full disk", "a kill"],
)
def test_a_writer_that_is_stopped_in_the_middle_leaves_no_snapshot(
    folder: SnapshotFolder, first: str, status: int
) -> None:
    done = run_python("-c", STORES.format(first=first), str(folder.path))

    assert done.returncode == status
    assert folder.names() == []
    assert status < 0 or list(folder.path.iterdir()) == []  # it tidies up where it can
    folder.tidy()
    assert list(folder.path.iterdir()) == []


def test_a_folder_is_for_one_executor_until_that_is_gone(path: Path) -> None:
    first = SnapshotFolder(path)
    with pytest.raises(SpecError, match=r"checkpoint\.where.*another executor"):
        SnapshotFolder(path)
    first.close()
    SnapshotFolder(path).close()


def test_a_folder_must_be_ours_alone(tmp_path: Path) -> None:
    open_to_all = tmp_path / "open"
    open_to_all.mkdir(mode=0o755)
    file = tmp_path / "file"
    file.touch()

    with pytest.raises(SpecError, match=r"mode 755.*chmod 700"):
        check_folder("where", open_to_all)
    with pytest.raises(SpecError, match="where"):
        check_folder("where", file)
    with pytest.raises(SpecError, match="cannot be used"):
        check_folder("where", file / "below")
    with pytest.raises(SpecError, match="where=5"):
        check_folder("where", 5)
    for odd in ("", "~no-such-user/x", "a\0b"):
        with pytest.raises(SpecError) as refused:
            check_folder("where", odd)
        assert refused.value.field == "where"
    if os.geteuid() == 0:
        strange = tmp_path / "strange"
        strange.mkdir(mode=0o700)
        os.chown(strange, 12345, 12345)
        with pytest.raises(SpecError, match="belongs to user 12345"):
            check_folder("where", strange)
    with pytest.raises(SpecError, match="cannot be"):
        check_folder("where", "/proc/here")
