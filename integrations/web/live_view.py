"""`LiveView`: the data of one driver's page, as JSON; each change wakes the threads that wait."""

from __future__ import annotations

import json
import threading
from collections import deque
from typing import Any

from phalanx.integrations.follower.follower import silence
from phalanx.runtime import EARLIER_REPORT, Sketch, describe

_EVENTS = 50
_REPORTS = 10


class LiveView:
    """The consumer of a `Follower`: the last whole picture, and the latest events and reports."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._version = 0
        self._sketch = Sketch()
        self._events: deque[str] = deque(maxlen=_EVENTS)
        self._reports: deque[str] = deque(maxlen=_REPORTS)
        self._state: dict[str, Any] = {}
        self._last_received_at = 0.0
        self._publish({"driver": None, "problem": "no driver yet", "groups": [], "trees": []})

    def begin(self, driver: dict[str, Any], now: float) -> None:
        """Note that *driver* is followed from now on."""
        self._last_received_at = now
        self._sketch = Sketch()
        self._publish({"driver": driver, "problem": "waiting for its first word"})

    def take(self, record: dict[str, Any], now: float, wall: float) -> None:  # noqa: ARG002  # a consumer's
        """Take a message of the driver's stream."""
        self._last_received_at = now
        picture = self._sketch.take(record)
        if picture is not None:
            whole = {"groups": picture.groups, "trees": picture.trees}
            self._publish({**whole, "problem": picture.incomplete()})
            return
        is_event = record.get("kind") == "event" and record.get("level") != "debug"
        if not is_event and record.get("event") != EARLIER_REPORT:
            return
        about, *below = describe(record)
        if is_event:
            self._events.appendleft(f"{str(record.get('timestamp', ''))[11:19]} {about}")
        if "report" in record and below and (report := "\n".join(below)) not in self._reports:
            self._reports.appendleft(report)
        self._publish({})

    def wait(self, now: float) -> None:
        """Say so if the driver has been silent for long: what is shown may not hold any longer."""
        if problem := silence(self._last_received_at, now):
            self._publish({"problem": problem})

    def end(self, problem: str, now: float, *, is_alive: bool) -> None:  # noqa: ARG002
        """Note that no driver is followed, and why."""
        if problem != self._state["problem"]:
            self._publish({"driver": None, "problem": problem, "groups": [], "trees": []})

    def next(self, version: int, timeout: float) -> tuple[int, str]:
        """Return the first version after *version* and its JSON; at *timeout* the last one."""
        with self._changed:
            self._changed.wait_for(lambda: self._version > version, timeout)
            return self._version, self._text

    def _publish(self, news: dict[str, Any]) -> None:
        self._state |= {**news, "events": list(self._events), "reports": list(self._reports)}
        with self._changed:
            self._version += 1
            self._text = json.dumps(self._state)
            self._changed.notify_all()
