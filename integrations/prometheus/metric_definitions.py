"""The metrics: their table, and the samples of each, made from `DriverMetrics` at each scrape.

Labels are group and rank, never pid: a series continues when a rank is restarted.
"""

from __future__ import annotations

import re
import time
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
)

from phalanx.runtime import CALL_SECONDS
from phalanx.supervision import SpecError

if TYPE_CHECKING:
    import threading
    from collections.abc import Iterable, Iterator, Mapping

    from prometheus_client import Metric

    from .driver_metrics import DriverMetrics, GroupMetrics

    Sample = tuple[tuple[str, ...], float]


class Family(NamedTuple):
    """One metric: its name, type, labels and description."""

    name: str
    kind: str
    labels: tuple[str, ...]
    help: str


_G, _R = ("group",), ("group", "rank")
TABLE = (
    Family("phalanx_driver_up", "gauge", (), "1 if the driver answers, else 0"),
    Family("phalanx_group_up", "gauge", _G, "1 if the group serves with all of its ranks, else 0"),
    Family("phalanx_group_epoch", "gauge", _G, "How often the group has been formed"),
    Family("phalanx_group_ranks", "gauge", _G, "Ranks of the group"),
    Family("phalanx_standby_ranks", "gauge", _G, "Spares that are warm"),
    Family("phalanx_rank_up", "gauge", _R, "1 if the rank takes calls, else 0"),
    Family("phalanx_rank_deaths_total", "counter", (*_R, "reason"), "Unrequested deaths"),
    Family("phalanx_restarts_total", "counter", (*_G, "strategy"), "Deaths that led to a restart"),
    Family("phalanx_planned_restarts_total", "counter", _G, "Planned restarts and resizes"),
    Family(
        "phalanx_restart_budget_left", "gauge", _G, "Restarts left before the group ends for good"
    ),
    Family(
        "phalanx_recovery_seconds", "histogram", (*_G, "phase"), "Seconds of a recovery, by phase"
    ),
    Family("phalanx_calls_total", "counter", (*_G, "outcome"), "Calls that have ended"),
    Family("phalanx_call_seconds", "histogram", _G, "Seconds from the making of a call to its end"),
    Family("phalanx_calls_in_flight", "gauge", _G, "Calls sent and not ended"),
    Family("phalanx_calls_waiting", "gauge", _G, "Calls accepted that wait for their turn"),
    Family("phalanx_rank_calls_owed", "gauge", _R, "Calls sent to the rank and not answered"),
    Family(
        "phalanx_rank_call_running_seconds", "gauge", _R, "Seconds that the rank runs its call for"
    ),
    Family(
        "phalanx_rank_hung_seconds_total",
        "counter",
        _R,
        "Seconds that ranks had run calls for which they were ended as hung",
    ),
    Family(
        "phalanx_last_progress_timestamp_seconds",
        "gauge",
        _G,
        "When a rank last began or ended a call, or an item of a stream",
    ),
    Family(
        "phalanx_rank_resident_bytes", "gauge", _R, "Memory of the rank's process, shared included"
    ),
    Family(
        "phalanx_device_draining_bytes",
        "gauge",
        _G,
        "Device memory of dead workers that is not released yet",
    ),
    Family("phalanx_serving_seconds_total", "counter", _G, "Seconds in which the group served"),
    Family(
        "phalanx_down_seconds_total",
        "counter",
        _G,
        "Seconds after its first service in which the group did not serve",
    ),
    Family("phalanx_ettr_ratio", "gauge", _G, "Serving seconds by serving and down seconds"),
    Family("phalanx_supervisor_up", "gauge", ("supervisor",), "1 if the supervisor runs, else 0"),
    Family(
        "phalanx_supervisor_restart_budget_left",
        "gauge",
        ("supervisor", "strategy"),
        "Restarts left before the supervisor gives up",
    ),
    Family(
        "phalanx_child_starts_total", "counter", ("child",), "Starts of a child of a supervisor"
    ),
)
OUTCOMES = ("ok", "error", "died", "timeout", "closed", "cancelled", "partial")
# Present from the start: the increase of a counter that begins at 1 would not be seen.
REASONS = ("crash", "killed", "unresponsive", "unknown")
_NAME = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*")
_TAKEN = frozenset(("le", *(label for family in TABLE for label in family.labels)))


def check_labels(labels: Mapping[str, Any]) -> None:
    """Raise `SpecError` unless *labels* can be put beside those of every metric."""
    for name, value in labels.items():
        if not _NAME.fullmatch(str(name)) or str(name).startswith("__"):
            remedy = "give letters, digits and _, the first not a digit, not __ in front"
            raise SpecError("labels", name, remedy)
        if name in _TAKEN:
            raise SpecError("labels", name, f"metrics have {', '.join(sorted(_TAKEN))} themselves")
        if not isinstance(value, str):
            raise SpecError(f"labels[{name!r}]", value, "give text")


