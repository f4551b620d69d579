"""Both ends of a link without a network between them: what arrives, what waits, what is dropped."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import socket
from collections import deque
from collections.abc import Callable, Iterator, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.gateway_peers import DirectLink

from phalanx.runtime.memory.arena import Arena
from phalanx.runtime.remote.link import (
    BODIES,
    PIECE,
    TOGETHER,
    WINDOW,
    Delivery,
    Lane,
    Line,
    Link,
    Say,
    SharedBodies,
    records,
)
from phalanx.runtime.remote.remote_rank import RemoteRank
from phalanx.runtime.wire.channel import SocketChannel
from phalanx.runtime.wire.packet_decoder import Frame, LargeFrame
from phalanx.runtime.wire.packet_encoder import Payload, seal_message_file
from phalanx.runtime.wire.packet_header import EVERY_RANK, HEADER, MAGIC, Flag, Kind
from phalanx.supervision import MessageTooLarge


def keep_in(posted: deque[list[bytes]]) -> Callable[[Sequence[bytes | memoryview]], None]:
    return lambda parts: posted.append([bytes(part) for part in parts])


class Ends:
    """Both ends of a link with three ranks behind it; nothing is between them."""

    def __init__(self) -> None:
        self.arena = Arena.create(64 * 1024 * 1024)
        self.posted: deque[list[bytes]] = deque()
        self.back: deque[list[bytes]] = deque()
        self.link = DirectLink(keep_in(self.posted), 0.0)
        far = DirectLink(keep_in(self.back), 0.0)
        self.bodies = SharedBodies(self.link)
        self.lines = {number: Line(number, self.arena) for number in (1, 2, 3)}
        self.far = {number: Line(number, self.arena) for number in (BODIES, 1, 2, 3)}
        for line in self.lines.values():
            line.attach(self.link)
        for line in self.far.values():
            line.attach(far)
        self.got: dict[int, list[Delivery]] = {number: [] for number in self.far}
        self.forgotten: list[int] = []
        self.carried = 0  # bytes in pieces

    def carry(self, *, stopped: int | None = None) -> None:
        moved = True
        while moved:
            moved = False
            self.bodies.pump(1.0)
            for line in (*self.lines.values(), *self.far.values()):
                line.pump(1.0)
            while self.posted:
                moved = True
                self._arrive(self.posted.popleft(), stopped)
            while self.back:
                moved = True
                parts = [memoryview(part) for part in self.back.popleft()]
                number = self.link.note_received(parts, 1.0)
                near = self.bodies.line if number == BODIES else self.lines[number]
                assert near.take(parts) is None

    def _arrive(self, message: list[bytes], stopped: int | None) -> None:
        parts = [memoryview(part) for part in message]
        number = self.link.note_received(parts, 1.0)
        self.carried += len(message[-1]) * (message[0][0] == Say.PIECE)
        what = self.far[number].take(parts)
        if isinstance(what, Delivery):
            self.got[number].append(what)
            if number != stopped:
                self.far[number].taken(1)
        elif what is not None:
            assert what[0] is Say.FORGET
            self.forgotten.append(what[1])

    def close(self) -> None:
        for line in (*self.lines.values(), *self.far.values(), self.bodies.line):
            line.close()
        for each in itertools.chain.from_iterable(self.got.values()):
            if each.large is not None:
                each.large.close()
        self.arena.close()

    def take(self, parts: list[bytes]) -> None:
        """Have the far end of the first line take *parts*, whatever they are."""
        what = self.far[1].take([memoryview(part) for part in parts])
        if isinstance(what, Delivery):
            self.got[1].append(what)
            self.far[1].taken(1)


@pytest.fixture
def ends() -> Iterator[Ends]:
    ends = Ends()
    yield ends
    ends.close()


def frame(call_id: int, body: bytes) -> Frame:
    return Frame(Kind.CALL, Flag.COLLECTIVE, 3, call_id, 2, EVERY_RANK, body)


def copies(call_id: int, body: bytes, count: int, near: bytes = b"own part") -> list[LargeFrame]:
    """What the driver sends *count* ranks of one call: the same file."""
    file = os.memfd_create("test", os.MFD_ALLOW_SEALING)
    os.write(file, body)
    payload = Payload.in_file(seal_message_file(file), len(body), near)
    frames: list[LargeFrame] = []
    for _ in range(count):
        flags = payload.flags | Flag.COLLECTIVE
        each = LargeFrame(Kind.CALL, flags, 3, call_id, 2, EVERY_RANK, payload.tail)
        each.fds, each.lender = [os.dup(file)], None
        frames.append(each)
    os.close(file)
    return frames


def large(call_id: int, body: bytes) -> Frame:
    return copies(call_id, body, 1, b"")[0]


def content(delivery: Delivery) -> bytes:
    if delivery.large is None:
        return delivery.body
    extent = delivery.large.extent
    size = delivery.large.tail[-8:]
    length = int.from_bytes(size, "little")
    if extent is not None:
        return bytes(extent.window[extent.start : extent.start + length])
    assert delivery.large.file is not None
    return os.pread(delivery.large.file, length, 0)


def test_packets_arrive_in_order_and_unchanged(ends: Ends) -> None:
    for number in range(3 * WINDOW):
        ends.lines[1].send(Lane(number % 2), frame(number, b"%d" % number))

    ends.carry()

    got = ends.got[1]
    assert [each.body for each in got] == [b"%d" % n for n in range(3 * WINDOW)]
    assert [each.lane for each in got] == [n % 2 for n in range(3 * WINDOW)]
    assert got[5].head == (0x5048, Kind.CALL, Flag.COLLECTIVE, 3, 5, 2, EVERY_RANK)


def test_a_large_body_arrives_whole_between_small_ones(ends: Ends) -> None:
    body = random.Random(1).randbytes(3 * PIECE + 7)
    ends.lines[1].send(Lane.DATA, frame(1, b"before"))
    ends.lines[1].send(Lane.DATA, large(2, body))
    ends.lines[1].send(Lane.CONTROL, frame(3, b"behind"))

    ends.carry()

    assert [content(each) for each in ends.got[1]] == [b"before", body, b"behind"]
    assert (ends.far[1].malformed, ends.lines[1].malformed) == (0, 0)


@pytest.mark.parametrize(("rate", "least", "most"), [(1e9, PIECE, PIECE), (125e3, 0, PIECE // 8)])
def test_a_piece_is_as_large_as_what_crosses_in_time(
    ends: Ends, rate: float, least: int, most: int
) -> None:
    line, far, now, sizes = ends.lines[1], ends.far[1], 0.0, list[int]()
    line.send(Lane.DATA, large(1, bytes(8 * PIECE)))

    while not ends.got[1]:
        line.pump(now)
        message = ends.posted.popleft()
        sizes.append(len(message[-1]))
        now += sizes[-1] / rate
        ends._arrive(message, None)
        far.pump(now)
        while ends.back:
            line.take([memoryview(part) for part in ends.back.popleft()])

    assert least <= max(sizes) <= most


def test_nothing_leaves_while_the_other_end_takes_nothing(ends: Ends) -> None:
    for number in range(10 * WINDOW):
        ends.lines[1].send(Lane.DATA, frame(number, b"x"))

    ends.carry(stopped=1)
    waiting = len(ends.got[1])
    ends.far[1].taken(waiting)
    ends.carry()

    assert waiting == WINDOW
    assert len(ends.got[1]) == 10 * WINDOW


def test_signs_of_life_do_not_pile_up_at_a_silent_end(ends: Ends) -> None:
    for _ in range(1000):
        ends.link.beat(1.0)

    assert len(ends.posted) <= WINDOW


def test_a_body_that_there_is_no_memory_for_is_an_error_and_no_more(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends.lines[1].send(Lane.DATA, large(1, bytes(3 * PIECE)))
    ends.lines[1].send(Lane.DATA, frame(2, b"next"))
    monkeypatch.setattr("phalanx.runtime.memory.arena.Arena.place", lambda _self, _size: None)
    monkeypatch.setattr("phalanx.runtime.wire.packet_encoder.writable_bytes", lambda _size: 10)

    ends.carry()

    failed, following = ends.got[1]
    assert isinstance(failed.error, MessageTooLarge)
    assert (failed.error.size, failed.error.limit) == (3 * PIECE, 10)
    assert following.body == b"next"


def test_what_is_announced_and_never_comes_leaves_no_memory(ends: Ends) -> None:
    ends.lines[1].send(Lane.DATA, large(1, bytes(2 * PIECE)))
    ends.lines[1].pump(1.0)
    ends.take(ends.posted.popleft())
    ends.take(ends.posted.popleft())

    ends.far[1].close()
    ends.arena.trim()

    assert os.fstat(ends.arena.fd).st_blocks == 0


@settings(max_examples=200)
@given(st.lists(st.lists(st.binary(max_size=64), max_size=4), max_size=20), st.data())
def test_garbage_is_dropped_and_what_follows_arrives(
    garbage: list[list[bytes]], data: st.DataObject
) -> None:
    with contextlib.closing(Ends()) as ends:
        for parts in garbage:
            if parts != [] and data.draw(st.booleans()):
                # As close to a message as garbage comes: a head of the right size.
                kind, lane = data.draw(st.integers(0, 11)), data.draw(st.integers(0, 3))
                size = data.draw(st.sampled_from([0, 1, 100, 1 << 20, 1 << 62]))
                head = bytes([kind, lane]) + bytes(8) + size.to_bytes(8, "little") + bytes(16)
                parts[0] = head + (parts[0] if len(parts) == 1 else b"")
            ends.take(parts)
        arriving = ends.far[1]._arriving is not None
        before = len(ends.got[1])
        ends.lines[1].send(Lane.DATA, frame(7, b"real"))
        ends.lines[1].pump(1.0)
        ends.take(ends.posted.popleft())

        if not arriving:  # else it stands where a piece is due, and is dropped itself
            assert ends.got[1][before:][0].body == b"real"


@given(st.binary(min_size=HEADER.size, max_size=200), st.integers(0, 1 << 63))
def test_no_packet_claims_memory_that_is_not_its_own(packet: bytes, size: int) -> None:
    with contextlib.closing(Ends()) as ends:
        head = bytes([Say.PACKET, 0]) + bytes(8) + size.to_bytes(8, "little") + bytes(16)
        ends.take([head + packet])

        assert not any(each.head[2] & (Flag.FILE | Flag.ARENA) for each in ends.got[1])


def test_what_has_been_taken_is_said_by_what_is_sent_back(ends: Ends) -> None:
    said: list[int] = []
    for number in range(1, 4 * WINDOW):
        for near, far, wire in (
            (ends.lines[1], ends.far[1], ends.posted),
            (ends.far[1], ends.lines[1], ends.back),
        ):
            near.send(Lane.DATA, frame(number, b"x"))
            near.pump(1.0)
            (message,) = wire
            wire.clear()
            said.append(message[0][0])
            delivery = far.take([memoryview(part) for part in message])
            assert isinstance(delivery, Delivery)
            assert delivery.head[4] == number
            far.taken(1)

    assert set(said) == {Say.PACKET}  # in both directions more than a window, and no other message


def test_who_sends_nothing_says_what_it_has_taken(ends: Ends) -> None:
    for number in range(1, 3 * WINDOW):
        ends.lines[1].send(Lane.DATA, frame(number, b"x"))
    ends.carry()

    assert [each.head[4] for each in ends.got[1]] == list(range(1, 3 * WINDOW))


def test_what_was_posted_leaves_together_and_is_taken_one_by_one(ends: Ends) -> None:
    link = Link(keep_in(ends.posted), 0.0)
    ends.lines[1].attach(link)
    for number in (5, 6, 7):
        ends.lines[1].send(Lane.DATA, frame(number, b"x"))
    ends.lines[1].pump(1.0)
    assert not ends.posted

    link.flush()
    link.flush()
    (together,) = ends.posted
    for record in records([memoryview(part) for part in together]):
        ends.take([bytes(part) for part in record])

    assert [each.head[4] for each in ends.got[1]] == [5, 6, 7]


def test_what_leaves_together_is_bounded_and_a_piece_leaves_alone(ends: Ends) -> None:
    link = Link(keep_in(ends.posted), 0.0)
    for number in range(TOGETHER + 1):
        link.say(Say.TAKEN, number, now=1.0)
    link.post_piece(b"head", memoryview(b"piece"), 2.0)

    assert [len(parts) for parts in ends.posted] == [TOGETHER, 1, 2]
    assert link.posted_at == 2.0


def test_who_claims_to_have_taken_what_was_not_sent_is_not_believed(ends: Ends) -> None:
    ends.far[1].taken(WINDOW)  # the other end has sent nothing
    ends.far[1].send(Lane.DATA, frame(1, b"x"))
    ends.far[1].pump(1.0)
    (message,) = ends.back
    ends.back.clear()

    assert isinstance(ends.lines[1].take([memoryview(part) for part in message]), Delivery)
    assert ends.lines[1].malformed == 1
    for number in range(2 * WINDOW):
        ends.lines[1].send(Lane.DATA, frame(number, b"x"))
    ends.lines[1].pump(1.0)
    assert len(ends.posted) == WINDOW


def test_a_body_for_several_ranks_travels_once_and_before_what_refers_to_it(ends: Ends) -> None:
    body = random.Random(2).randbytes(2 * PIECE + 7)
    for line, each in zip(ends.lines.values(), copies(5, body, 3), strict=True):
        line.send(Lane.DATA, each, ends.bodies)

    ends.carry()

    (whole,) = ends.got[BODIES]
    assert (content(whole), ends.carried) == (body, len(body))
    told = [delivery for number in ends.lines for delivery in ends.got[number]]
    assert [(each.shared, each.head[4], each.body) for each in told] == [
        (whole.head[4], 5, b"own part")
    ] * 3


def test_a_body_is_forgotten_once_nothing_can_refer_to_it(ends: Ends) -> None:
    frames = copies(5, bytes(PIECE), 3)
    for line, each in zip(ends.lines.values(), frames[:2], strict=False):
        line.send(Lane.DATA, each, ends.bodies)
    ends.carry()
    ends.bodies.look()
    ends.carry()
    early = list(ends.forgotten)

    ends.bodies.look()  # it was there at the last look
    ends.carry()
    ends.lines[3].send(Lane.DATA, frames[2], ends.bodies)
    ends.carry()

    assert (early, ends.forgotten) == ([], [1])
    assert [each.head[4] for each in ends.got[BODIES]] == [1, 2]  # who comes late gets it anew


def test_a_rank_that_reads_nothing_holds_up_no_other(ends: Ends) -> None:
    for number in range(WINDOW):
        ends.lines[2].send(Lane.DATA, frame(number, b"x"))
    ends.carry(stopped=2)
    for call_id in (90, 91):
        pair = copies(call_id, bytes(PIECE), 2)
        for rank in (1, 2):
            ends.lines[rank].send(Lane.DATA, pair.pop(), ends.bodies)
        ends.carry(stopped=2)
    ends.bodies.shut()
    ends.carry(stopped=2)

    assert [each.head[4] for each in ends.got[1]] == [90, 91]
    assert (len(ends.got[2]), ends.forgotten) == (WINDOW, [])

    ends.lines[2].close()  # it has died
    ends.carry()

    assert ends.forgotten == [1, 2]


def test_another_body_of_the_same_call_is_another_body(ends: Ends) -> None:
    """As where each rank has arguments of its own."""
    for line, body in zip(ends.lines.values(), (b"a", b"b", b"c"), strict=True):
        line.send(Lane.DATA, copies(5, body * PIECE, 1)[0], ends.bodies)

    ends.carry()

    assert [content(each)[:1] for each in ends.got[BODIES]] == [b"a", b"b", b"c"]
    assert [ends.got[number][0].shared for number in ends.lines] == [1, 2, 3]


def test_neither_what_comes_for_a_stream_after_its_end_nor_a_call_that_comes_again_is_kept() -> (
    None
):
    arena = Arena.create()
    channel = SocketChannel.create(arena, 1)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    fds = {**channel.child_fds(), "control": theirs.fileno()}
    rank = RemoteRank(1, 0, {name: os.dup(fd) for name, fd in fds.items()}, 0.0)
    link = Link(lambda _: None, 0.0)
    rank.connect(link, SharedBodies(link))

    for number, kind in ((1, Kind.CALL), (1, Kind.CALL), (1, Kind.MORE)):
        channel.send(HEADER.pack(MAGIC, kind, Flag.STREAM, 1, number, 1, 16))
    rank.read_data()
    rank.hand_over(frozen=False)
    assert (rank.running, len(rank._items)) == (1, 1)
    rank.deliver(Delivery(Lane.DATA, (MAGIC, Kind.REPLY, 0, 1, 1, 1, 0), b""))
    channel.send(HEADER.pack(MAGIC, Kind.MORE, Flag.NONE, 1, 1, 1, 24))
    rank.read_data()
    rank.hand_over(frozen=False)

    assert (rank.running, rank._items) == (0, {})
    rank.close()
    channel.close_child_ends()
    channel.close()
    arena.close()
    ours.close()
    theirs.close()
