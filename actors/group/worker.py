"""`Worker`: the driver's record of one incarnation of one rank, with its control socket.

The control socket carries all messages but calls and answers. No other process can connect
to it; the driver's end is closed in forks; packets that arrived before its end are read.
"""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from phalanx.cluster import RemoteProcess
from phalanx.runtime import Frame, Kind, Lost, Payload, read_crash_output, receive, send

if TYPE_CHECKING:
    import socket

    from phalanx.actors.checkpoint.snapshot_store import RestorePoint
    from phalanx.actors.remote.links import Remote
    from phalanx.runtime import (
        Lease,
        Process,
        RemoteFailure,
        SocketChannel,
        Timer,
        Watch,
        WorkerLabels,
        WorkerOutput,
    )

    from .handle import Group

_LAST_LINES = 0.1  # seconds to have a dead rank's last lines read before its report is cut


@dataclass(slots=True, eq=False)
class Worker:
    """One incarnation of one rank, as the driver holds it.

    Attributes:
        rank: Below 0 for a spare, until it takes a rank.
        released: Everything that it held in the driver has been given back; a message about it is
            void from then on.
        swept: Nothing is left of what its process left behind.
        asked: A stop was requested, so its exit is no failure.
        forced: Whether that was by force: the calls that it runs are ended, which is reported.
        hung: Why it is being killed for hanging; empty otherwise.
        is_cut_off: Its link was lost, for which it is being killed.
        broken: What happened to its device, or its process group, or how it failed to be re-formed,
            for which it is being killed; empty otherwise.
        out_of_step: It is being ended so that the group can be formed anew.
        killed_at: When it was first sent SIGKILL by us; 0.0 for never.
        abandoned: It withstood that, and is no longer waited for.
        left: The last epoch for which it has left the process group of the one before.
        voided: The last epoch for which it has noted that what it computes is void.
        order: To leave its process group for the next; sent when all that are kept have noted that.
        restore_point: The state that it restores; None if it begins anew.
        restoring: When it began to restore it; 0.0 for not yet.
        threads: Its threads as the kernel saw them when it was found hanging.
        words_end: Where its stacks begin, behind its last words.
        failure: The exception of its start, or the one that ended it, once reported.
        remote: Its link, if it shares no memory with the driver.
    """

    rank: int
    incarnation: int
    epoch: int
    labels: WorkerLabels
    channel: SocketChannel
    control: socket.socket
    control_end: socket.socket
    output: WorkerOutput
    started_at: float
    lease: Lease | None = None
    process: Process | RemoteProcess | None = None
    watch: Watch | None = None
    attached: bool = False
    ready: bool = False
    released: bool = False
    swept: bool = False
    asked: bool = False
    forced: bool = False
    hung: str = ""
    is_cut_off: bool = False
    broken: str = ""
    out_of_step: bool = False
    killed_at: float = 0.0
    abandoned: bool = False
    left: int = 0
    voided: int = 0
    order: bytes | None = None
    restore_point: RestorePoint | None = None
    restoring: float = 0.0
    threads: str = ""
    words_end: int | None = None
    failure: RemoteFailure | None = None
    remote: Remote | None = None
    timers: list[Timer] = field(default_factory=list["Timer"])

    @property
    def node(self) -> int | None:
        """The number of its node; None if that is this machine, or it has no process."""
        return self.process.node if isinstance(self.process, RemoteProcess) else None

    @property
    def fault(self) -> str:
        """That for which it is being killed (*broken*), or was by its node; empty for none."""
        there = self.process.broken if isinstance(self.process, RemoteProcess) else ""
        return self.broken or there

    @property
    def lost(self) -> Lost:
        """What was lost with it."""
        if isinstance(self.process, RemoteProcess) and self.process.is_lost:
            return Lost.NODE
        return Lost.LINK if self.is_cut_off else Lost.RANK

    @property
    def has_ended(self) -> bool:
        """Whether the exit status of its process is known."""
        return self.process is not None and self.process.status is not None

    def who(self) -> dict[str, Any]:
        """Return its identity, as the fields that events of a worker share."""
        return {
            "child": self.labels.child,
            "group": self.labels.group,
            "rank": self.rank,
            "incarnation": self.incarnation,
            "epoch": self.epoch,
            "pid": self.labels.pid or None,
        }

    def worker_fds(self) -> dict[str, int]:
        """Return the far ends of the way to it: a worker of this machine inherits them, by name."""
        return {"control": self.control_end.fileno(), **self.channel.child_fds()}

    def close_child_ends(self) -> None:
        """Release the resources that only the process uses; it was started or never will be."""
        self.control_end.close()
        self.channel.close_child_ends()
        if self.remote is not None:
            self.remote.close_ends()
        if self.remote is None or self.remote.output is None:
            self.output.close_child_ends()

    def on_control_readable(self, group: Group, _events: int) -> None:
        """Pass on the messages of its control socket; on the event loop's thread.

        Heartbeats are noted at once; what else concerns its start and end is the actor's.
        """
        while True:
            try:
                frame = receive(self.control)
            except BlockingIOError:
                return
            except ConnectionResetError:
                continue
            except OSError:
                break
            if frame is None:
                group.post(group.plane.count_foreign_packet, self.rank, self.incarnation)
            elif not isinstance(frame, Frame):
                break
            elif frame.kind == Kind.PULSE:
                group.heartbeats.receive(self.rank, frame)
            elif self.remote is None or not self.remote.handle_frame(frame):
                group.tell((self, frame))
        if self.watch is not None:
            self.watch.cancel()
            if self.remote is not None:
                self.remote.ended()

    def send(self, packet: bytes, file: int | None) -> None:
        """Send on its control socket; where it has died its end is on the way to the actor."""
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            send(self.control, packet, file)

    def send_state(self) -> None:
        """Send the state that it restores, if any, which it looks for after `on_start`."""
        if self.restore_point is not None:
            file = self.restore_point.file
            payload = Payload.in_file(file, os.fstat(file).st_size)
            self.send(payload.packet(Kind.RESTORE, epoch=self.epoch, call_id=0), file)

    def stacks(self) -> str:
        """Return what it wrote of its stacks when it was killed for hanging; empty for nothing."""
        if self.words_end is None:
            return ""
        if isinstance(self.process, RemoteProcess):
            threads, stacks = self.process.threads, self.process.stacks
        else:
            threads, stacks = self.threads, read_crash_output(self.output.faults, self.words_end)
        return f"{threads}\n\n{stacks}".strip()

    def last_lines(self) -> Any:
        """Return what it wrote last, once that has been read."""
        with contextlib.suppress(OSError):
            self.output.drain(time.monotonic() + _LAST_LINES)
        tail = self.output.tail(self.words_end)
        if isinstance(self.process, RemoteProcess):
            return replace(tail, last_words=self.process.last_words)
        return tail
