"""Links of a group whose ranks are elsewhere: one process beside the driver, one beside each rank.

- To the rest of the group a rank elsewhere is one next door: it has a channel, a control socket and
  a process. Several launches may be under way at once.
- The end of the rank's process is reported once everything it had sent is there, or after a moment.
- A lost link is reported once, with what is known of it.
"""

from __future__ import annotations

import threading
from functools import partial
from typing import TYPE_CHECKING

from phalanx.runtime import Gateway, Kind, Outpost

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from phalanx.actors.group.handle import Group
    from phalanx.actors.group.worker import Worker
    from phalanx.runtime import Frame, Process, Zmq


_LAST_WORDS = 1.0  # seconds from a process's end in which its link may bring what it had sent


class Remote:
    """The link of one worker. Its methods run on the event loop's thread.

    Attributes:
        outpost: The process at the other end.
    """

    def __init__(self, worker: Worker, outpost: Outpost, links: Links) -> None:
        self.outpost = outpost
        self._worker = worker
        self._links = links
        self._said = False  # the link has told how it ended; else its process here has died
        self._ended = False  # nothing more comes over it
        self._gone = False  # the worker's process has ended
        self._gone_told = False
        self._lost = False

    def heard(self, frame: Frame) -> bool:
        """Return whether *frame* is about the link itself, and take note if so."""
        if frame.kind != Kind.LINK_ENDED:
            return False
        self._said = True
        why: str = frame.value()
        if why:
            self._lose(why)
        return True

    def ended(self) -> None:
        """Take note that nothing more comes."""
        if not self._said:
            self._lose("the process at the driver's end died")
        self._ended = True
        if self._gone:
            self._tell_gone()

    def process_gone(self) -> None:
        """Report the end of the worker's process, once everything it had sent is there."""
        self._gone = True
        if self._ended:
            self._tell_gone()
        else:
            self._links.later(self._worker, self._tell_gone)

    def outpost_gone(self, process: Process) -> None:
        """Report that the other end has died, unless the link says more about it."""
        if self._gone_told:
            return
        if why := self.outpost.why_it_left(process):
            self._lose(why)  # the driver's side may be one that no longer says anything
            return

        def tell() -> None:
            if not self._ended and not self._gone:
                status = process.status
                number = None if status is None else status.signal
                how = "" if number is None else f" by signal {number}"
                self._lose(f"the process at the rank's end died{how}")

        self._links.later(self._worker, tell)

    def _lose(self, why: str) -> None:
        if not self._lost:
            self._lost = True
            self._links.lost(self._worker, f"its link was lost: {why}")

    def _tell_gone(self) -> None:
        if not self._gone_told:
            self._gone_told = True
            self._links.gone(self._worker)


class Links:
    """The links of one group.

    Args:
        lost: Called with a worker that cannot be reached any longer, and what is known of it.
        gone: Called with a worker whose process has ended.
    """

    def __init__(
        self,
        group: Group,
        options: Zmq,
        *,
        lost: Callable[[Worker, str], None],
        gone: Callable[[Worker], None],
    ) -> None:
        self._runtime = runtime = group.runtime
        self.lost = partial(group.post, lost)
        self.gone = partial(group.post, gone)
        self._lock = threading.Lock()
        self._gateway = Gateway(
            runtime.loop,
            runtime.launcher,
            options,
            group=group.spec.name,
            on_event=group.publish,
        )

    def later(self, worker: Worker, then: Callable[[], None]) -> None:
        """Call *then* in a moment, unless *worker* has been released by then."""
        loop = self._runtime.loop
        worker.timers.append(loop.call_at(loop.time() + _LAST_WORDS, then))

    def launch(
        self, workers: Sequence[Worker], deadline: float, is_wanted: Callable[[], bool]
    ) -> None:
        """Give each of *workers* a link, whose other end has been started.

        Raises:
            RuntimeFault, OSError: one could not be; then no other end is left.
        """
        with self._lock:
            self._gateway.open(is_wanted)
            remotes = [self._equip(worker) for worker in workers]
        by_label = {remote.outpost.label: remote for remote in remotes}
        processes = self._runtime.launcher.launch(
            *(remote.outpost.launch_spec() for remote in remotes),
            on_exit=lambda process: by_label[process.label].outpost_gone(process),
            deadline=deadline,
            is_wanted=is_wanted,
        )
        for remote, process in zip(remotes, processes, strict=True):
            remote.outpost.process = process

    def close(self) -> None:
        """End the driver's side; every worker is released."""
        self._gateway.close()

    def _equip(self, worker: Worker) -> Remote:
        control = {"control": worker.control_end.fileno()}
        posting = self._gateway.berth({**worker.channel.child_fds(), **control})
        labels = worker.labels
        name = f"{labels.child}#{labels.incarnation}"
        outpost = Outpost(posting, f"{name} outpost", f"phalanx: {name} outpost", worker.epoch)
        worker.remote = remote = Remote(worker, outpost, self)
        return remote
