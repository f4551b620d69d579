"""Links of a group with remote ranks: a gateway beside the driver, a relay on each machine.

- To the rest of the group a remote rank looks local: it has a channel, a control socket and
  a process. Several launches may be in progress at once.
- On a cluster the node starts the relay beside its ranks, with the first rank.
- The end of the rank's process is reported once all its messages have arrived, or after a moment.
- A lost link is reported once, with its cause if that is known.
"""

from __future__ import annotations

import threading
import time
from dataclasses import asdict, replace
from functools import partial
from typing import TYPE_CHECKING

from phalanx.cluster import RankLaunch, RelayLink
from phalanx.runtime import Gateway, Kind, WorkerRelay

from .remote_output import RemoteOutput

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from phalanx.actors.group.handle import Group
    from phalanx.actors.group.worker import Worker
    from phalanx.cluster import NodePool, Output, RemoteProcess
    from phalanx.runtime import Frame, LaunchSpec, Process, RelaySlot, Zmq


_HERE = 0  # this machine, where there is no other
_LAST_WORDS = 1.0  # seconds from a process's end in which its link may bring what it had sent


class Remote:
    """The link of one worker. Its methods run on the event loop's thread.

    Attributes:
        output: The output of its worker on a node; None if it is on this machine.
    """

    def __init__(self, worker: Worker, slot: RelaySlot | None, links: Links) -> None:
        self.output = None if slot is not None else RemoteOutput(worker.output)
        self._slot = slot
        self._worker = worker
        self._links = links
        self._said = False  # the link has reported its end; else its process here has died
        self._ended = False  # nothing more comes over it
        self._gone = False  # the worker's process has ended
        self._exit_reported = False
        self._lost = False

    def handle_frame(self, frame: Frame) -> bool:
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

    def relay_gone(self, number: int, why: str, *, by_itself: bool) -> None:
        """Report that a relay has ended, if it is this worker's, unless the link says more."""

        def tell() -> None:
            if not self._ended and not self._gone:
                self._lose(why)

        if self._exit_reported or self._slot is None or self._slot.relay != number:
            return
        if by_itself:
            self._lose(why)  # the driver's side may be one that no longer says anything
        else:
            self._links.later(self._worker, tell)

    def close_ends(self) -> None:
        """Release resources that only processes of this machine use; they run, or never will."""
        if self._slot is not None:
            self._slot.close()

    def release(self) -> None:
        """Release everything: the worker has ended."""
        self.close_ends()
        self._links.forget(self)
        if self.output is not None:
            self.output.close()

    def _lose(self, why: str) -> None:
        if not self._lost:
            self._lost = True
            self._links.lost(self._worker, f"its link was lost: {why}")

    def _tell_gone(self) -> None:
        if not self._exit_reported:
            self._exit_reported = True
            self._links.gone(self._worker)


