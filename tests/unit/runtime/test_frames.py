"""The decoder against whatever may arrive."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import pickle
import socket
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from phalanx.runtime.memory.arena import SLOTS, Arena, Borrower
from phalanx.runtime.memory.mapping import COPY_LIMIT, KEPT_MAPPED, MOST_MAPPED, ArenaReader
from phalanx.runtime.wire import packet_encoder
from phalanx.runtime.wire.channel import SocketChannel
from phalanx.runtime.wire.codec import encode
from phalanx.runtime.wire.packet_decoder import (
    Frame,
    bundle,
    call_ids_of,
    receive,
    send,
    unbundle,
    unpack,
)
from phalanx.runtime.wire.packet_encoder import Payload, call_packet, write_file
from phalanx.runtime.wire.packet_header import (
    EVERY_RANK,
    HEADER,
    INLINE_LIMIT,
    MAGIC,
    PACKET_LIMIT,
    Flag,
    Kind,
)
from phalanx.runtime.worker.inbox import Inbox
from phalanx.supervision import MessageTooLarge

EASY = settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
ARENA_SIZE = 1 << 22
# Words that mean something to the decoder, so that chance does not have to find them.
WORDS = st.sampled_from([0, 1, 2, 255, 256, 4096, 1 << 22, 1 << 31, 1 << 62, (1 << 64) - 1])

UNREADABLE = (ValueError, pickle.UnpicklingError, EOFError, IndexError, KeyError)


class Wire:
    """Two ends of a socket with an arena behind the one and its reader behind the other."""

    def __init__(self, arena_size: int = ARENA_SIZE) -> None:
        self.ours, self.theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.theirs.setblocking(False)
        self.arena = Arena.create(arena_size)
        counters = memoryview(bytearray(8 * SLOTS)).cast("Q")
        self.borrower = Borrower(counters)
        self.reader = ArenaReader(os.dup(self.arena.fd), counters)

    def send(self, value: Any, *, use_arena: bool = True) -> int:
        """Send *value*; return the flags it was sent with."""
        payload = Payload.of(encode(value, "it"), self.arena if use_arena else None)
        try:
            payload.lend(self.borrower)
            send(self.ours, payload.packet(Kind.CALL, epoch=1, call_id=7), payload.file)
            return payload.flags
        finally:
            payload.close()

    def receive(self) -> Frame:
        frame = receive(self.theirs, self.reader)
        assert isinstance(frame, Frame)
        return frame

    def arrived(self, content: bytes, near: bytes = b"") -> Frame:
        """Return a frame whose body is *content*, in the arena, before what is *near* in it."""
        extent = self.arena.place(len(content))
        assert extent is not None
        extent.write([memoryview(content)], [0])
        extent.lend(self.borrower)
        extent.let_go()
        tail = struct.pack("<IQQ", extent.slot, extent.start, len(content))
        frame = unpack(header(Flag.ARENA) + tail + near, [], self.reader)
        assert frame is not None
        return frame

    @property
    def is_lent(self) -> bool:
        return any(self.borrower.holds(slot) for slot in range(SLOTS))

    def close(self) -> None:
        self.ours.close()
        self.theirs.close()
        self.arena.close()
        self.reader.close()


@pytest.fixture
def wire() -> Iterator[Wire]:
    wire = Wire()
    yield wire
    wire.close()


def descriptors() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def header(flags: int, kind: int = Kind.CALL, magic: int = MAGIC) -> bytes:
    return HEADER.pack(magic, kind, flags, 1, 7, 1, 0)


@pytest.mark.parametrize("use_arena", [True, False])
@pytest.mark.parametrize("size", [0, 1, 20_000, INLINE_LIMIT + 1, 200_000, 1 << 20])
def test_what_is_sent_arrives(wire: Wire, size: int, use_arena: bool) -> None:
    value: dict[str, Any] = {
        "bytes": b"x" * size,
        "array": np.arange(size, dtype=np.uint8),
        "text": "y" * size,
    }

    flags = wire.send(value, use_arena=use_arena)
    arrived = wire.receive().value()

    assert arrived["bytes"] == value["bytes"]
    assert arrived["text"] == value["text"]
    assert np.array_equal(arrived["array"], value["array"])
    assert flags == (0 if size <= 20_000 else Flag.ARENA if use_arena else Flag.FILE)


@pytest.mark.parametrize("use_arena", [True, False])
@pytest.mark.parametrize("kind", ["f8", ">i4", "M8[ns]", "i4, f8"])
def test_arrays_of_any_type_travel_in_a_pickle_too_large_for_the_packet(
    wire: Wire, kind: str, use_arena: bool
) -> None:
    array = np.resize(np.arange(256, dtype=np.uint8), 69 * 1024).view(kind).reshape(2, -1)

    wire.send([array, array[::-1].copy()], use_arena=use_arena)
    first, second = wire.receive().value()

    assert (first.dtype, first.tobytes()) == (array.dtype, array.tobytes())
    assert (second.dtype, second.tobytes()) == (array.dtype, array[::-1].tobytes())


def test_thousands_of_buffers_are_one_message(wire: Wire) -> None:
    value = [np.full(16 * 1024, number % 251, dtype=np.uint8) for number in range(5000)]

    wire.send(value)
    arrived = wire.receive().value()

    assert all(int(each[0]) == number % 251 for number, each in enumerate(arrived))


def test_what_was_decoded_where_it_lay_stays_when_its_place_is_used_again(wire: Wire) -> None:
    values = [bytes([number]) * 300_000 for number in range(3)]
    read: list[bytes] = []

    for value in values:
        wire.send(value)
        read.append(wire.receive().value())
        assert not wire.is_lent

    assert read == values


def test_a_place_behind_what_stays_mapped_is_read_too() -> None:
    with contextlib.closing(Wire(4 * KEPT_MAPPED)) as wire:
        fills = wire.arena.place(KEPT_MAPPED)
        wire.send(b"x" * 300_000)
        frame = wire.receive()

        assert fills is not None
        assert wire.is_lent
        assert frame.value() == b"x" * 300_000
        assert not wire.is_lent


def test_a_forked_child_does_not_look_where_its_parent_has_mapped(wire: Wire) -> None:
    wire.send(b"x" * 300_000)
    assert wire.receive().value() == b"x" * 300_000

    child = os.fork()
    if not child:
        os._exit(wire.reader.in_place(0, 4096) is not None)

    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_body_in_pieces_is_one_packet_whether_or_not_there_is_room() -> None:
    arena = Arena.create(ARENA_SIZE)
    channel = SocketChannel.create(arena, 1)
    worker = socket.socket(fileno=os.dup(channel.child_fds()["data"]))
    changes = bytearray(b"y" * 10_000)
    value = [b"x" * 70_000, changes]
    payload = Payload.of(encode(value, "it"), arena)
    sent = 0

    def received() -> Any:
        frame = receive(worker)
        assert isinstance(frame, Frame)
        return frame.value()

    try:
        head = call_packet(payload, Flag.NONE, 1, 7, 0, EVERY_RANK)
        while channel.send(head, None, payload.rest):
            sent += 1
        changes[:] = bytes(10_000)  # what has been packed stays

        assert len(payload.rest) > 1
        assert sent > 0
        hello = receive(worker)
        assert isinstance(hello, Frame)
        for _ in range(sent):
            assert received() == [b"x" * 70_000, b"y" * 10_000]
        assert channel.flush() == []
        assert received() == [b"x" * 70_000, b"y" * 10_000]
    finally:
        worker.close()
        channel.close()
        arena.close()


@pytest.mark.parametrize("drop", [True, False])
def test_an_unread_message_is_given_back(wire: Wire, drop: bool) -> None:
    wire.send(b"x" * 100_000)
    frame = wire.receive()

    assert wire.is_lent
    if drop:
        frame.drop()
    del frame

    assert not wire.is_lent


def test_a_packet_that_was_cut_is_no_frame(wire: Wire) -> None:
    wire.ours.send(header(0) + b"x" * (PACKET_LIMIT + 1))
    wire.send("next")

    assert receive(wire.theirs, wire.reader) is None
    assert wire.receive().value() == "next"


def test_too_many_descriptors_are_closed(wire: Wire) -> None:
    before = descriptors()
    files = [os.memfd_create("x") for _ in range(40)]
    rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack(f"<{len(files)}i", *files))
    wire.ours.sendmsg([header(Flag.FILE) + struct.pack("<Q", 10)], [rights])
    for file in files:
        os.close(file)

    assert receive(wire.theirs, wire.reader) is None
    assert descriptors() == before


@pytest.mark.parametrize("read", [True, False])
def test_messages_in_files_take_few_descriptors_however_many_are_kept(
    wire: Wire, read: bool
) -> None:
    before = descriptors()
    count = MOST_MAPPED + 40
    kept: list[Any] = []
    frame: Any = None
    array: Any = None

    for number in range(count):
        wire.send(np.full(COPY_LIMIT + 1, number % 251, dtype=np.uint8), use_arena=False)
        frame = wire.receive()
        kept.append(frame.value() if read else frame)

    assert descriptors() <= before + MOST_MAPPED
    arrays = kept if read else [frame.value() for frame in kept]
    for number, array in enumerate(arrays):
        np.add(array, 1, out=array)  # a copy may be written to like a mapping
        assert int(array[0]) == int(array[-1]) == number % 251 + 1
    frame = array = None
    del arrays
    kept.clear()
    assert descriptors() == before


@pytest.mark.parametrize(
    ("seals", "said", "why"),
    [(fcntl.F_SEAL_GROW, 4096, "not sealed"), (fcntl.F_SEAL_SHRINK, 4097, "smaller")],
)
def test_a_file_that_could_shrink_or_is_smaller_than_it_says_is_not_mapped(
    wire: Wire, seals: int, said: int, why: str
) -> None:
    file = os.memfd_create("x", os.MFD_ALLOW_SEALING)
    os.ftruncate(file, 4096)
    fcntl.fcntl(file, fcntl.F_ADD_SEALS, seals)
    send(wire.ours, header(Flag.FILE) + struct.pack("<Q", said), file)
    os.close(file)

    with pytest.raises(ValueError, match=why):
        wire.receive().value()


def test_frames_in_a_row_share_a_packet_and_keep_their_order(wire: Wire) -> None:
    wire.send("x" * 100_000)  # its frame says where it lies
    far = wire.theirs.recv(PACKET_LIMIT)
    near = [Payload.of(encode(n, "it")).packet(Kind.CALL, epoch=1, call_id=n) for n in range(1, 16)]

    frame = unpack(bundle([*near, far]), [], wire.reader)
    assert frame is not None
    frames = unbundle(frame, wire.reader)

    assert frames is not None
    assert [each.value() for each in frames] == [*range(1, 16), "x" * 100_000]
    assert [each.call_id for each in frames] == [*range(1, 16), 7]
    assert call_ids_of(bundle([*near, far])) == [*range(1, 16), 7]
    assert call_ids_of(near[3]) == [4]


@EASY
@given(st.integers(0, 300), st.binary(max_size=400), st.integers(0, 400))
def test_a_row_that_chance_made_up_is_foreign_at_worst(
    wire: Wire, count: int, junk: bytes, cut: int
) -> None:
    good = bundle([header(0) + b"\x80\x05N."] * 3)[HEADER.size :]
    for body in (junk, good[:cut], good + junk, junk + good):
        frame = unpack(HEADER.pack(MAGIC, Kind.BUNDLE, 0, 0, 0, 0, count) + body, [], wire.reader)
        assert frame is not None

        frames = unbundle(frame, wire.reader)

        assert frames is None or len(frames) == count


@EASY
@given(st.binary(max_size=300))
def test_what_stays_in_the_packet_may_be_anything(wire: Wire, near: bytes) -> None:
    # A pickle is code, and random bytes may be one: what follows the table begins with no opcode.
    table = struct.pack("<Q", len(near)) if near else b""
    frame = wire.arrived(b"\xff" * 64, table + near + b"\xff")

    with pytest.raises(UNREADABLE):
        frame.value()

    assert not wire.is_lent


@EASY
@given(
    st.one_of(
        st.binary(max_size=200),
        st.builds(
            lambda flags, kind, body: header(flags, kind) + body,
            st.integers(0, 255),
            st.integers(0, 255),
            st.binary(max_size=64),
        ),
    ),
    st.integers(0, 3),
    st.booleans(),
)
def test_no_packet_makes_the_decoder_raise_or_leak(
    wire: Wire, packet: bytes, files: int, readable: bool
) -> None:
    before = descriptors()
    fds = [os.memfd_create("x") for _ in range(files)]

    frame = unpack(packet, fds, wire.reader if readable else None)

    if frame is not None:
        assert packet[:2] == struct.pack("<H", MAGIC)
        frame.drop()
    assert descriptors() == before


@EASY
@given(
    slot=st.one_of(WORDS.filter(lambda w: w < 1 << 32), st.integers(0, (1 << 32) - 1)),
    start=WORDS,
    size=WORDS,
)
def test_a_place_that_chance_made_up_is_an_error_at_worst(
    wire: Wire, slot: int, start: int, size: int
) -> None:
    packet = header(Flag.ARENA) + struct.pack("<IQQ", slot, start, size)
    frame = unpack(packet, [], wire.reader)
    assert frame is not None

    # Nothing but zeros lies there, so there is no message to be found.
    with pytest.raises(ValueError, match=r"no place|parts"):
        frame.value()


@EASY
@given(
    count=st.one_of(WORDS, st.integers(0, 8)),
    entries=st.lists(st.tuples(WORDS, WORDS), max_size=4),
    rest=st.binary(max_size=64),
)
def test_a_table_that_chance_made_up_is_an_error_at_worst(
    wire: Wire, count: int, entries: list[tuple[int, int]], rest: bytes
) -> None:
    content = struct.pack("<Q", count) + b"".join(struct.pack("<QQ", *e) for e in entries)
    # A pickle is code, and random bytes may be one: here only what must fail is allowed to follow.
    frame = wire.arrived(content + b"\xff" + rest)

    with pytest.raises(UNREADABLE):
        frame.value()

    assert not wire.is_lent


def test_a_worker_drops_what_is_no_frame_and_serves_on(wire: Wire) -> None:
    told: list[bool] = []
    wire.theirs.setblocking(True)
    inbox = Inbox(wire.theirs, wire.reader, lambda: told.append(True))

    wire.ours.send(b"junk")
    wire.ours.send(header(0, magic=1) + b"more junk")
    wire.ours.send(header(255) + b"junk")
    wire.send("call")
    frame = inbox.take()

    assert frame is not None
    assert frame.value() == "call"
    assert told == [True]


def test_a_packet_that_is_refused_where_there_is_no_room_holds_up_none_after_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(_: int) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    arena = Arena.create()
    with contextlib.closing(SocketChannel.create(arena, 1)) as channel:
        sent = 0
        monkeypatch.setattr(os, "dup", refuse)
        with pytest.raises(OSError, match="Too many"):  # noqa: PT012  # which one is the kernel's choice
            while channel.send(bytes(60_000), 0):
                sent += 1

        assert sent > 0
        assert not channel.backed_up
    arena.close()


def test_a_call_that_arrives_again_is_dropped_with_its_memory(wire: Wire) -> None:
    wire.theirs.setblocking(True)
    inbox = Inbox(wire.theirs, wire.reader, lambda: None)
    small = [HEADER.pack(MAGIC, Kind.CALL, Flag.NONE, 1, number, 1, 0) for number in range(1, 6)]

    wire.ours.send(small[0])
    wire.ours.send(small[0])
    wire.ours.send(bundle(small[:4]))
    wire.ours.send(bundle(small[2:]))
    wire.send(bytes(300_000))  # call 7
    wire.send(bytes(300_000))
    wire.ours.send(header(0, Kind.STOP))
    taken = [inbox.take() for _ in range(7)]

    assert [(each.kind, each.call_id) for each in taken if each is not None] == [
        *[(Kind.CALL, number) for number in (1, 2, 3, 4, 5, 7)],
        (Kind.STOP, 7),
    ]
    assert taken[5] is not None
    taken[5].drop()
    assert not wire.is_lent


def test_what_comes_for_a_stream_after_its_end_is_not_kept(wire: Wire) -> None:
    wire.theirs.setblocking(True)
    inbox = Inbox(wire.theirs, wire.reader, lambda: None)

    for number in range(1, 10):
        for kind in (Kind.CALL, Kind.MORE):
            wire.ours.send(HEADER.pack(MAGIC, kind, Flag.NONE, 1, number, 1, 16))
        inbox.take()
        assert inbox.granted(number, 0) == 16
        inbox.forget(number)
        for kind in (Kind.MORE, Kind.CLOSE):
            wire.ours.send(HEADER.pack(MAGIC, kind, Flag.NONE, 1, number, 1, 24))

    assert (len(inbox._granted), len(inbox._begun)) == (0, 0)


def test_memory_that_ends_in_the_middle_of_a_message_is_free_before_the_rest_is_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    files: list[int] = []

    def refuse(file: int, *_: object) -> None:
        files.append(file)
        raise OSError(errno.ENOMEM, "no memory")

    def measure(size: int) -> int:
        return size - any(Path(f"/proc/self/fd/{file}").is_symlink() for file in files)

    monkeypatch.setattr(packet_encoder, "write_all", refuse)
    monkeypatch.setattr(packet_encoder, "writable_bytes", measure)

    with pytest.raises(MessageTooLarge) as refused:
        write_file([memoryview(b"four")], [0], 4)

    assert files
    assert refused.value.limit == 4
