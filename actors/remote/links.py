"""Links of a group whose ranks are elsewhere: one process beside the driver, one beside each rank.

- To the rest of the group a rank elsewhere is one next door: it has a channel, a control socket and
  a process. Several launches may be under way at once.
- On a cluster the process beside each rank is started by the rank's node, with the rank.
- The end of the rank's process is reported once everything it had sent is there, or after a moment.
- A lost link is reported once, with what is known of it.
"""

from __future__ import annotations

import threading
from dataclasses import asdict, replace
from functools import partial
from typing import TYPE_CHECKING

from phalanx.cluster import RankLaunch, RankLink
from phalanx.runtime import Gateway, Kind, Outpost

from .far_output import FarOutput

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from phalanx.actors.group.handle import Group
    from phalanx.actors.group.worker import Worker
    from phalanx.cluster import FarProcess, NodePool, Output
    from phalanx.runtime import Frame, LaunchSpec, Posting, Process, Zmq


_LAST_WORDS = 1.0  # seconds from a process's end in which its link may bring what it had sent


class Remote:
    """The link of one worker. Its methods run on the event loop's thread.

    Attributes:
        outpost: The process at the other end; None if a node has it.
        output: What its worker on a node has written; None if it is on this machine.
    """

    def __init__(self, worker: Worker, outpost: Outpost | None, links: Links) -> None:
        self.outpost = outpost
        self._worker = worker
        self._links = links
        self.output = None if outpost is not None else FarOutput(worker.output)
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
        if self._gone_told or self.outpost is None:
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

    def close_ends(self) -> None:
        """Let go of what only processes of this machine use; they run, or never will."""
        if self.outpost is not None:
            self.outpost.close_ends()

    def bury(self) -> None:
        """End the other end, whose worker is gone."""
        if self.output is not None:
            self.output.close()
        if self.outpost is not None:
            self.outpost.bury()

    def _lose(self, why: str) -> None:
        if not self._lost:
            self._lost = True
            self._links.lost(self._worker, f"its link was lost: {why}")

    def _tell_gone(self) -> None:
        if not self._gone_told:
            self._gone_told = True
            self._links.gone(self._worker)


class Links:
    """The links of one group on this machine.

    Args:
        options: Returns how they are to be; called at the first start.
        lost: Called with a worker that cannot be reached any longer, and what is known of it.
        gone: Called with a worker whose process has ended.
    """

    def __init__(
        self,
        group: Group,
        options: Callable[[], Zmq],
        *,
        lost: Callable[[Worker, str], None],
        gone: Callable[[Worker], None],
    ) -> None:
        self._group = group
        self._runtime = group.runtime
        self._options = options
        self.lost = partial(group.post, lost)
        self.gone = partial(group.post, gone)
        self._lock = threading.Lock()
        self._gateway: Gateway | None = None

    def later(self, worker: Worker, then: Callable[[], None]) -> None:
        """Call *then* in a moment, unless *worker* has been released by then."""
        loop = self._runtime.loop
        worker.timers.append(loop.call_at(loop.time() + _LAST_WORDS, then))

    def launch(
        self,
        workers: Sequence[Worker],
        specs: Sequence[LaunchSpec],
        *,
        on_exit: Callable[[Process | FarProcess], None],
        deadline: float,
        is_wanted: Callable[[], bool],
    ) -> Sequence[Process | FarProcess]:
        """Start *workers* as *specs* say, each with a link.

        Raises:
            RuntimeFault, OSError: one could not be started; then nothing is left of any.
        """
        remotes: dict[str, Remote] = {}
        outposts: list[Outpost] = []
        for worker, posting in zip(workers, self._post(workers, is_wanted), strict=True):
            name = f"{worker.labels.child}#{worker.labels.incarnation}"
            outpost = Outpost(posting, f"{name} outpost", f"phalanx: {name} outpost", worker.epoch)
            worker.remote = remotes[outpost.label] = Remote(worker, outpost, self)
            outposts.append(outpost)
        launcher = self._runtime.launcher
        processes = launcher.launch(
            *(outpost.launch_spec() for outpost in outposts),
            on_exit=lambda process: remotes[process.label].outpost_gone(process),
            deadline=deadline,
            is_wanted=is_wanted,
        )
        for outpost, process in zip(outposts, processes, strict=True):
            outpost.process = process
        complete = (
            replace(spec, fds={**spec.fds, **outpost.worker_fds()})
            for spec, outpost in zip(specs, outposts, strict=True)
        )
        return launcher.launch(*complete, on_exit=on_exit, deadline=deadline, is_wanted=is_wanted)

    def close(self) -> None:
        """End the driver's side; every worker is released."""
        if self._gateway is not None:
            self._gateway.close()

    def _post(self, workers: Sequence[Worker], is_wanted: Callable[[], bool]) -> list[Posting]:
        """Make room for *workers* at the driver's side; return what their sides must know."""
        with self._lock:
            if self._gateway is None:
                self._gateway = Gateway(
                    self._runtime.loop,
                    self._runtime.launcher,
                    self._options(),
                    group=self._group.spec.name,
                    on_event=self._group.publish,
                )
            self._gateway.open(is_wanted)
            return [self._gateway.berth(worker.worker_fds()) for worker in workers]


class NodeLinks(Links):
    """The links of one group on the nodes of *pool*.

    Args:
        gpus: How many GPUs each rank gets, or which part of one; 0 for none.
    """

    def __init__(
        self,
        group: Group,
        options: Callable[[], Zmq],
        pool: NodePool,
        *,
        gpus: float,
        lost: Callable[[Worker, str], None],
        gone: Callable[[Worker], None],
    ) -> None:
        super().__init__(group, options, lost=lost, gone=gone)
        self._pool = pool
        self._gpus = float(gpus)

    def launch(
        self,
        workers: Sequence[Worker],
        specs: Sequence[LaunchSpec],
        *,
        on_exit: Callable[[Process | FarProcess], None],
        deadline: float,
        is_wanted: Callable[[], bool],
    ) -> Sequence[Process | FarProcess]:
        """See `Links.launch`."""
        ranks: list[RankLaunch] = []
        postings = self._post(workers, is_wanted)
        for worker, spec, posting in zip(workers, specs, postings, strict=True):
            worker.remote = Remote(worker, None, self)
            ranks.append(
                RankLaunch(
                    rank=worker.rank,
                    incarnation=worker.incarnation,
                    entry=spec.entry,
                    label=worker.labels.child,
                    payload=spec.payload,
                    title=spec.title,
                    env=dict(spec.env or {}),
                    is_forked=spec.method == "zygote",
                    gpus=self._gpus,
                    link=RankLink(**asdict(posting), epoch=worker.epoch),
                )
            )
        by_label = {
            f"{rank.label}#{rank.incarnation}": worker.remote
            for rank, worker in zip(ranks, workers, strict=True)
        }

        def on_output(process: FarProcess, told: Output) -> None:
            remote = by_label[process.label]
            if remote is not None and remote.output is not None:
                remote.output.write(told)

        return self._pool.launch(
            ranks,
            on_exit=on_exit,
            on_output=on_output,
            deadline=deadline,
            is_wanted=is_wanted,
        )
