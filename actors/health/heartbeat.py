"""Heartbeats: requests to ranks on their control sockets, answered beside their main loops.

- A request costs one packet to each rank and one back, and nothing once it is closed.
- Requests and replies do not pass the group's actor, which may be busy with deaths.
- A reply to a closed request is dropped.

The worker's side is `runtime.worker.control.Link.serve`.
"""

from __future__ import annotations

import itertools
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from phalanx.runtime import Kind, OwnedLock, Payload, Pulse

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from phalanx.runtime import Frame

HEARTBEAT_TIMEOUT = 1.0
"""Seconds for a reply, a thousand times what it takes on an idle machine."""

_NOTHING = Payload.of(None)


@dataclass(slots=True, eq=False)
class HeartbeatRequest:
    """One request to some ranks.

    Attributes:
        replies: The reply of each rank; None for a rank that has not replied by now.
        when_complete: Called once every rank has replied; maybe again, on any thread.
        close: Drops later replies.
    """

    replies: dict[int, Pulse | None]
    when_complete: Callable[[], object]
    close: Callable[[], object]

    def check_complete(self) -> None:
        """Call *when_complete* if every rank has replied."""
        if None not in self.replies.values():
            self.when_complete()


class HeartbeatClient:
    """The control sockets of one group's ranks, and the open requests. For any thread."""

    def __init__(self) -> None:
        self._lock = OwnedLock()
        self._numbers = itertools.count(1)
        self._ranks: dict[int, tuple[int, Callable[[bytes], object]]] = {}
        self._open: dict[int, HeartbeatRequest] = {}

    def attach(self, rank: int, incarnation: int, send: Callable[[bytes], object]) -> None:
        """Send requests to *rank* by *send*, which takes a packet and does not block."""
        with self._lock.asked():
            self._ranks[rank] = incarnation, send

    def detach(self, rank: int, incarnation: int) -> None:
        """Send nothing more to that incarnation; its *send* is not in use on return."""
        with self._lock.asked():
            if self._ranks.get(rank, (None, None))[0] == incarnation:
                del self._ranks[rank]

    def request(
        self, ranks: Mapping[int, int], when_complete: Callable[[], object]
    ) -> HeartbeatRequest:
        """Request heartbeats of *ranks* (rank: incarnation); detached ones do not reply.

        *when_complete* is called once all have replied, at least once, on any thread; it must not
        block.
        """
        number = next(self._numbers)
        close = partial(self._open.pop, number, None)
        replies: dict[int, Pulse | None] = dict.fromkeys(ranks)
        request = self._open[number] = HeartbeatRequest(replies, when_complete, close)
        self._send(ranks, Kind.ASK, call_id=number)
        request.check_complete()
        return request

    def tell_void(self, rank: int, incarnation: int, epoch: int) -> None:
        """Tell a rank that what it computes is void, as it is to leave its group for *epoch*."""
        self._send({rank: incarnation}, Kind.VOID, epoch=epoch)

    def part(self, rank: int, incarnation: int, epoch: int) -> None:
        """Have a rank end the connections of the process group that it leaves for *epoch*."""
        self._send({rank: incarnation}, Kind.PART, epoch=epoch)

    def tell_draining(self) -> None:
        """Tell every rank that the driver stops it in good order: it ignores SIGTERM until then."""
        ranks = {rank: known for rank, (known, _) in list(self._ranks.items()) if rank >= 0}
        self._send(ranks, Kind.DRAINING)

    def receive(self, rank: int, frame: Frame) -> None:
        """Pass *rank*'s reply on to its request."""
        request = self._open.get(frame.call_id)
        if request is None:
            frame.drop()
            return
        pulse: object = None
        with suppress(Exception):  # one that cannot be decoded is no reply
            pulse = frame.value()
        if isinstance(pulse, Pulse):
            request.replies[rank] = pulse
            request.check_complete()

    def _send(
        self, ranks: Mapping[int, int], kind: int, *, epoch: int = 0, call_id: int = 0
    ) -> None:
        packet = _NOTHING.packet(kind, epoch=epoch, call_id=call_id)
        with self._lock.asked():
            for rank, incarnation in ranks.items():
                known, send = self._ranks.get(rank, (None, None))
                if known == incarnation and send is not None:
                    with suppress(OSError):  # a full or broken socket: that rank does not reply
                        send(packet)