class Links:
    """The links of one group on this machine.

    Args:
        options: How they are to be; None if the ranks are not on this machine.
        lost: Called with a worker that cannot be reached any longer, and what is known of it.
        gone: Called with a worker whose process has ended.
    """

    def __init__(
        self,
        group: Group,
        options: Zmq | None,
        *,
        lost: Callable[[Worker, str], None],
        gone: Callable[[Worker], None],
    ) -> None:
        self._group = group
        self._runtime = group.runtime
        self.lost = partial(group.post, lost)
        self.gone = partial(group.post, gone)
        self._lock = threading.Lock()  # of the gateway; never on the event loop's thread
        self._gateway: Gateway | None = None
        if options is not None:
            loop, launcher = self._runtime.loop, self._runtime.launcher
            self._gateway = Gateway(
                loop, launcher, options, group=group.spec.name, on_event=group.publish
            )
        self._relay = WorkerRelay(
            self._runtime.launcher, f"{group.spec.name}/relay", self._relay_gone
        )
        self._beside_lock = threading.Lock()
        self._beside: set[Remote] = set()  # the workers beside the relay

    def later(self, worker: Worker, then: Callable[[], None]) -> None:
        """Call *then* in a moment, unless *worker* has been released by then."""
        loop = self._runtime.loop
        worker.timers.append(loop.call_at(loop.time() + _LAST_WORDS, then))

    def forget(self, remote: Remote) -> None:
        """Tell *remote* nothing any longer."""
        with self._beside_lock:
            self._beside.discard(remote)

    def launch(
        self,
        workers: Sequence[Worker],
        specs: Sequence[LaunchSpec],
        *,
        on_exit: Callable[[Process | RemoteProcess], None],
        deadline: float,
        is_wanted: Callable[[], bool],
    ) -> Sequence[Process | RemoteProcess]:
        """Start *workers* as *specs* say, each with a link.

        Raises:
            RuntimeFault, OSError: one could not be started; then nothing is left of any.
        """
        with self._lock:
            gateway = self._gateway
            assert gateway is not None
            gateway.open(is_wanted)
            numbers = [gateway.add_rank(_HERE, worker.worker_fds()) for worker in workers]
            invitation = gateway.invite(_HERE)
        slots = self._relay.open_slots(
            invitation,
            [(number, worker.epoch) for number, worker in zip(numbers, workers, strict=True)],
            deadline=deadline,
            is_wanted=is_wanted,
        )
        complete: list[LaunchSpec] = []
        for worker, spec, slot in zip(workers, specs, slots, strict=True):
            worker.remote = Remote(worker, slot, self)
            with self._beside_lock:
                self._beside.add(worker.remote)
            complete.append(replace(spec, fds={**spec.fds, **slot.worker_fds()}))
        launcher = self._runtime.launcher
        return launcher.launch(*complete, on_exit=on_exit, deadline=deadline, is_wanted=is_wanted)

    def close(self) -> None:
        """End the processes at both ends; every worker is released."""
        try:
            self._relay.close()
        finally:
            if self._gateway is not None:
                self._gateway.close()

    def _relay_gone(self, number: int, why: str, by_itself: bool) -> None:  # a callback's
        with self._beside_lock:
            beside = list(self._beside)
        for remote in beside:
            remote.relay_gone(number, why, by_itself=by_itself)


class NodeLinks(Links):
    """The links of one group on the nodes of *pool*.

    Args:
        gpus: How many GPUs each rank gets, or which part of one; 0 for none.
    """

    def __init__(
        self,
        group: Group,
        pool: NodePool,
        *,
        gpus: float,
        lost: Callable[[Worker, str], None],
        gone: Callable[[Worker], None],
    ) -> None:
        super().__init__(group, None, lost=lost, gone=gone)
        self._pool = pool
        self._gpus = float(gpus)

    def launch(
        self,
        workers: Sequence[Worker],
        specs: Sequence[LaunchSpec],
        *,
        on_exit: Callable[[Process | RemoteProcess], None],
        deadline: float,
        is_wanted: Callable[[], bool],
    ) -> Sequence[Process | RemoteProcess]:
        """See `Links.launch`."""
        places = self._pool.places()
        with self._lock:
            gateway = self._pool.gateway
            left = max(0.0, deadline - time.monotonic())
            numbers = [
                gateway.add_rank(places[worker.rank].node, worker.worker_fds(), launch=left)
                for worker in workers
            ]
            nodes = dict.fromkeys(places[worker.rank].node for worker in workers)
            invitations = {node: RelayLink(**asdict(gateway.invite(node))) for node in nodes}
        ranks: list[RankLaunch] = []
        for worker, spec, number in zip(workers, specs, numbers, strict=True):
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
                    seat=number,
                    epoch=worker.epoch,
                )
            )
        by_label = {
            f"{rank.label}#{rank.incarnation}": worker.remote
            for rank, worker in zip(ranks, workers, strict=True)
        }

        def on_output(process: RemoteProcess, message: Output) -> None:
            remote = by_label[process.label]
            if remote is not None and remote.output is not None:
                remote.output.write(message)

        processes = self._pool.launch(
            ranks,
            invitations,
            on_exit=on_exit,
            on_output=on_output,
            deadline=deadline,
            is_wanted=is_wanted,
        )
        gateway.launched(numbers)
        return processes
