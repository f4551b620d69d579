"""Writing to a descriptor that is not read never blocks the caller, and loses no line uncounted."""

from __future__ import annotations

import fcntl
import os
import queue
import select
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.processes import LONG, soon, start_thread, wait_until

from phalanx.runtime.linux import descriptor_limit
from phalanx.runtime.output.collector_main import Writer

LINE = b"x" * 99 + b"\n"


def read_until(fd: int, size: int) -> bytes:
    data = b""
    while len(data) < size and select.select([fd], [], [], LONG)[0]:
        data += os.read(fd, 1 << 16)
    return data


@pytest.fixture(params=["pipe", "terminal", "socket", "non-blocking pipe"])
def ends(request: pytest.FixtureRequest) -> Iterator[tuple[int, int]]:
    """The reader's and the writer's end of what a driver's stdout may be."""
    match request.param:
        case "terminal":
            import tty

            reader, writer = os.openpty()
            tty.setraw(writer)
        case "socket":
            reader, writer = (end.detach() for end in socket.socketpair())
        case _:
            reader, writer = os.pipe()
            os.set_blocking(writer, request.param == "pipe")
    yield reader, writer
    os.close(reader)
    os.close(writer)


def test_what_is_not_read_blocks_no_write_and_the_rest_is_counted(ends: tuple[int, int]) -> None:
    reader, shared = ends
    was_blocking = os.get_blocking(shared)
    idle: queue.SimpleQueue[None] = queue.SimpleQueue()
    writer = Writer(os.dup(shared), limit=100_000, on_idle=lambda: idle.put(None))

    for _ in range(20):
        writer.write(LINE * 500, 500)

    shown = b""
    while idle.empty():
        if select.select([reader], [], [], 0.01)[0]:
            shown += os.read(reader, 1 << 16)
    dropped = writer.take_dropped()
    shown += read_until(reader, (10_000 - dropped) * len(LINE) - len(shown))
    assert dropped > 0
    assert shown == LINE * (10_000 - dropped)
    assert os.get_blocking(shared) == was_blocking  # other processes share it
    writer.close(soon())


def test_lines_go_into_a_pipe_whole_beside_those_of_others(pipe: tuple[int, int]) -> None:
    reader, shared = pipe
    writer = Writer(os.dup(shared))
    writer.write(LINE * 2000, 2000)

    def write_others() -> None:
        for _ in range(100):
            os.write(shared, b"another line\n")

    others = start_thread(write_others)
    shown = read_until(reader, 2000 * len(LINE) + 1300)

    others.join(LONG)
    assert shown.splitlines(keepends=True).count(LINE) == 2000
    assert shown.splitlines().count(b"another line") == 100
    writer.close(soon())


def test_a_line_longer_than_the_pipe_arrives(pipe: tuple[int, int]) -> None:
    reader, shared = pipe
    writer = Writer(os.dup(shared))

    writer.write(b"y" * 300_000 + b"\n", 1)

    assert read_until(reader, 300_001) == b"y" * 300_000 + b"\n"
    writer.close(soon())


def test_a_reader_that_is_gone_is_forgotten() -> None:
    reader, shared = os.pipe()
    writer = Writer(shared)
    os.close(reader)

    for _ in range(3):
        writer.write(LINE, 1)

    writer.close(soon())
    assert writer.take_dropped() == 0


def test_a_file_is_continued_where_others_are_writing(tmp_path: Path) -> None:
    path = tmp_path / "log"
    with path.open("wb") as file:
        file.write(b"before\n")
        file.flush()
        writer = Writer(os.dup(file.fileno()))
        writer.write(b"ours\n", 1)
        writer.close(soon())
        file.write(b"after\n")

    assert path.read_bytes() == b"before\nours\nafter\n"


def test_a_full_disk_loses_lines_that_are_counted_and_nothing_else() -> None:
    writer = Writer(os.open("/dev/full", os.O_WRONLY))

    writer.write(LINE, 1)
    writer.write(LINE * 2, 2)
    writer.close(soon())

    assert writer.is_full
    assert writer.take_dropped() == 3


@pytest.mark.parametrize("blocking", [True, False])
def test_closing_waits_for_a_reader_no_longer_than_its_deadline(
    pipe: tuple[int, int], *, blocking: bool
) -> None:
    reader, shared = pipe
    os.set_blocking(shared, blocking)
    with descriptor_limit.all_available():  # a driver may have many open files
        high = fcntl.fcntl(shared, fcntl.F_DUPFD_CLOEXEC, 1024)
    writer = Writer(high)
    writer.write(LINE * 2000, 2000)
    wait_until(lambda: not select.select([], [shared], [], 0)[1], "a full pipe")

    writer.close(time.monotonic() + 0.05)

    assert read_until(reader, 2000 * len(LINE)) == LINE * 2000  # so that its thread ends
    writer.close(soon())
