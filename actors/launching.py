"""Launches: how members of a group come by their processes while its actor goes on hearing.

Guarantees: each launch is made on a thread of its own, which ends with it; what came of it is told
as one notice, in its turn among the others; a launch all of whose members have been asked to stop
meanwhile is given up within a moment. After `close` none is under way.

Left to others: what is launched, and taking it over (`Members`); what a failure means (`Forming`,
`Standby`).

Why a thread for each: a launch may have to wait for a zygote that imports torch, or is stopped, and
one for another rank, from a zygote or an interpreter of its own, need not wait behind it.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, TypeAlias

from phalanx.runtime import occupied
from phalanx.supervision import RuntimeFault

from .notices import Launched

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from phalanx.runtime import Process

    from .member import Member
    from .notices import Notice

    Make: TypeAlias = Callable[[Callable[[], bool]], list[Process]]

THREAD = "phalanx-launch"
"""What the names of the threads begin with."""

_END = 30.0  # seconds for launches that nobody wants any more: a gateway may have to be ended


class Launch:
    """One launch, of all its members or of none.

    Attributes:
        members: Whom it is for; each waits for its process, and holds what that is started with.
        processes: Theirs, in their order, once they have been started.
        error: Why they could not be; None where they were.
    """

    def __init__(self, members: Sequence[Member], make: Make) -> None:
        self.members = tuple(members)
        self.processes: list[Process] = []
        self.error: BaseException | None = None
        self._make = make

    def is_wanted(self) -> bool:
        """Whether any of the members is still to get its process."""
        return not all(member.asked for member in self.members)

    def run(self) -> None:
        """Make it; never raises."""
        try:
            self.processes = self._make(self.is_wanted)
        except BaseException as error:  # noqa: BLE001  # it is told to whoever takes this over
            self.error = error


class Launches:
    """Those of one group. Used by its actor's thread alone."""

    def __init__(self, group: str, tell: Callable[[Notice], None]) -> None:
        self._name = f"{THREAD} {group}"
        self._tell = tell
        self._under_way: dict[Launch, threading.Thread] = {}

    def begin(self, members: Sequence[Member], make: Make) -> None:
        """Have *make* start the processes of *members*; what came of it is told as `Launched`.

        *make* gets what tells it whether they are still wanted.

        Raises:
            RuntimeFault: there is no thread for it.
        """
        launch = Launch(members, make)

        def run() -> None:
            with occupied:
                launch.run()
            self._tell(Launched(launch))

        thread = threading.Thread(target=run, name=self._name, daemon=True)
        self._under_way[launch] = thread
        try:
            thread.start()
        except RuntimeError as error:
            del self._under_way[launch]
            raise RuntimeFault(f"no thread to start processes from: {error}") from error

    def take(self, launch: Launch) -> bool:
        """Return whether *launch*, which is over, was not taken over yet; it is from now on."""
        thread = self._under_way.pop(launch, None)
        if thread is None:
            return False
        thread.join(_END)  # to have told of the launch was the last it did
        return True

    def close(self) -> list[Launch]:
        """Give up what is under way; return it once it has come to an end, to be taken over."""
        for launch in self._under_way:
            for member in launch.members:
                member.asked = True
        deadline = time.monotonic() + _END
        for thread in self._under_way.values():
            thread.join(max(0.0, deadline - time.monotonic()))
        return [launch for launch, thread in self._under_way.items() if not thread.is_alive()]
