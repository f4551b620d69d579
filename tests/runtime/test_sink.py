"""Writing to something that may not read never waits."""

from __future__ import annotations

import ctypes
import os
import select
import socket
import termios
import threading
import time
from typing import TYPE_CHECKING

from phalanx.runtime.output.writer import Sink

if TYPE_CHECKING:
    from pathlib import Path

LINE = b"x" * 99 + b"\n"


def read_all(fd: int) -> bytes:
    os.set_blocking(fd, False)
    data = b""
    while True:
        try:
            data += os.read(fd, 1 << 16)
        except BlockingIOError:
            return data


def test_a_pipe_that_nobody_reads_holds_up_nobody_and_the_rest_is_counted() -> None:
    reader, writer = os.pipe()
    sink = Sink(os.dup(writer), limit=10_000)

    for _ in range(2000):
        sink.write(LINE, 1)

    assert sink.wants_to_write
    assert sink.dropped > 0
    shown = b""
    while not sink.is_empty:
        shown += read_all(reader)
        sink.flush()
    shown += read_all(reader)
    assert shown == LINE * (2000 - sink.dropped)
    assert os.get_blocking(writer)  # whoever shares the pipe has it as it was
    sink.close()
    os.close(reader)
    os.close(writer)


def test_lines_go_into_a_pipe_whole_beside_those_of_others() -> None:
    reader, writer = os.pipe()
    sink = Sink(os.dup(writer))
    sink.write(LINE * 2000, 2000)
    shown = b""
    others = 0

    while not sink.is_empty:
        shown += read_all(reader)
        os.write(writer, b"another line\n")
        others += 1
        sink.flush()
    shown += read_all(reader)

    assert others > 1
    assert shown.splitlines(keepends=True).count(LINE) == 2000
    assert shown.splitlines().count(b"another line") == others
    sink.close()
    os.close(reader)
    os.close(writer)


def test_a_line_longer_than_the_pipe_arrives() -> None:
    reader, writer = os.pipe()
    sink = Sink(writer)
    sink.write(b"y" * 300_000 + b"\n", 1)
    shown = b""

    while not sink.is_empty:
        shown += read_all(reader)
        sink.flush()

    shown += read_all(reader)
    assert shown == b"y" * 300_000 + b"\n"
    sink.close()
    os.close(reader)


def test_a_reader_that_is_gone_is_forgotten() -> None:
    reader, writer = os.pipe()
    sink = Sink(writer)
    os.close(reader)

    for _ in range(3):
        sink.write(LINE, 1)

    assert not sink.wants_to_write
    assert sink.is_empty
    sink.close()


def test_a_socket_is_written_without_waiting_too() -> None:
    mine, its = socket.socketpair()
    sink = Sink(os.dup(its.fileno()), limit=100_000)

    for _ in range(10_000):
        sink.write(LINE, 1)

    assert sink.dropped > 0
    assert its.getblocking()
    sink.close()
    mine.close()
    its.close()


def test_a_file_is_continued_where_others_are_writing(tmp_path: Path) -> None:
    path = tmp_path / "log"
    with path.open("wb") as file:
        file.write(b"before\n")
        file.flush()
        sink = Sink(os.dup(file.fileno()))
        sink.write(b"ours\n", 1)
        file.write(b"after\n")

    assert path.read_bytes() == b"before\nours\nafter\n"
    sink.close()


def test_a_full_disk_loses_lines_that_are_counted_and_nothing_else() -> None:
    sink = Sink(os.open("/dev/full", os.O_WRONLY))

    sink.write(LINE, 1)
    sink.write(LINE * 2, 2)

    assert (sink.is_empty, sink.is_full, sink.dropped) == (True, True, 3)
    sink.close()


def test_the_last_flush_ends_at_its_deadline_or_when_all_is_written() -> None:
    reader, writer = os.pipe()
    sink = Sink(os.dup(writer))
    sink.write(LINE * 2000, 2000)

    sink.flush_until(time.monotonic() + 0.05)  # nobody reads

    assert sink.wants_to_write
    assert not select.select([], [writer], [], 0)[1]
    read_all(reader)
    sink.close()
    os.close(reader)
    os.close(writer)


def test_a_terminal_that_cannot_be_opened_anew_holds_up_nothing_and_gets_every_line() -> None:
    mine, its = os.openpty()
    os.fchmod(its, 0)  # as another user's: it refuses to be opened
    attributes = termios.tcgetattr(its)
    attributes[1] &= ~termios.OPOST  # lines as they are written
    termios.tcsetattr(its, termios.TCSANOW, attributes)
    set_file_user = ctypes.CDLL(None).setfsuid
    before = set_file_user(65534)  # for files this thread is not root
    sink = Sink(os.dup(its), limit=100_000)
    set_file_user(before)

    def flood() -> None:
        for _ in range(40):
            sink.write(LINE * 500, 500)

    flooding = threading.Thread(target=flood, daemon=True)
    flooding.start()
    flooding.join(10)

    assert not flooding.is_alive()
    assert sink.dropped > 0
    os.set_blocking(its, False)  # by a process that shares it: the pump waits all the same
    expected = LINE * (20_000 - sink.dropped)
    shown = b""
    while len(shown) < len(expected) and select.select([mine], [], [], 10)[0]:
        shown += os.read(mine, 1 << 16)
        sink.flush()
    assert shown == expected
    sink.close(time.monotonic() + 10)
    assert "phalanx-pump" not in {thread.name for thread in threading.enumerate()}
    os.close(its)
    os.close(mine)
