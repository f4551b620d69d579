"""The device leases of one group: acquired together, monitored, released.

- The ranks of one start get their devices together or not at all; a rank gets the one that it had
  before, if that has no fault.
- The wait for memory that is being released does not block the actor and takes at most
  *limits.start*: in a shared pool another group may lease each released device first.
- A restart for which there is no device waits for *devices.timeout*, then `ask` raises. The first
  start waits only for memory that is being released.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from phalanx.runtime import DeviceAwaited, DeviceQuarantined, Request
from phalanx.supervision import NoDevice, StartRanks

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from phalanx.runtime import DevicePool, DeviceRestored, Lease, Timer

    from .handle import Group

_SOON = 0.02  # seconds until a release is looked at again: NVML has no event for it
_LATER = 0.25  # the same for a device that others hold, or that is in quarantine
_CHECK = 5.0  # seconds between two looks at the health of devices that are leased; arbitrary


@dataclass(slots=True)
class _Wait:
    """A start that waits for its devices.

    Attributes:
        since: The time of its first request.
        without: Since when there has been none for it, nor one being released; None for not yet.
    """

    since: float
    without: float | None = None


class DeviceLeases:
    """The leases of one group. Used by its actor's thread alone.

    Args:
        retry: Called with a start that is to ask for its devices again.
        on_look_due: Called when it is time to `look`.
    """

    def __init__(
        self, group: Group, retry: Callable[[StartRanks], None], on_look_due: Callable[[], None]
    ) -> None:
        self._group = group
        self._spec = spec = group.spec
        self._loop = group.runtime.loop
        self._retry = retry
        self._on_look_due = partial(group.post, on_look_due)
        self._pool: DevicePool = group.runtime.devices(
            spec.devices.names, spec.world_size, spec.devices.per_rank
        )
        self._last: dict[int, tuple[str, ...]] = {}
        self._waiting: dict[StartRanks, _Wait] = {}
        self._given_back: list[Lease] = []
        self._timer: Timer | None = None
        self._forget = self._pool.subscribe(self._on_device_event, group.runtime.collector.emit)
        self.status = self._pool.status

    def ask(self, start: StartRanks, *, first: bool) -> dict[int, Lease] | None:
        """Return a lease for each rank of *start*; None if they are waited for.

        Raises:
            NoDevice: there is none, and no more waiting.
        """
        spec = self._spec
        requests = [
            Request(rank, f"{spec.name}/{rank}", self._last.get(rank, ()))
            for rank, _ in start.ranks
        ]
        try:
            leases = self._pool.acquire(requests, spec.devices.per_rank, spec.devices.visibility)
        except NoDevice as none:
            self._wait(start, none, first=first)
            return None
        self._waiting.pop(start, None)
        self._last.update({r.rank: lease.names for r, lease in zip(requests, leases, strict=True)})
        self._look_later()
        return {r.rank: lease for r, lease in zip(requests, leases, strict=True)}

    def _wait(self, start: StartRanks, none: NoDevice, *, first: bool) -> None:
        """Have *start* ask again, as long as it may wait; raises where it may not."""
        spec, now = self._spec, self._group.clock()
        wait = self._waiting.setdefault(start, _Wait(now))
        timeout = 0.0 if first else spec.devices.timeout
        fresh = not none.soon and wait.without is None
        if fresh:
            wait.without = now
        name, limit, since = "devices.timeout", timeout, wait.without or now
        if none.soon:
            since = wait.since
            if limit is not None and limit <= spec.limits.start:
                name, limit = "limits.start", spec.limits.start
        if limit is not None and now - since >= limit:
            del self._waiting[start]
            raise none.after(f"{name}={limit:g} s" if limit else "") from None
        if fresh:
            ranks = tuple(rank for rank, _ in start.ranks)
            self._group.publish(
                DeviceAwaited(
                    group=spec.name, ranks=ranks, reason=str(none), timeout=timeout, at=now
                )
            )
        later = _SOON if none.soon else _LATER
        self._loop.call_at(now + later, partial(self._group.post, self._ask_again, start))

    def _ask_again(self, start: StartRanks) -> None:
        if start in self._waiting:
            self._retry(start)

    def withdraw(self, ranks: frozenset[int]) -> list[StartRanks]:
        """Return the starts that any of *ranks* waits in; they wait no more."""
        gone = [s for s in self._waiting if any(rank in ranks for rank, _ in s.ranks)]
        for start in gone:
            del self._waiting[start]
        return gone

    def give_back(self, lease: Lease, pid: int | None) -> None:
        """Release *lease*, whose process *pid* has ended; the wait for its memory comes later."""
        self._pool.give_back(lease, pid)
        self._given_back = [*filter(self._pool.is_releasing, self._given_back), lease]

    def give_all_back(self, leases: Mapping[int, Lease]) -> None:
        """Release leases without a process."""
        for lease in leases.values():
            self.give_back(lease, None)

    def look(self) -> dict[Lease, str]:
        """Look how the devices are; return the leases that cannot go on, and why."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._look_later()
        return self._pool.look()

    def close(self) -> None:
        """Wait until the memory of released leases is free, or quarantined; leave the pool."""
        if self._timer is not None:
            self._timer.cancel()
        # No deadline of ours: each lease has the pool's.
        self._pool.settle(self._given_back, float("inf"))
        self._forget()
        self._pool.close()

    def _on_device_event(self, event: DeviceQuarantined | DeviceRestored) -> None:
        """Pass on an event of a device; called on any thread that has checked its health."""
        self._group.deliver(event)
        if isinstance(event, DeviceQuarantined) and event.fatal:
            self._on_look_due()

    def _look_later(self) -> None:
        if self._timer is None and self._pool.has_gpus:
            at = self._group.clock() + _CHECK
            self._timer = self._loop.call_at(at, self._on_look_due)
