"""What an executor's actor shares with its users' threads.

Guarantees: what changes is changed under `changed`, whose waiters are told; whoever registers for
the end of the group hears of it once, also where it registers too late.

Left to others: when a group is ready, and when it has ended (`executor_actor`).
"""

from __future__ import annotations

import itertools
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from phalanx.runtime import DeviceStatus
    from phalanx.supervision import ExitReason

    from .callbacks import Callbacks
    from .cuts import Cuts
    from .group_probe import GroupProbe
    from .plane import Plane
    from .pulses import Pulses
    from .status import GroupView
    from .tracing import GroupTrace
    from .watch import HangWatch


@dataclass(slots=True)
class Shared:
    """What an executor's actor shares with its users' threads.

    Attributes:
        ready: Set once the group has served for the first time, or has ended.
        gone: Set once everything has been given back.
        start_error: Why the group never came up.
        owns_cuts: Whether *cuts* end with the executor.
        cause: Why the group ended by itself; None where it was closed or lives.
        devices: Returns how the devices are.
        probe: What looks on, where faults are injected.
    """

    plane: Plane
    callbacks: Callbacks
    watch: HangWatch
    trace: GroupTrace
    pulses: Pulses
    view: GroupView
    changed: threading.Condition
    cuts: Cuts | None = None
    owns_cuts: bool = True
    ready: threading.Event = field(default_factory=threading.Event)
    gone: threading.Event = field(default_factory=threading.Event)
    start_error: BaseException | None = None
    cause: ExitReason | None = None
    closing: bool = False
    devices: Callable[[], tuple[DeviceStatus, ...]] = tuple
    probe: GroupProbe | None = None
    _numbers: Iterator[int] = field(default_factory=itertools.count)
    _listeners: dict[int, Callable[[Any], None]] = field(
        default_factory=dict[int, "Callable[[Any], None]"]
    )
    _when_failed: list[Callable[[ExitReason], None]] = field(
        default_factory=list["Callable[[ExitReason], None]"]
    )

    def show(self, view: GroupView) -> None:
        """Have *view* be what the group looks like now."""
        with self.changed:
            self.view = view
            self.changed.notify_all()

    def listen(self, listener: Callable[[Any], None]) -> Callable[[], None]:
        """Hand every event to *listener* from now on; return what ends that."""
        with self.changed:
            number = next(self._numbers)
            self._listeners[number] = listener

        def leave() -> None:
            with self.changed:
                self._listeners.pop(number, None)

        return leave

    def deliver(self, event: Any) -> None:
        """Hand *event* to the listeners, on the thread of the callbacks."""
        with self.changed:
            listeners = list(self._listeners.values())
        for listener in listeners:
            self.callbacks.run(listener, event)

    def when_failed(self, callback: Callable[[ExitReason], None]) -> None:
        """Run *callback* once the group has ended by itself; at once where it has."""
        with self.changed:
            if self.cause is None:
                self._when_failed.append(callback)
                return
        self.callbacks.run(callback, self.cause)

    def tell_failed(self, reason: ExitReason) -> None:
        """Run what was to be run once the group has ended by itself."""
        with self.changed:
            callbacks, self._when_failed = self._when_failed, []
        for callback in callbacks:
            self.callbacks.run(callback, reason)
