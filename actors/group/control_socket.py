"""The driver's end of a worker's control socket: reads what it sends, and sends it its state.

What comes is heartbeats, which are answered on the event loop's thread, and messages of the start
and end of a worker, which go to the group's actor.
"""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING

from phalanx.runtime import Frame, Kind, Payload, receive, send

if TYPE_CHECKING:
    from .handle import Group
    from .worker import Worker


def receive_all(group: Group, worker: Worker, _events: int) -> None:
    """Pass on the messages of *worker* that have come. On the event loop's thread."""
    remote = worker.remote
    while True:
        try:
            frame = receive(worker.control)
        except BlockingIOError:
            return
        except ConnectionResetError:
            continue
        except OSError:
            break
        if frame is None:
            group.post(group.plane.count_foreign, worker.rank, worker.incarnation)
        elif not isinstance(frame, Frame):
            break
        elif frame.kind == Kind.PULSE:
            group.heartbeats.receive(worker.rank, frame)
        elif remote is None or not remote.heard(frame):
            group.tell((worker, frame))
    if worker.watch is not None:
        worker.watch.cancel()
        if remote is not None:
            remote.ended()


def send_state(worker: Worker) -> None:
    """Send *worker* the state that it restores, if any, which it looks for after `on_start`."""
    if worker.restore_point is not None:
        file = worker.restore_point.file
        payload = Payload.in_file(file, os.fstat(file).st_size)
        packet = payload.packet(Kind.RESTORE, epoch=worker.epoch, call_id=0)
        send_if_alive(worker, packet, file)


def send_if_alive(worker: Worker, packet: bytes, file: int | None) -> None:
    """Send; where a spare has just died its end is on the way to the actor, and is that rank's."""
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        send(worker.control, packet, file)
