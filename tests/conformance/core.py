"""Runs scenarios on the pure core: the machine under a virtual clock, with scripted children.

Guarantees: no process, no thread, no real time. A supervisor here is its machine and an inbox; what
its actions lead to comes back into the inbox, as the actor's does. What it waits for (outcomes of
starts and stops) goes first, because the core takes it first from wherever it lies.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field, replace
from typing import Any

from phalanx.supervision import KILLED, SHUTDOWN, ChildSpec, ExitReason, Notice, SupervisorSpec
from phalanx.supervision.core.machine import SupervisorMachine
from phalanx.supervision.core.messages import (
    AbandonStart,
    Action,
    Alarm,
    BecomeReady,
    Booted,
    Event,
    Exit,
    Exited,
    KillChild,
    NotStarted,
    Reply,
    Request,
    Retry,
    StartChild,
    Started,
    StopRequested,
    TerminateChild,
)

from .scenario import (
    REASONS,
    Asked,
    Json,
    asking,
    event_key,
    in_order,
    listed,
    reason_word,
    script,
    supervisor_spec,
)


@dataclass(eq=False)
class Process:
    """One process that was started: the *serial*-th start of *parent*."""

    path: str
    n: int
    serial: int
    parent: Sup | None
    key: str
    node: Json = None
    alive: bool = True


@dataclass(eq=False)
class Sup(Process):
    """A supervisor: its machine, and what is on its way to it; *awaited* with its time."""

    machine: SupervisorMachine | None = None
    inbox: deque[Event] = field(default_factory=deque[Event])
    awaited: deque[tuple[Event, float]] = field(default_factory=deque[tuple[Event, float]])
    children: dict[str, Process] = field(default_factory=dict[str, Process])
    error: BaseException | None = None
    was_told: bool = False  # to stop, by its parent, which waits for it


@dataclass(frozen=True)
class Scripted:
    """Stands for the start function of a worker; the driver reads its node."""

    node: Json

    def __call__(self) -> None:
        raise AssertionError("the core driver starts nothing")


class CoreWorld:
    """One scenario on the pure core."""

    def __init__(self, scenario: Json) -> None:
        self.scenario = scenario
        self.now = 0.0
        self.attempts: Counter[str] = Counter()
        self.instances: Counter[str] = Counter()
        self.latest: dict[str, Process] = {}
        self.events: list[list[Json]] = []

    def run(self) -> Json:
        """Return the trace."""
        spec = supervisor_spec(self.scenario["tree"], Scripted)
        top = self._born(None, spec.id, 0, spec)
        started = self._taken()
        if not top.alive:
            failed = {"result": "error:start_failed", "events": started}
            return {"start": failed, "steps": [], "final": None, "teardown": []}
        steps = [self._step(step) for step in self.scenario["steps"]]
        if top.alive:
            final = {"top": "alive", "reason": None, "tree": self._tree(top)}
            top.inbox.append(StopRequested(SHUTDOWN))
            self._settle()
        else:
            assert top.machine is not None
            reason = KILLED if top.machine.ended is None else top.machine.ended
            final = {"top": "dead", "reason": reason_word(reason), "tree": None}
        start = {"result": "ok", "events": started}
        return {"start": start, "steps": steps, "final": final, "teardown": self._taken()}

    def _taken(self) -> list[list[Json]]:
        taken, self.events = in_order(self.events), []
        return taken

    # --- steps ----------------------------------------------------------------------------

    def _step(self, step: Json) -> Json:
        self.now = step["at"] / 1000
        orphans: list[list[Json]] | None = None
        if step["op"] == "batch":
            slots = [self._submitted(op) for op in step["ops"]]
        else:
            child = self.latest.get(step.get("child", ""))
            killed = step["op"] == "exit" and step["reason"] == "kill"
            if killed and isinstance(child, Sup) and child.alive:
                orphans = self._killed(child)
                slots = [Asked("exit", "ok")]
            else:
                slots = [self._submitted(step)]
        self._settle()
        results = [s.answer if s.op == "exit" else s.result() for s in slots]
        result = results if step["op"] == "batch" else results[0]
        record = {"result": result, "events": self._taken()}
        return record | {"orphans": orphans} if orphans else record

    def _submitted(self, op: Json) -> Asked:
        asked = Asked(op["op"])
        if op["op"] == "exit":
            asked.answer = self._exited(op)
            return asked
        sup_path, _, key = op["child"].rpartition("/") if "child" in op else (op["sup"], "", "")
        sup = self.latest.get(sup_path)
        if isinstance(sup, Sup) and sup.alive:
            sup.inbox.append(self._request(asked, op, sup, key))
        return asked

    def _exited(self, op: Json) -> str:
        process = self.latest.get(op["child"])
        if process is None or not process.alive:
            return "not_running"
        reason = REASONS[op["reason"]]
        if isinstance(process, Sup):
            # At once, also in a batch for its parent: what then lies there is the news of its end.
            process.inbox.append(StopRequested(reason))
            self._pump(process)
        else:
            self._ended(process, reason)
            assert process.parent is not None
            process.parent.inbox.append(Exited(process.key, process.serial, reason))
        return "ok"

    def _request(self, asked: Asked, op: Json, sup: Sup, key: str) -> Event:
        assert sup.machine is not None
        serial = None
        if op["op"] == "terminate_child" and sup.machine.spec.strategy.has_instances:
            process = self.latest.get(op["child"])
            if process is None:  # it never had a process: an id that names nothing
                key = key.partition("#")[0]
            else:
                serial = process.serial
        return Request(asked, asking(op, key, Scripted, serial))

    # --- the world ------------------------------------------------------------------------

    def _settle(self) -> None:
        """Go on until no supervisor has anything to do."""
        busy = True
        while busy:
            busy = False
            for process in list(self.latest.values()):
                if isinstance(process, Sup) and process.alive and process.inbox:
                    busy = True
                    self._pump(process)

    def _pump(self, sup: Sup) -> None:
        while sup.alive and (sup.awaited or sup.inbox):
            awaited = sup.awaited.popleft() if sup.awaited else None
            event, at = awaited or (sup.inbox.popleft(), self.now)
            assert sup.machine is not None
            if isinstance(event, Request):
                dead = {child.serial for child in sup.children.values() if not child.alive}
                event = replace(event, dead=frozenset(dead))
            actions = sup.machine.handle(event, at)
            self.instances[sup.path] = sup.machine.instances
            for action in actions:
                self._perform(sup, action, at)

    def _perform(self, sup: Sup, action: Action, at: float) -> None:
        match action:
            case StartChild(key, serial, _, spec):
                self._start(sup, key, serial, spec)
            case TerminateChild(key, serial):
                self._terminate(sup, key, serial)
            case KillChild(key, serial):
                process = sup.children[key]
                assert process.serial == serial, "a kill names the living incarnation"
                assert not isinstance(process, Sup), "no vector kills a supervisor this way"
                self._awaited_end(sup, process, KILLED)
            case Retry():
                sup.inbox.append(action)
            case Alarm(delay=delay):
                # Children that react have done so already; time passes only for those that hang.
                sup.awaited.append((action, at + delay))
            case Reply(caller, answer):
                caller.answer = answer
            case Exit(error=BaseException() as error):
                sup.alive, sup.error = False, error
                self.events.append(["stop", sup.path, sup.n, "start_failed"])
            case Exit(reason):
                self._ended(sup, reason)
                if sup.parent is not None:
                    exited = Exited(sup.key, sup.serial, reason)
                    if sup.was_told:
                        sup.parent.awaited.append((exited, self.now))
                    else:
                        sup.parent.inbox.append(exited)
            case BecomeReady() | Notice() | AbandonStart():
                pass

    def _start(self, sup: Sup, key: str, serial: int, spec: ChildSpec) -> None:
        if isinstance(spec.start, SupervisorSpec):
            child = self._born(sup, key, serial, spec.start)
            sup.children[key] = child
            error = child.error
            started = Started(key, serial)
            outcome = started if error is None else NotStarted(key, serial, error)
            sup.awaited.append((outcome, self.now))
            return
        start: Any = spec.start
        node: Json = start.node
        path = f"{sup.path}/{key}"
        self.attempts[path] += 1
        n = self.attempts[path]
        match script(node, n):
            case "ok":
                self.events.append(["start", path, n])
                worker = Process(path, n, serial, sup, key, node)
                sup.children[key] = self.latest[path] = worker
                sup.awaited.append((Started(key, serial), self.now))
            case "ignore":
                self.events.append(["start_ignored", path, n])
                sup.awaited.append((NotStarted(key, serial), self.now))
            case _:
                self.events.append(["start_failed", path, n])
                failed = NotStarted(key, serial, RuntimeError("scripted"))
                sup.awaited.append((failed, self.now))

    def _born(self, parent: Sup | None, key: str, serial: int, spec: SupervisorSpec) -> Sup:
        path = key if parent is None else f"{parent.path}/{key}"
        self.attempts[path] += 1
        sup = Sup(
            path,
            self.attempts[path],
            serial,
            parent,
            key,
            machine=SupervisorMachine(spec, path, self.instances[path]),
        )
        self.latest[path] = sup
        self.events.append(["start", path, sup.n])
        sup.inbox.append(Booted())
        self._pump(sup)
        return sup

    def _terminate(self, sup: Sup, key: str, serial: int) -> None:
        process = sup.children[key]
        assert process.serial == serial, "a stop names the living incarnation"
        if not process.alive:
            return  # its exit is in the inbox
        if isinstance(process, Sup):
            process.was_told = True
            process.inbox.append(StopRequested(SHUTDOWN))
            self._pump(process)
            return
        how = process.node.get("on_shutdown", "clean")
        if how != "hang":
            self._awaited_end(sup, process, {"clean": SHUTDOWN, **REASONS}[how])

    def _awaited_end(self, sup: Sup, process: Process, reason: ExitReason) -> None:
        if process.alive:
            self._ended(process, reason)
            sup.awaited.append((Exited(process.key, process.serial, reason), self.now))

    def _ended(self, process: Process, reason: ExitReason) -> None:
        process.alive = False
        self.events.append(["stop", process.path, process.n, reason_word(reason)])

    def _killed(self, sup: Sup) -> list[list[Json]]:
        """Kill a supervisor; return the stops of its orphans, sorted."""
        self._ended(sup, KILLED)
        kept, self.events = self.events, []
        for child in sup.children.values():
            if not child.alive:
                continue
            if isinstance(child, Sup):
                child.inbox.append(StopRequested(KILLED))
                self._pump(child)
            else:
                self._ended(child, KILLED)
        orphans, self.events = sorted(self.events, key=event_key), kept
        if sup.parent is not None:
            sup.parent.inbox.append(Exited(sup.key, sup.serial, KILLED))
        return orphans

    def _tree(self, sup: Sup) -> list[Json]:
        asked = Asked("which_children")
        sup.inbox.append(Request(asked, SupervisorMachine.child_rows))
        self._pump(sup)
        rows = [[row.key, str(row.shown), str(row.type)] for row in asked.answer]
        for row in rows:
            child = sup.children.get(row[0])
            if row[1:] == ["running", "supervisor"] and isinstance(child, Sup):
                row.append(self._tree(child))
        return listed(rows)


def run_scenario(scenario: Json) -> Json:
    """Return the trace of *scenario* on the pure core."""
    return CoreWorld(scenario).run()