class DriverCollector:
    """The metrics of *driver*, which is read under *lock*, with *labels* added to each."""

    def __init__(
        self, driver: DriverMetrics, lock: threading.Lock, labels: Mapping[str, str]
    ) -> None:
        self._driver = driver
        self._lock = lock
        self._names = tuple(labels)
        self._values = tuple(labels.values())

    def collect(self) -> Iterator[Metric]:
        """Yield every metric of the table, in its order."""
        with self._lock:
            samples = _samples(self._driver, time.monotonic())
        for family in TABLE:
            names = (*family.labels, *self._names)
            yield self._fill(family, names, samples.get(family.name, ()))

    def _fill(self, family: Family, names: tuple[str, ...], samples: Iterable[Any]) -> Metric:
        if family.kind == "histogram":
            histogram = HistogramMetricFamily(family.name, family.help, labels=names)
            for labels, buckets, total in samples:
                histogram.add_metric((*labels, *self._values), buckets, total)
            return histogram
        kind = CounterMetricFamily if family.kind == "counter" else GaugeMetricFamily
        plain = kind(family.name, family.help, labels=names)
        for labels, value in samples:
            plain.add_metric((*labels, *self._values), float(value))
        return plain


def _samples(driver: DriverMetrics, now: float) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = {family.name: [] for family in TABLE}
    found["phalanx_driver_up"].append(((), not driver.unwell(now)))
    for name, group in driver.groups.items():
        _add_counters(found, name, group)
        if group.now is not None:
            _add_present(found, name, group, group.now)
        elif group.ended:
            found["phalanx_group_up"].append(((name,), 0))
    for tree in driver.trees:
        for child in (tree["root"], *tree["children"]):
            _add_child(found, child)
    return found


def _add_counters(found: dict[str, list[Any]], name: str, group: GroupMetrics) -> None:
    for (rank, reason), count in group.deaths.items():
        found["phalanx_rank_deaths_total"].append(((name, rank, reason), count))
    for rank, seconds in group.hung.items():
        found["phalanx_rank_hung_seconds_total"].append(((name, rank), seconds))
    for phase, spent in group.recoveries.items():
        buckets = _buckets(spent.limits, spent.counts)
        found["phalanx_recovery_seconds"].append(((name, phase), buckets, spent.sum))
    found["phalanx_serving_seconds_total"].append(((name,), group.serving))
    found["phalanx_down_seconds_total"].append(((name,), group.down))
    if total := group.serving + group.down:
        found["phalanx_ettr_ratio"].append(((name,), group.serving / total))
    if group.progressed_at is not None:
        at = group.progressed_at
        found["phalanx_last_progress_timestamp_seconds"].append(((name,), at))
    if group.now is None:
        return
    ranks = [str(rank["rank"]) for rank in group.now["ranks"]]
    for rank in (*ranks, *(["standby"] if group.now["standby"] else [])):
        for reason in REASONS:
            if (rank, reason) not in group.deaths:
                found["phalanx_rank_deaths_total"].append(((name, rank, reason), 0))
    for rank in ranks:
        if rank not in group.hung:
            found["phalanx_rank_hung_seconds_total"].append(((name, rank), 0))


def _add_present(
    found: dict[str, list[Any]], name: str, group: GroupMetrics, now: dict[str, Any]
) -> None:
    ranks: list[dict[str, Any]] = now["ranks"]
    is_serving = now["phase"] == "serving" and not group.is_down  # an event is newer
    is_up = is_serving and all(rank["state"] == "up" for rank in ranks)
    budget = max(0, now["max_restarts"] - now["restarts_in_window"])
    for metric, value in (
        ("phalanx_group_up", is_up),
        ("phalanx_group_epoch", now["epoch"]),
        ("phalanx_group_ranks", now["world_size"]),
        ("phalanx_standby_ranks", now["standby"]),
        ("phalanx_planned_restarts_total", now["planned"]),
        ("phalanx_restart_budget_left", budget),
        ("phalanx_calls_in_flight", now["in_flight"]),
        ("phalanx_calls_waiting", now["waiting"]),
        ("phalanx_device_draining_bytes", now["releasing_bytes"]),
    ):
        found[metric].append(((name,), value))
    found["phalanx_restarts_total"].append(((name, now["strategy"]), now["restarts"]))
    for outcome in OUTCOMES:
        count = now["calls"].get(outcome, 0)
        found["phalanx_calls_total"].append(((name, outcome), count))
    buckets = _buckets(CALL_SECONDS, now["call_seconds"])
    found["phalanx_call_seconds"].append(((name,), buckets, now["call_seconds_sum"]))
    for rank in ranks:
        labels = (name, str(rank["rank"]))
        found["phalanx_rank_up"].append((labels, rank["state"] == "up"))
        found["phalanx_rank_calls_owed"].append((labels, rank["owed"]))
        found["phalanx_rank_call_running_seconds"].append((labels, rank["running_for"]))
        if rank["rss_bytes"] is not None:
            found["phalanx_rank_resident_bytes"].append((labels, rank["rss_bytes"]))


def _add_child(found: dict[str, list[Any]], child: dict[str, Any]) -> None:
    path = child["path"]
    found["phalanx_child_starts_total"].append(((path,), child["incarnation"]))
    if child["restarts"] is not None:
        left = max(0, child["max_restarts"] - child["restarts"])
        found["phalanx_supervisor_up"].append(((path,), child["state"] == "running"))
        labels = (path, child["strategy"])
        found["phalanx_supervisor_restart_budget_left"].append((labels, left))


def _buckets(limits: tuple[float, ...], counts: Iterable[int]) -> list[tuple[str, float]]:
    """Return the cumulative *counts* of a histogram with *limits*."""
    names = (*map(str, limits), "+Inf")
    return [(name, float(count)) for name, count in zip(names, accumulate(counts), strict=True)]
