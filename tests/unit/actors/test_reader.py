"""Which thread reads the answers, with real threads and no group."""

from __future__ import annotations

import queue
import socket
import threading
import time

from phalanx.actors.calls.rank import RankTable
from phalanx.actors.calls.reader import Reader, Ticket
from phalanx.runtime import EventLoop, OwnedLock

WAIT = 10.0


def test_a_follower_that_is_served_just_as_it_is_woken_to_read_passes_the_role_on() -> None:
    """As where the group's actor reads that answer in between."""
    loop, lock, table = EventLoop(), OwnedLock(), RankTable(1)
    ours, theirs = socket.socketpair()
    reads = queue.SimpleQueue[str]()
    first, second = Ticket(), Ticket()
    follows = threading.Event()

    def on_ready(events: list[tuple[int, int]]) -> None:
        if theirs.fileno() in dict(events):
            theirs.recv(1)
            reads.put(threading.current_thread().name)

    def clock() -> float:
        if threading.current_thread() is follower:
            if follows.is_set() and not second.done:  # it has been woken
                with lock.asked():
                    reader.fulfil(second)
            follows.set()
        return time.monotonic()

    reader = Reader(loop, lock, table, on_ready, poller=None, clock=clock)
    reader.on_wake = lambda: None
    reader.watched = table.owed = 1
    reader.add(theirs.fileno())
    leader = threading.Thread(target=reader.wait, args=(first, None), name="leader")
    follower = threading.Thread(target=reader.wait, args=(second, time.monotonic() + WAIT))
    leader.start()
    ours.send(b"1")
    assert reads.get(timeout=WAIT) == "leader"
    follower.start()
    assert follows.wait(WAIT)

    with lock.asked():
        reader.fulfil(first)
    for thread in (leader, follower):
        thread.join(WAIT)
    ours.send(b"2")

    assert reads.get(timeout=WAIT) not in ("leader", follower.name)  # the event loop
    reader.close()
    loop.close()
    ours.close()
    theirs.close()
