"""Both ends of a link without a network between them: what arrives, what waits, what is dropped."""

from __future__ import annotations

import os
import random
from collections import deque
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.runtime.memory.arena import Arena
from phalanx.runtime.remote.link import PIECE, WINDOW, Delivery, Lane, Line, Say
from phalanx.runtime.wire.packet_decoder import Frame, LargeFrame
from phalanx.runtime.wire.packet_encoder import Payload, seal_message_file
from phalanx.runtime.wire.packet_header import EVERY_RANK, HEADER, Flag, Kind
from phalanx.supervision import MessageTooLarge


class End:
    """One end, and what it has posted."""

    def __init__(self) -> None:
        self.arena = Arena.create(64 * 1024 * 1024)
        self.posted: deque[list[bytes]] = deque()
        self.line = Line(self.post, self.arena, 0.0)
        self.got: list[Delivery] = []

    def post(self, parts: Any) -> None:
        self.posted.append([bytes(part) for part in parts])

    def take(self, parts: list[bytes], *, passes_on: bool = True) -> None:
        what = self.line.take([memoryview(part) for part in parts], 1.0)
        if isinstance(what, Delivery):
            self.got.append(what)
            if passes_on:
                self.line.taken(1)

    def close(self) -> None:
        self.line.close()
        for each in self.got:
            if each.large is not None:
                each.large.close()
        self.arena.close()


@pytest.fixture
def ends() -> Iterator[tuple[End, End]]:
    pair = End(), End()
    yield pair
    for end in pair:
        end.close()


def carry(one: End, other: End, **options: Any) -> None:
    """Let everything arrive that may."""
    moved = True
    while moved:
        moved = False
        for source, sink in ((one, other), (other, one)):
            source.line.pump(1.0)
            while source.posted:
                sink.take(source.posted.popleft(), **options)
                moved = True


def frame(call_id: int, body: bytes) -> Frame:
    return Frame(Kind.CALL, Flag.COLLECTIVE, 3, call_id, 2, EVERY_RANK, body)


def large(call_id: int, body: bytes) -> Frame:
    """A frame whose body lies in a file."""
    file = os.memfd_create("test", os.MFD_ALLOW_SEALING)
    os.write(file, body)
    payload = Payload.in_file(seal_message_file(file), len(body))
    far = LargeFrame(Kind.CALL, payload.flags, 3, call_id, 2, EVERY_RANK, payload.tail)
    far.fds = [file]
    far.lender = None
    return far


def content(delivery: Delivery) -> bytes:
    if delivery.large is None:
        return delivery.body
    extent = delivery.large.extent
    size = delivery.large.tail[-8:]
    length = int.from_bytes(size, "little")
    if extent is not None:
        return bytes(extent.arena.window[extent.start : extent.start + length])
    assert delivery.large.file is not None
    return os.pread(delivery.large.file, length, 0)


def test_packets_arrive_in_order_and_unchanged(ends: tuple[End, End]) -> None:
    one, other = ends
    for number in range(3 * WINDOW):
        one.line.send(Lane(number % 2), frame(number, b"%d" % number))

    carry(one, other)

    assert [each.body for each in other.got] == [b"%d" % n for n in range(3 * WINDOW)]
    assert [each.lane for each in other.got] == [n % 2 for n in range(3 * WINDOW)]
    assert other.got[5].head == (0x5048, Kind.CALL, Flag.COLLECTIVE, 3, 5, 2, EVERY_RANK)


def test_a_large_body_arrives_whole_between_small_ones(ends: tuple[End, End]) -> None:
    one, other = ends
    body = random.Random(1).randbytes(3 * PIECE + 7)
    one.line.send(Lane.DATA, frame(1, b"before"))
    one.line.send(Lane.DATA, large(2, body))
    one.line.send(Lane.CONTROL, frame(3, b"behind"))

    carry(one, other)

    assert [content(each) for each in other.got] == [b"before", body, b"behind"]
    assert (other.line.malformed, one.line.malformed) == (0, 0)


def test_nothing_leaves_while_the_other_end_takes_nothing(ends: tuple[End, End]) -> None:
    one, other = ends
    for number in range(10 * WINDOW):
        one.line.send(Lane.DATA, frame(number, b"x"))

    carry(one, other, passes_on=False)
    waiting = len(other.got)
    other.line.taken(waiting)
    carry(one, other)

    assert waiting == WINDOW
    assert len(other.got) == 10 * WINDOW


def test_signs_of_life_do_not_pile_up_at_a_silent_end(ends: tuple[End, End]) -> None:
    one, _ = ends
    for _ in range(1000):
        one.line.beat(1.0)

    assert len(one.posted) <= WINDOW


def test_a_body_that_there_is_no_memory_for_is_an_error_and_no_more(
    ends: tuple[End, End], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = ends
    one.line.send(Lane.DATA, large(1, bytes(3 * PIECE)))
    one.line.send(Lane.DATA, frame(2, b"next"))
    monkeypatch.setattr("phalanx.runtime.memory.arena.Arena.place", lambda _self, _size: None)
    monkeypatch.setattr("phalanx.runtime.wire.packet_encoder.writable_bytes", lambda _size: 10)

    carry(one, other)

    error = other.got[0].error
    assert isinstance(error, MessageTooLarge)
    assert (error.size, error.limit) == (3 * PIECE, 10)
    assert other.got[1].body == b"next"


def test_what_is_announced_and_never_comes_leaves_no_memory(ends: tuple[End, End]) -> None:
    one, other = ends
    one.line.send(Lane.DATA, large(1, bytes(2 * PIECE)))
    one.line.pump(1.0)
    other.take(one.posted.popleft())
    other.take(one.posted.popleft())

    other.line.close()
    other.arena.trim()

    assert other.arena._backed.count(1) == 0


@settings(max_examples=200)
@given(st.lists(st.lists(st.binary(max_size=64), max_size=4), max_size=20), st.data())
def test_garbage_is_dropped_and_what_follows_arrives(
    garbage: list[list[bytes]], data: st.DataObject
) -> None:
    one, other = End(), End()
    try:
        for parts in garbage:
            if len(parts) == 2 and data.draw(st.booleans()):
                # As close to a message as garbage comes: a head of the right size.
                kind, lane = data.draw(st.integers(0, 11)), data.draw(st.integers(0, 3))
                size = data.draw(st.sampled_from([0, 1, 100, 1 << 20, 1 << 62]))
                parts[0] = bytes([kind, lane]) + size.to_bytes(8, "little") + bytes(8)
            other.take(parts)
        arriving = other.line._arriving is not None
        before = len(other.got)
        one.line.send(Lane.DATA, frame(7, b"real"))
        one.line.pump(1.0)
        other.take(one.posted.popleft())

        if not arriving:  # else it stands where a piece is due, and is dropped itself
            assert other.got[before:][0].body == b"real"
    finally:
        one.close()
        other.close()


@given(st.binary(min_size=HEADER.size, max_size=200), st.integers(0, 1 << 63))
def test_no_packet_claims_memory_that_is_not_its_own(packet: bytes, size: int) -> None:
    end = End()
    try:
        end.take([bytes([Say.PACKET, 0]) + size.to_bytes(8, "little") + bytes(8), packet])

        for each in end.got:
            assert not each.head[2] & (Flag.FILE | Flag.ARENA)
    finally:
        end.close()
