"""What comes over a worker's sockets and is no message: dropped, counted, told of once."""

from __future__ import annotations

import os
import random
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support.options import Make
from tests.support.processes import wait_until
from tests.support.programs import run_python
from tests.support.workers import Echo

from phalanx.actors import Executor
from phalanx.runtime import Link
from phalanx.runtime.wire.packet_header import HEADER, MAGIC, PACKET_LIMIT, Flag, Kind
from phalanx.supervision import Intensity

WAIT = 30.0
ROOT = Path(__file__).parents[3]

DRIVER = """
from phalanx import Executor, Strategy
from tests.integration.failures.test_corrupt_messages import Vandal, suffer

with Executor(Vandal, 2, launch={'preload': ()}, strategy=Strategy.ONE_FOR_ONE) as ex:
    suffer(ex)
print("survived")
"""


class Vandal(Echo):
    """Writes to the sockets that its process has been given."""

    def speak_nonsense(self, seed: int) -> int:
        """Return how many packets have been sent that are no messages."""
        link = self._link()
        sent = 0
        for name in ("data", "control"):
            with socket.socket(fileno=os.dup(link.fds[name])) as sock:
                for packet, files in _nonsense(random.Random(seed)):
                    socket.send_fds(sock, [packet], files)
                    for file in files:
                        os.close(file)
                    sent += 1
        return sent

    def tell_badly(self, kind: int) -> None:
        """Say what a driver acts on, with a body that cannot be read."""
        link = self._link()
        head = HEADER.pack(MAGIC, kind, 0, link.epoch, 1, link.incarnation, 0)
        link.control.send(head + b"\x80\x05\x97.")

    def _link(self) -> Link:
        link = self.ctx._link
        assert link is not None
        return link


def _nonsense(chance: random.Random) -> Iterator[tuple[bytes, list[int]]]:
    """Yield packets that are no messages, and descriptors that come along."""
    whole = HEADER.pack(MAGIC, Kind.REPLY, Flag.NONE, 1, 1, 1, 0)
    yield chance.randbytes(chance.randrange(1, 200)).lstrip(b"\x48") or b"?", []
    yield whole[: chance.randrange(1, len(whole))], []
    yield whole + bytes(PACKET_LIMIT), []
    yield HEADER.pack(MAGIC + 1, Kind.REPLY, 0, 1, 1, 1, 0) + b"of another make", []
    yield HEADER.pack(MAGIC, Kind.REPLY, Flag.FILE, 1, 1, 1, 0) + bytes(8), []
    yield HEADER.pack(MAGIC, Kind.REPLY, Flag.ARENA, 1, 1, 1, 0) + b"short", []
    yield whole, [os.memfd_create("stray") for _ in range(chance.randrange(1, 5))]


def suffer(ex: Executor[Any]) -> None:
    """Have rank 0 send nonsense between calls, and see that nothing comes of it."""
    open_before = len(list(Path("/proc/self/fd").iterdir()))
    sent = 0
    for seed in range(20):
        sent += ex.call("speak_nonsense", WAIT, args=(seed,), rank=0)
        assert ex.collective_rpc("echo", WAIT, args=(seed,)) == [seed] * 2
    wait_until(lambda: ex.status().dropped_replies >= sent)
    assert ex.status().dropped_replies == sent
    assert [rank.incarnation for rank in ex.ranks] == [1, 1]
    assert len(list(Path("/proc/self/fd").iterdir())) == open_before


def test_what_is_no_message_of_a_workers_is_dropped_counted_and_told_once() -> None:
    done = run_python("-c", DRIVER, cwd=ROOT)

    assert done.stdout.endswith("survived\n"), done.stderr
    assert done.stderr.count("phalanx.foreign_packet") == 1, done.stderr


@pytest.mark.parametrize(
    "kind", [Kind.LAST_WORDS, Kind.START_FAILED, Kind.NOT_REFORMED, Kind.EVENT, Kind.PULSE]
)
def test_what_a_worker_says_and_nobody_can_read_does_not_end_the_group(
    make: Make, kind: int
) -> None:
    ex = make(Vandal, 1, intensity=Intensity(10, 60.0))

    ex.call("tell_badly", WAIT, args=(kind,), rank=0)

    echoed = ex.collective_rpc("echo", WAIT, args=(1,), retries=3)
    assert echoed == [1]
    ex.check_health(WAIT)
    assert not ex.is_failed
