"""The links of one group whose ranks are elsewhere: one process here, and one beside each rank.

Guarantees: to the rest of the group a rank elsewhere is one next door: it has a channel, a control
socket and a process. Several launches may be under way at once.

Left to others: the processes themselves (`runtime.gateway`, `runtime.outpost`), what is heard of
each link (`Remote`).
"""

from __future__ import annotations

import threading
from functools import partial
from typing import TYPE_CHECKING

from phalanx.runtime import Gateway, Outpost

from .remote import Remote

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from phalanx.runtime import LoggedEvent, Runtime, Zmq

    from .member import Member
    from .notices import Notice

PRELOAD = ("zmq",)
"""What the processes at both ends are forked with; none of it is in workers."""


class Links:
    """The links of one group."""

    def __init__(
        self,
        options: Zmq,
        runtime: Runtime,
        group: str,
        tell: Callable[[Notice], None],
        on_event: Callable[[LoggedEvent], None],
    ) -> None:
        self._runtime = runtime
        self._group = group
        self._tell = tell
        self._lock = threading.Lock()
        launcher = partial(runtime.launcher, PRELOAD)
        self._gateway = Gateway(runtime.hub, launcher, options, group=group, on_event=on_event)

    def launch(
        self, members: Sequence[Member], deadline: float, is_wanted: Callable[[], bool]
    ) -> None:
        """Give each of *members* a link, whose other end has been started.

        Raises:
            RuntimeFault, OSError: one could not be; then no other end is left.
        """
        with self._lock:
            self._gateway.open(is_wanted)
            for member in members:
                self._equip(member)
        remotes = [member.remote for member in members if member.remote is not None]
        by_label = {remote.outpost.label: remote for remote in remotes}
        processes = self._runtime.launcher(PRELOAD).launch_many(
            [remote.outpost.launch_spec() for remote in remotes],
            on_exit=lambda process: by_label[process.label].outpost_gone(process),
            deadline=deadline,
            is_wanted=is_wanted,
        )
        for remote, process in zip(remotes, processes, strict=True):
            remote.outpost.process = process

    def close(self) -> None:
        """End the driver's side; every rank is buried."""
        self._gateway.close()

    def _equip(self, member: Member) -> None:
        control = {"control": member.control_end.fileno()}
        posting = self._gateway.berth({**member.channel.child_fds(), **control})
        labels = member.labels
        name = f"{labels.child}#{labels.incarnation}"
        title = f"phalanx: {name} outpost"
        outpost = Outpost(posting, f"{name} outpost", title, member.epoch)
        member.remote = Remote(member, outpost, self._runtime.hub, self._tell)
