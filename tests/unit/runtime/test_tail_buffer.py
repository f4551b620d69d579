"""Last words are readable at any moment, whole, and outlive everybody."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.runtime.output.tail_buffer import LANES, Tail

CAPACITY = 64


@pytest.fixture
def tail() -> Iterator[Tail]:
    tail = Tail.create(CAPACITY)
    yield tail
    tail.close()


@given(st.lists(st.binary(max_size=3 * CAPACITY), max_size=12))
def test_the_tail_is_the_end_of_what_was_written(chunks: list[bytes]) -> None:
    tail = Tail.create(CAPACITY)
    whole = b""

    for chunk in chunks:
        tail.write("stdout", chunk)
        whole += chunk
        kept = whole[-CAPACITY:]
        read = tail.read("stdout")
        assert kept.endswith(read)
        if len(whole) <= CAPACITY:
            assert read == whole
        else:  # its first line may have lost its head, and is left out then
            assert read == kept or read == kept[kept.index(b"\n") + 1 :]

    tail.close()


def test_lanes_do_not_touch_each_other(tail: Tail) -> None:
    for lane in LANES:
        tail.write(lane, lane.encode() * 40 + b"\n" + lane.encode())

    assert [tail.read(lane) for lane in LANES] == [b"stdout", b"stderr", b"log"]


def test_bytes_that_are_no_text_are_shown_as_escapes(tail: Tail) -> None:
    tail.write("stderr", b"\xff\xfe ok")

    assert tail.text("stderr") == "\\xff\\xfe ok"


def test_a_reader_never_sees_a_torn_line_while_another_process_writes_or_is_killed() -> None:
    tail = Tail.create(4096)
    code = f"""
from phalanx.runtime.output.tail_buffer import Tail
tail = Tail({tail.fd})
print(flush=True)
number = 0
while True:
    number += 1
    tail.write("stdout", b"%d:%s\\n" % (number, bytes([97 + number % 26]) * (number % 900)))
"""

    for _ in range(2):  # each writer goes on where the one before was killed
        writer = subprocess.Popen(
            [sys.executable, "-c", code], pass_fds=[tail.fd], stdout=subprocess.PIPE
        )
        assert writer.stdout is not None
        writer.stdout.readline()
        reads: set[bytes] = set()
        deadline = time.monotonic() + 60
        while len(reads) < 100 and time.monotonic() < deadline:
            reads.add(tail.read("stdout"))
        writer.send_signal(signal.SIGKILL)
        writer.communicate()
        reads.add(tail.read("stdout"))

        assert len(reads) >= 100  # it was written to meanwhile
        for read in reads:
            *lines, _ = read.split(b"\n")
            if len(lines) == 1 and b":" not in lines[0]:
                continue  # the writer ran past us: the end of one line is what is left, and whole
            for line in lines:
                number, _, filling = line.partition(b":")
                assert filling == bytes([97 + int(number) % 26]) * (int(number) % 900)

    tail.close()


def test_a_write_that_was_cut_short_is_not_shown_nor_what_it_overwrote(tail: Tail) -> None:
    tail.write("stdout", b"a" * 40 + b"\n" + b"b" * 22 + b"\n")
    reserved = 0  # where the first lane's counter lies
    os.pwrite(tail.fd, (64 + 30).to_bytes(8, "little"), reserved)
    os.pwrite(tail.fd, b"?" * 10, 128)  # ten of the thirty bytes, then it was killed

    cut = tail.read("stdout")
    tail.write("stdout", b"c\n")
    after = tail.read("stdout")

    assert cut == b"b" * 22 + b"\n"
    assert after == b"b" * 22 + b"\n" + b"c\n"
