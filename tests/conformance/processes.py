"""Runs scenarios on the real supervisor actors; each worker is a real OS process.

Guarantees: workers really exit, crash, are killed and fail to start; what is recorded is what the
processes and the tree's own notices say, in the order in which they say it. A step begins when
nothing that the one before set off is still under way.

What is not real: the clock of the restart windows stands at the step's time, and the wait for a
worker that hangs on purpose is cut short. So scenarios that count seconds run in milliseconds.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pykka
from pykka import messages

from phalanx.supervision import (
    IGNORE,
    ExitReason,
    Notice,
    StartFailed,
    Supervisor,
    SupervisorBegan,
    SupervisorDown,
    SupervisorExited,
    SupervisorStartFailed,
    SupervisorView,
)
from phalanx.supervision.core.machine import SupervisorMachine
from phalanx.supervision.core.messages import Request, StopRequested
from phalanx.supervision.tree.actor import SupervisorActor

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
from .shell_processes import DEADLINE, Process, ShellProcesses


class VirtualTimers:
    """The clock of one scenario; an alarm rings when a process hangs that it waits for."""

    def __init__(self) -> None:
        self.now = 0.0
        self.hanging: set[str] = set()
        self.told: list[Process] = []  # which will end, because they do not hang

    def clock(self) -> float:
        return self.now

    def call_at(self, at: float, callback: Callable[[], object]) -> Callable[[], None]:
        if self.hanging:
            for process in self.told:
                assert process.ended.wait(DEADLINE), "the process does not end"
            self.told.clear()
            self.now = max(self.now, at)
            callback()
        return lambda: None


@dataclass
class Worker:
    """The handle of one worker process."""

    world: ProcessWorld
    path: str
    n: int
    node: Json
    process: Process

    def terminate(self, reason: ExitReason) -> None:
        how = self.node.get("on_shutdown", "clean")
        if how == "hang":
            self.world.timers.hanging.add(self.path)
        else:
            self.world.timers.told.append(self.process)
            self.process.end(how)

    def kill(self) -> None:
        self.process.end("kill")


class ProcessWorld:
    """One scenario on real processes."""

    def __init__(self, scenario: Json, shells: ShellProcesses) -> None:
        self.scenario = scenario
        self.shells = shells
        self.timers = VirtualTimers()
        self._lock = threading.Lock()
        self._attempts: Counter[str] = Counter()
        self._events: list[list[Json]] = []
        self._orphans: set[tuple[str, int]] = set()
        self._orphaned: list[list[Json]] = []
        self._workers: dict[str, Worker] = {}  # the latest of each path, while it lives
        self._ever: set[str] = set()
        self._top: Supervisor | None = None

    def run(self) -> Json:
        """Return the trace."""
        spec = supervisor_spec(self.scenario["tree"], self._starter)
        try:
            self._top = Supervisor(
                spec, clock=self.timers.clock, timers=self.timers, subscriber=self._noticed,
                log=Silent(),
            )  # fmt: skip
        except StartFailed:
            failed = {"result": "error:start_failed", "events": self._taken()}
            return {"start": failed, "steps": [], "final": None, "teardown": []}
        start = {"result": "ok", "events": self._taken()}
        try:
            steps = [self._step(step) for step in self.scenario["steps"]]
            if self._top.exit_reason is None:
                final = {"top": "alive", "reason": None, "tree": self._tree(self._top)}
            else:
                word = reason_word(self._top.exit_reason)
                final = {"top": "dead", "reason": word, "tree": None}
        finally:
            self._top.close(timeout=DEADLINE)
        return {"start": start, "steps": steps, "final": final, "teardown": self._taken()}

    # --- recording ------------------------------------------------------------------------

    def _record(self, event: list[Json]) -> None:
        with self._lock:
            orphaned = event[0] == "stop" and (event[1], event[2]) in self._orphans
            (self._orphaned if orphaned else self._events).append(event)

    def _taken(self) -> list[list[Json]]:
        with self._lock:
            taken, self._events = in_order(self._events), []
        return taken

    def _noticed(self, notice: Notice) -> None:
        match notice:
            case SupervisorBegan(path):
                self._attempts[path] += 1
                self._ever.add(path)
                self._record(["start", path, self._attempts[path]])
            case SupervisorExited(path, _, reason):
                self._record(["stop", path, self._attempts[path], reason_word(reason)])
            case SupervisorStartFailed(path):
                self._record(["stop", path, self._attempts[path], "start_failed"])
            case _:
                pass

    def _starter(self, node: Json) -> Callable[..., Any]:
        def start(ctx: Any) -> Any:
            path: str = ctx.path
            self._attempts[path] += 1
            n = self._attempts[path]

            def ended(reason: ExitReason) -> None:
                self._record(["stop", path, n, reason_word(reason)])
                self.timers.hanging.discard(path)
                if (latest := self._workers.get(path)) and latest.n == n:
                    del self._workers[path]
                ctx.exited(reason)

            try:
                process = self.shells.start(script(node, n), ended)
            except BaseException:
                self._record(["start_failed", path, n])
                raise
            if process is None:
                self._record(["start_ignored", path, n])
                return IGNORE
            self._record(["start", path, n])
            self._workers[path] = Worker(self, path, n, node, process)
            self._ever.add(path)
            return self._workers[path]

        return start

    # --- steps ----------------------------------------------------------------------------

    def _step(self, step: Json) -> Json:
        self.timers.now = max(self.timers.now, step["at"] / 1000)
        if step["op"] == "batch":
            held = self._hold(step["sup"])
            asked = [self._submit(op) for op in step["ops"]]
            if held is not None:
                held.set()
        elif step["op"] == "exit" and step["reason"] == "kill" and self._actor(step["child"]):
            return self._kill(step)
        else:
            asked = [self._submit(step)]
        results = [self._result(one) for one in asked]
        self._wait_quiet()
        result = results if step["op"] == "batch" else results[0]
        return {"result": result, "events": self._taken()}

    def _hold(self, path: str) -> threading.Event | None:
        """Make the supervisor at *path* wait, so that a whole batch lies in its mailbox."""
        actor = self._actor(path)
        if actor is None:
            return None
        held = threading.Event()
        actor.actor_ref.tell(messages.ProxySetAttr(("held",), held))
        actor.actor_ref.tell(messages.ProxyCall(("held", "wait"), (DEADLINE,), {}))
        return held

    def _submit(self, op: Json) -> Asked:
        asked = Asked(op["op"])
        if op["op"] == "exit":
            asked.answer = self._exit(op)
            return asked
        path, _, key = op["child"].rpartition("/") if "child" in op else (op["sup"], "", "")
        actor = self._actor(path)
        if actor is not None:
            asked.answer = pykka.ThreadingFuture()
            if not actor.post(self._request(asked, op, actor, key)):
                asked.answer.set(SupervisorDown())
        return asked

    def _result(self, asked: Asked) -> Json:
        if asked.op == "exit":
            return asked.answer
        if asked.answer is not None:
            asked.answer = asked.answer.get(timeout=DEADLINE)
        return asked.result()

    def _exit(self, op: Json) -> str:
        path = op["child"]
        actor = self._actor(path)
        if actor is not None:
            actor.post(StopRequested(REASONS[op["reason"]]))
            # In a batch the end must lie in the parent's mailbox before the next message does.
            self._wait(lambda: actor.machine.ended is not None and actor.actor_stopped.is_set())
            return "ok"
        worker = self._workers.get(path)
        if worker is None:
            return "not_running"
        worker.process.end(op["reason"])
        assert worker.process.ended.wait(DEADLINE), "the process does not end"
        return "ok"

    def _kill(self, step: Json) -> Json:
        path = step["child"]
        actor = self._actor(path)
        assert actor is not None
        below = path + "/"
        killed = [w for p, w in list(self._workers.items()) if p.startswith(below)]
        sups = [p for p in self._supervisors() if p.startswith(below)]
        with self._lock:
            self._orphans = {(w.path, w.n) for w in killed}
            self._orphans |= {(p, self._attempts[p]) for p in sups}
        actor.kill()
        self._wait(lambda: len(self._orphaned) == len(self._orphans))
        self._wait_quiet()
        record = {"result": "ok", "events": self._taken()}
        with self._lock:
            orphans = sorted(self._orphaned, key=event_key)
            self._orphaned, self._orphans = [], set()
        return record | {"orphans": orphans} if orphans else record

    def _request(self, asked: Asked, op: Json, actor: SupervisorActor, key: str) -> Request:
        serial = None
        if op["op"] == "terminate_child" and actor.machine.spec.strategy.has_instances:
            if op["child"] not in self._ever:
                key = key.partition("#")[0]
            else:
                child = actor.machine.children.get(key)
                serial = child.serial if child else -1
        return Request(asked.answer, asking(op, key, self._starter, serial))

    # --- the tree -------------------------------------------------------------------------

    def _view(self, path: str) -> SupervisorView:
        assert self._top is not None
        _, _, below = path.partition("/")
        return self._top.supervisor(below) if below else self._top

    def _actor(self, path: str) -> SupervisorActor | None:
        """Return the living supervisor at *path*."""
        try:
            actor = self._view(path)._actor()
        except SupervisorDown:
            return None
        living = actor.machine.ended is None and not actor.actor_stopped.is_set()
        return actor if living and self._view(path) else None

    def _supervisors(self) -> dict[str, SupervisorActor]:
        """Return every supervisor below the top one, and that, by path."""
        assert self._top is not None
        found: dict[str, SupervisorActor] = {}
        pending = [self._top._top]
        while pending:
            actor = pending.pop()
            found[actor.machine.path] = actor
            pending.extend(actor.supervisors().values())
        return found

    def _tree(self, view: SupervisorView) -> list[Json]:
        rows: list[list[Any]] = []
        for row in view.which_children(timeout=DEADLINE):
            rows.append([row.key, str(row.shown), str(row.type)])
            if rows[-1][1:] == ["running", "supervisor"]:
                rows[-1].append(self._tree(view.supervisor(row.key)))
        return listed(rows)

    # --- quiet ----------------------------------------------------------------------------

    def _wait_quiet(self) -> None:
        """Wait until no supervisor is in the middle of anything and no message is on its way.

        Two looks that see the same, with an answer from every supervisor in between: whatever a
        supervisor was still doing at the first look is done at the second, and shows.
        """
        deadline = time.monotonic() + DEADLINE
        seen: Json = None
        while True:
            self._barrier()
            look = self._look()
            if look is not None and look == seen:
                return
            seen = look
            assert time.monotonic() < deadline, self._look()

    def _look(self) -> Json:
        """Return what the tree looks like; None where something is under way."""
        assert self._top is not None
        if self._top.exit_reason is not None:
            return self._top.exit_reason
        state: list[Json] = [len(self._events)]
        for path, actor in sorted(self._supervisors().items()):
            busy = not actor.machine.is_idle or not actor.machine.is_ready
            if busy or actor.machine.ended is not None or not actor.actor_inbox.empty():
                return None
            state.append((path, id(actor), actor.machine._numbers, len(actor.machine.children)))
        return state

    def _barrier(self) -> None:
        for actor in self._supervisors().values():
            future: pykka.ThreadingFuture[Any] = pykka.ThreadingFuture()
            if actor.post(Request(future, SupervisorMachine.counts)):
                future.get(timeout=DEADLINE)

    def _wait(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + DEADLINE
        while not condition():
            assert time.monotonic() < deadline, "what should happen does not"
            time.sleep(0.0002)


class Silent:
    """A logger that says nothing."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_, **__: None
