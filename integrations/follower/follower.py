"""`Follower`: follows the event streams of drivers, one after the other, for a consumer."""

from __future__ import annotations

import os
import select
import threading
import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from phalanx.runtime import Observer, find_drivers
from phalanx.supervision import RuntimeFault

if TYPE_CHECKING:
    from phalanx.runtime import DriverStream

_LOOK = 0.5  # seconds between two looks for a driver: the kernel has no event for a new socket
_SLICE = 1.0
_SILENT = 10.0  # seconds without a status of a driver; there is one a second


def silence(last_received_at: float, now: float) -> str:
    """Return that a driver is silent since *last_received_at*; empty if it is not for long."""
    silent = now - last_received_at
    return f"the driver has not answered for {silent:.0f} s" if silent > _SILENT else ""


class StreamConsumer(Protocol):
    """A consumer of a driver's events; times are in seconds, *now* on the monotonic clock."""

    def begin(self, driver: dict[str, Any], now: float) -> None:
        """*driver* (a `DriverStream`) is followed from now on."""
        ...

    def take(self, record: dict[str, Any], now: float, wall: float) -> None:
        """It has said *record*."""
        ...

    def wait(self, now: float) -> None:
        """It has said nothing for a second."""
        ...

    def end(self, problem: str, now: float, *, is_alive: bool) -> None:
        """No driver is followed, and why; whether its process may still live."""
        ...


_A = TypeVar("_A", bound=StreamConsumer)


class Follower(Generic[_A]):
    """Follows a driver by *pid*, as long as that lives; else by *name*, and each that follows it.

    Without a name it is the only driver of this user.

    Attributes:
        consumer: Takes the received events; guarded by *lock*.

    Raises:
        RuntimeFault: there is no process *pid*.
    """

    def __init__(self, consumer: _A, *, pid: int | None = None, name: str = "") -> None:
        self.consumer = consumer
        self.lock = threading.Lock()
        self._pid = pid
        self._name = name
        self._whom = str(pid) if pid is not None else name
        self._gone = select.poll()
        self._pidfd: int | None = None
        if pid is not None:
            try:
                self._pidfd = os.pidfd_open(pid)
            except (OSError, OverflowError) as error:
                raise RuntimeFault(f"there is no process {pid} to follow") from error
            self._gone.register(self._pidfd, select.POLLIN)

    def run(self) -> None:
        """Follow until the process of the driver has ended; by name without an end."""
        try:
            while not self._gone.poll(0):
                driver = self._find()
                if driver is not None:
                    self._follow(driver)
                self._gone.poll(_LOOK * 1000)
        finally:
            if self._pidfd is not None:
                os.close(self._pidfd)

    def _find(self) -> DriverStream | None:
        """Return the driver to follow; else tell the consumer why there is none."""
        found = [
            driver
            for driver in find_drivers()
            if (not self._whom or self._whom in (str(driver.pid), driver.name))
        ]
        if len({driver.pid for driver in found}) == 1 or (found and self._pid is not None):
            return found[-1]
        if self._pid is not None:
            problem = "the driver has no executor just now"
        elif found:
            pids = ", ".join(str(driver.pid) for driver in found)
            problem = f"more than one driver runs: name one of {pids}"
        else:
            problem = (
                f"no driver runs under the name {self._name}"
                if self._name
                else ("no driver of this user runs")
            )
        with self.lock:
            self.consumer.end(problem, time.monotonic(), is_alive=self._pid is not None)
        return None

    def _follow(self, driver: DriverStream) -> None:
        try:
            with Observer(driver, watch=True) as observer:
                with self.lock:
                    self.consumer.begin(asdict(driver), time.monotonic())
                while not observer.has_ended:
                    record = observer.next(time.monotonic() + _SLICE)
                    if record is not None and observer.is_last(record):
                        break
                    with self.lock:
                        if record is None:
                            self.consumer.wait(time.monotonic())
                        else:
                            self.consumer.take(record, time.monotonic(), time.time())
        except RuntimeFault:  # it ended before it could be followed
            pass
        with self.lock:
            problem = f"driver {driver.pid} has closed its stream"
            self.consumer.end(problem, time.monotonic(), is_alive=self._pid is not None)
