"""Scenarios and traces of the recorded vectors, and their translation to specs.

Guarantees: a NODE becomes the spec that says the same; whatever a driver reports is written in
the words of the vectors. The format is described in ``README.md`` beside the vector files.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from phalanx.supervision import (
    BRUTAL_KILL,
    ChildRefused,
    ChildRow,
    ChildSpec,
    ExitKind,
    ExitReason,
    Intensity,
    RestartWindow,
    SpecError,
    StartFailed,
    SupervisorDown,
    SupervisorSpec,
)
from phalanx.supervision.core.machine import SupervisorMachine
from phalanx.supervision.core.messages import Counts, Done

Json = Any
Starter = Callable[[Json], Callable[..., Any]]

REASONS = {
    "normal": ExitReason(ExitKind.NORMAL),
    "shutdown": ExitReason(ExitKind.SHUTDOWN),
    "shutdown_term": ExitReason(ExitKind.SHUTDOWN, "term"),
    "crash": ExitReason(ExitKind.CRASH),
    "kill": ExitReason(ExitKind.KILLED),
}


def reason_word(reason: ExitReason) -> str:
    """Return *reason* in the words of the traces."""
    if reason.kind is ExitKind.SHUTDOWN and reason.detail == "term":
        return "shutdown_term"
    return str(reason.kind)


def script(node: Json, attempt: int) -> str:
    """Return what attempt number *attempt* to start *node* does: ok, error, crash or ignore."""
    for entry in node.get("starts", ()):
        last = entry["to"]
        if entry["from"] <= attempt and (last is None or attempt <= last):
            return str(entry["do"])
    return "ok"


class WholeSecondsWindow(RestartWindow):
    """A window in whole seconds of the clock, as OTP's."""

    def admit(self, now: float) -> RestartWindow | None:
        return RestartWindow.admit(self, float(math.floor(now)))


class WholeSeconds(Intensity):
    """An intensity whose window counts as OTP's."""

    def window(self) -> RestartWindow:
        return WholeSecondsWindow(self.max_restarts, self.period)


def supervisor_spec(node: Json, starter: Starter) -> SupervisorSpec:
    """Return the spec of a supervisor *node*; *starter* makes the start function of a worker."""
    return SupervisorSpec(
        node["id"],
        strategy=node["strategy"],
        intensity=WholeSeconds(node["intensity"], node["period"]),
        children=[child_spec(child, starter) for child in node.get("children", ())],
        auto_shutdown=node.get("auto_shutdown", "never"),
        max_children=node.get("max_children"),
    )


def child_spec(node: Json, starter: Starter) -> ChildSpec:
    """Return the spec of *node* as a child, without any limits that OTP does not have."""
    nested = node["type"] == "supervisor"
    shutdown = node.get("shutdown", "infinity" if nested else 5000)
    if isinstance(shutdown, int):
        shutdown = shutdown / 1000
    return ChildSpec(
        node["id"],
        supervisor_spec(node, starter) if nested else starter(node),
        restart=node.get("restart", "permanent"),
        shutdown=shutdown,
        significant=node.get("significant", False),
        start_within=math.inf,
        kill_within=math.inf,
    )


def asking(
    op: Json, key: str, starter: Starter, serial: int | None = None
) -> Callable[[SupervisorMachine], object]:
    """Return what *op* asks of a machine about its child *key*."""
    match op["op"]:
        case "start_child" | "start_instance":
            try:
                spec = child_spec(op["spec"], starter) if "spec" in op else None
            except SpecError:
                spec = None
            return lambda machine: machine.start_child(spec)
        case "terminate_child":
            return lambda machine: machine.terminate_child(key, serial)
        case "restart_child":
            return lambda machine: machine.restart_child(key)
        case "delete_child":
            return lambda machine: machine.delete_child(key)
        case "get_childspec":
            return lambda machine: machine.child_spec(key)
        case "which_children":
            return SupervisorMachine.child_rows
        case "count_children":
            return SupervisorMachine.counts
        case other:
            raise AssertionError(other)


@dataclass
class Asked:
    """One request on its way; *answer* is None where the supervisor never answered."""

    op: str
    answer: Any = None

    def result(self) -> Json:
        """Return the answer in the words of the traces."""
        match self.answer:
            case None:
                return "error:noproc"
            case ChildRefused() as refused:
                return f"error:{refused.why}"
            case SpecError():  # a spec that cannot be built is submitted as none at all
                return "error:bad_combination"
            case StartFailed():
                return "error:start_failed"
            case SupervisorDown():
                return "error:noproc"
            case Done(_, running):
                if self.op in ("start_child", "restart_child", "start_instance"):
                    return "ok:running" if running else "ok:undefined"
                return "ok"
            case Counts(specs, active, supervisors, workers):
                return {
                    "specs": specs, "active": active, "supervisors": supervisors, "workers": workers
                }  # fmt: skip
            case ChildSpec() as spec:
                return described(spec)
            case _:
                rows: tuple[ChildRow, ...] = self.answer
                return listed([row.key, str(row.shown), str(row.type)] for row in rows)


def listed(rows: Iterable[list[Json]]) -> list[Json]:
    """Return rows as the traces show them: instances sorted, restarting ones nameless."""
    found = list(rows)
    if not any("#" in row[0] for row in found):
        return found
    for row in found:
        if row[1] == "restarting":
            row[0] = None
    return sorted(found, key=lambda row: (row[0] is not None, row[0] or ""))


def described(spec: ChildSpec) -> Json:
    """Return what get_childspec shows of *spec*."""
    if spec.shutdown is BRUTAL_KILL:
        shutdown: Json = "brutal_kill"
    else:
        shutdown = "infinity" if spec.stop_within == math.inf else round(spec.stop_within * 1000)
    return {
        "restart": str(spec.restart),
        "shutdown": shutdown,
        "significant": spec.significant,
        "type": str(spec.type),
    }


def event_key(event: list[Json]) -> tuple[str, bytes, int]:
    """Return what events are sorted by."""
    return event[0], event[1].encode(), event[2]


def in_order(events: Iterable[list[Json]]) -> list[list[Json]]:
    """Return *events* with each run of stops of instances of one supervisor sorted."""

    def pool(event: list[Json]) -> str:
        above, _, name = event[1].rpartition("/")
        return above if event[0] == "stop" and "#" in name else ""

    result: list[list[Json]] = []
    for above, run in itertools.groupby(events, pool):
        those = list(run)
        result += sorted(those, key=event_key) if above else those
    return result
