"""The driver's side of links, with the test as the ranks' side: who gets in, what comes of it."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
import zmq
from tests.support.gateway_peers import LONG, Driver, Joined, Rank, RankAddress, Slot
from zmq.utils import z85

from phalanx.runtime import Frame, Kind, Payload
from phalanx.runtime.remote.gateway import MessageMalformed, PeerRejected
from phalanx.runtime.remote.link import LARGEST, Lane, Link, Say
from phalanx.runtime.remote.options import Zmq
from phalanx.runtime.wire.channel import Arrival

GREETING = b"\xff" + bytes(8) + b"\x7f\3\0CURVE" + bytes(15 + 1 + 31)


def serves(slot: Slot, rank: Rank, number: int) -> None:
    slot.call(number)
    assert rank.takes_call() == number
    rank.answers(number)
    answer = slot.next()
    assert isinstance(answer, Frame)
    assert (answer.kind, answer.call_id) == (Kind.REPLY, number)


def test_calls_and_answers_cross_one_at_a_time(driver: Driver, joined: Joined) -> None:
    slot, rank = joined(driver)

    slot.call(1)
    slot.call(2)
    first, early = rank.takes_call(), rank.next(0.3)
    begun = slot.channel.page.begun
    rank.answers(1)
    second = rank.takes_call()

    assert (first, early, begun, second) == (1, None, 1, 2)
    answer = slot.next()
    assert isinstance(answer, Frame)
    assert (answer.kind, answer.call_id) == (Kind.REPLY, 1)


def test_what_arrives_together_reaches_the_driver_one_by_one(
    driver: Driver, joined: Joined
) -> None:
    slot, rank = joined(driver)
    slot.call(1)
    assert rank.takes_call() == 1
    together = Link(rank.post, 0.0)
    rank.line.attach(together)

    for kind in (Kind.ITEM, Kind.ITEM, Kind.REPLY):
        packet = Payload.of(None).packet(kind, epoch=1, call_id=1, incarnation=1)
        rank.line.send_packet(Lane.DATA, packet)
    rank.line.pump(0.0)
    together.flush()

    frames = [slot.next() for _ in range(3)]
    kinds = [frame.kind for frame in frames if isinstance(frame, Frame)]
    assert kinds == [Kind.ITEM, Kind.ITEM, Kind.REPLY]


@pytest.mark.parametrize("who", ["noise", "no key", "another key", "another client", "oversized"])
@pytest.mark.parametrize("ipc", [False, True], ids=["tcp", "ipc"])
def test_an_unknown_peer_is_rejected_and_the_ranks_are_served(
    driver_of: Callable[[Zmq], Driver], joined: Joined, who: str, ipc: bool
) -> None:
    driver = driver_of(Zmq(ipc=ipc))
    slot, rank = joined(driver)

    intrude(slot.address, who)
    intrude(slot.address, who)

    event = driver.events.get(timeout=LONG)
    assert isinstance(event, PeerRejected)
    assert event.group == "tp"
    serves(slot, rank, 1)
    assert driver.events.empty()  # told once


def intrude(at: RankAddress, who: str) -> None:
    """Connect as somebody who has no business there, until turned away."""
    invitation = at.invitation
    if who in ("noise", "oversized"):
        family = socket.AF_UNIX if invitation.endpoint.startswith("ipc") else socket.AF_INET
        with socket.socket(family) as raw:
            raw.settimeout(LONG)
            address = invitation.endpoint.partition("://")[2].replace("@", "\0")
            host, _, port = address.partition(":")
            raw.connect(address if family == socket.AF_UNIX else (host, int(port)))
            lie = GREETING + b"\6" + (1 << 62).to_bytes(8, "big")  # a command of 4 EiB
            try:
                raw.sendall(b"GET / HTTP/1.1\r\n" * 64 if who == "noise" else lie)
                while raw.recv(1 << 16):
                    pass
            except ConnectionError:
                pass
        return
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    peer = context.socket(zmq.DEALER)
    peer.setsockopt(zmq.LINGER, 0)
    peer.setsockopt(zmq.RECONNECT_IVL, -1)
    peer.setsockopt(zmq.ROUTING_ID, invitation.route)
    if who != "no key":
        public, secret = zmq.curve_keypair()
        server = invitation.server_key.encode()
        if who == "another key":
            server = zmq.curve_keypair()[0]
        peer.setsockopt(zmq.CURVE_SERVERKEY, server)
        peer.setsockopt(zmq.CURVE_PUBLICKEY, public)
        peer.setsockopt(zmq.CURVE_SECRETKEY, secret)
    failures = (
        zmq.EVENT_HANDSHAKE_FAILED_AUTH
        | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
        | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
        | zmq.EVENT_DISCONNECTED
    )
    monitor = peer.get_monitor_socket(failures)
    peer.connect(invitation.endpoint)
    with contextlib.suppress(zmq.Again):  # it may have been refused by now
        peer.send_multipart([b"\1" + bytes(17)], zmq.DONTWAIT)
    assert monitor.poll(int(LONG * 1000)), "it was let in"
    peer.disable_monitor()
    monitor.close()
    peer.close()
    context.term()


def test_a_key_opens_once(driver: Driver, rank_of: Callable[..., Rank], joined: Joined) -> None:
    slot, _ = joined(driver)

    thief = rank_of(slot.address, route=b"\1thief", says_open=False)
    thief.greets()

    assert isinstance(driver.events.get(timeout=LONG), PeerRejected)
    assert slot.next(0.2) is Arrival.NOTHING


def test_one_ranks_key_does_not_speak_for_another(
    driver: Driver, rank_of: Callable[..., Rank]
) -> None:
    mine, other = driver.add_rank(), driver.add_rank()
    impostor = rank_of(mine.address, route=other.address.invitation.route, says_open=False)

    impostor.line.say(Say.OPEN, now=0.0)
    impostor.greets()

    assert isinstance(driver.events.get(timeout=LONG), MessageMalformed)
    assert other.next(0.2) is Arrival.NOTHING
    assert mine.next(0.0) is Arrival.NOTHING


def test_a_relay_does_not_speak_for_a_rank_behind_another(driver: Driver, joined: Joined) -> None:
    mine, rank = joined(driver)
    other, _ = joined(driver)

    rank.line.number = other.address.number
    rank.answers(1)

    assert isinstance(driver.events.get(timeout=LONG), MessageMalformed)
    assert other.next(0.2) is Arrival.NOTHING
    assert mine.next(0.0) is Arrival.NOTHING


def test_messages_that_are_none_are_dropped_counted_and_told_once(
    driver: Driver, rank_of: Callable[..., Rank]
) -> None:
    slot = driver.add_rank()
    rank = rank_of(slot.address)
    line = rank.line.number.to_bytes(8, "little")
    packet = bytes([Say.PACKET, Lane.DATA]) + line + bytes(24)
    for parts in ([b""], [b"x" * 34], [packet], [packet + b"no"], [packet + bytes(24)], [b""] * 9):
        rank.socket.send_multipart(parts)
    rank.greets()

    assert isinstance(slot.next(), Frame)
    assert isinstance(driver.events.get(timeout=LONG), MessageMalformed)
    assert driver.events.empty()


def test_more_than_any_message_of_ours_cuts_the_connection(
    driver: Driver, rank_of: Callable[..., Rank]
) -> None:
    slot = driver.add_rank()
    rank = rank_of(slot.address)

    rank.socket.send_multipart([bytes([Say.PIECE, 0]) + bytes(32), bytes(LARGEST + 1)])

    assert "connection was closed" in slot.why_it_ended()


def test_what_was_sent_before_the_end_arrives_before_it(
    driver: Driver, rank_of: Callable[..., Rank]
) -> None:
    slot = driver.add_rank()
    rank = rank_of(slot.address)
    for number in range(10):
        rank.answers(number)
    rank.socket.setsockopt(zmq.LINGER, 5000)

    rank.close()

    assert "connection was closed" in slot.why_it_ended()
    got = [slot.take() for _ in range(11)]
    assert [each.call_id for each in got if isinstance(each, Frame)] == list(range(10))
    assert got[10] is Arrival.END


def test_a_rank_that_ends_has_the_others_asked_and_kept_from_what_none_has_begun(
    driver: Driver, joined: Joined
) -> None:
    slots, ranks = zip(*(joined(driver) for _ in range(3)), strict=True)
    for slot, rank in zip(slots, ranks, strict=True):
        slot.call(7)
        assert rank.takes_call() == 7

    ranks[0].line.say(Say.END, 0, 0, now=0.0)  # it had not begun it
    questions = [rank.next() for rank in ranks[1:]]
    for rank in ranks[1:]:
        rank.line.say(Say.TOLD, 1, 0, now=0.0)
    recalls = [rank.next() for rank in ranks[1:]]
    ranks[1].line.say(Say.TOLD, 1, 0, now=0.0)
    ranks[2].line.say(Say.TOLD, 1, 7, now=0.0)  # it began it just then

    assert questions == [(Say.ASK, 1, 0)] * 2
    assert recalls == [(Say.RECALL, 1, 0)] * 2
    assert slots[0].why_it_ended() == ""
    assert [slot.channel.page.begun for slot in slots] == [0, 0, 7]


def test_after_a_ranks_end_nothing_collective_is_handed_over_until_the_driver_has_judged_it(
    driver: Driver, joined: Joined
) -> None:
    (gone, dying), (stays, rank) = joined(driver), joined(driver)

    dying.line.say(Say.END, 0, 0, now=0.0)
    assert gone.why_it_ended() == ""
    stays.call(8, collective=False)
    alone = rank.takes_call()
    rank.answers(8)
    stays.call(9)
    early = rank.next(0.3)
    gone.close()

    assert (alone, early) == (8, None)
    assert rank.takes_call() == 9


def test_one_that_answers_nobody_asks_in_time_is_taken_at_its_word_before(
    driver: Driver, joined: Joined
) -> None:
    (gone, dying), (silent, rank) = joined(driver), joined(driver)
    for slot, at in ((gone, dying), (silent, rank)):
        slot.call(3)
        assert at.takes_call() == 3

    dying.line.say(Say.END, 0, 0, now=0.0)

    assert gone.why_it_ended() == ""
    assert (gone.channel.page.begun, silent.channel.page.begun) == (0, 3)


def test_its_secrets_are_in_no_argument_and_no_environment(driver: Driver) -> None:
    slot = driver.add_rank()
    secret = slot.address.invitation.secret
    needles = [secret, secret.hex().encode(), z85.encode(secret)]

    for process in Path("/proc").iterdir():
        for name in ("cmdline", "environ"):
            try:
                content = (process / name).read_bytes()
            except OSError:
                continue
            assert not any(needle in content for needle in needles)
