"""The supervisor as an actor: passes messages to its machine, and performs the actions.

- Its thread never waits for a child: start functions run on their own threads, stops are requests,
  and results come back as messages.
- Every request gets one answer, also one that arrives while the actor ends.
- However the actor ends, by an internal error too, its children are ended and the owner is
  notified once.
"""

from __future__ import annotations

import math
import threading
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, assert_never

import pykka

from phalanx.supervision.core import messages as msg
from phalanx.supervision.core.machine import Status, SupervisorMachine
from phalanx.supervision.core.notices import Notice, SupervisorExited
from phalanx.supervision.core.restart_rules import KILLED, SHUTDOWN, ExitKind, ExitReason
from phalanx.supervision.core.snapshot import snapshot_of
from phalanx.supervision.core.spec import SupervisorSpec, actor_class
from phalanx.supervision.errors import SupervisorDown, error_text

from .adapters import pykka_child
from .mailbox import ProtectedActor
from .start import StartContext

if TYPE_CHECKING:
    from collections.abc import Callable

    from phalanx.supervision.core.snapshot import Below, SupervisorSnapshot

    from .monitors import Cancel
    from .services import TreeServices


class SupervisorActor(ProtectedActor):
    """One supervisor of a tree.

    Only its own thread changes it; `post`, `kill`, `terminate` and `snapshot` are for any thread.
    As a child of another supervisor it is its own handle.

    Attributes:
        machine: Its decisions, and the state of its children.
        services: Those of its tree.
        on_use: Called when one of its children has been of use, from any thread.
        thread: Its thread, once it runs.
        is_over: It has ended for its owner; its thread may still run.
        ended: The reason of its end, once the owner has it.
    """

    def __init__(
        self,
        spec: SupervisorSpec,
        path: str,
        services: TreeServices,
        *,
        on_start: Callable[[SupervisorActor | None, BaseException | None], None],
        on_exit: Callable[[ExitReason], None],
        on_use: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__()
        self.machine = SupervisorMachine(spec, path, services.instances.get(path, 0))
        self.services = services
        self.thread: threading.Thread | None = None
        self.is_over = False
        self.ended: ExitReason | None = None
        self.on_use, self._on_start, self._on_exit = on_use, on_start, on_exit
        self._lock = threading.RLock()  # a finalizer may interrupt its holder
        self._deciding = threading.RLock()  # held while the machine decides or is shown
        self._starts: dict[str, StartContext] = {}
        self._unanswered: dict[int, Any] = {}  # callers, wherever their requests are
        self._alarm: Cancel | None = None
        self._is_killed = False
        self._is_closed = False  # nothing is accepted from now on

    def post(self, event: msg.Event) -> bool:
        """Put *event* at the end of the mailbox; return False if it will not be read."""
        with self._lock:
            if self._is_closed:
                return False
            try:
                self.actor_ref.tell(event)
            except pykka.ActorDeadError:
                return False
            return True

    def terminate(self, reason: ExitReason) -> None:
        """Ask it to stop its children and to end with *reason*."""
        self.post(msg.StopRequested(reason))

    def kill(self) -> None:
        """End at once, without handling the mailbox; kill the children, or ask them to end."""
        with self._lock:
            if self._is_killed or self._is_closed:
                return
            self._is_killed = True
        self._end_now(KILLED)
        self.post(msg.StopRequested(KILLED))  # wakes the thread, which then ends

    @property
    def is_elsewhere(self) -> bool:
        """Whether this process is a fork of the one that has its thread."""
        thread = self.thread
        return thread is not None and not thread.is_alive() and not self.is_over

    def start_of(self, key: str) -> StartContext | None:
        """Return the latest start of child *key* that has not ended."""
        return self._starts.get(key)

    def will_run(self, key: str, *below: str) -> bool:
        """Return whether child *key*, or one *below* it, runs or is going to without a request."""
        with self._deciding:
            machine, child = self.machine, self.machine.children.get(key)
            if machine.ended is not None:
                return True  # the supervisor above decides; the message to it is under way
            if child is None or (below and not isinstance(child.spec.start, SupervisorSpec)):
                return False
            if child.status is Status.UNDEFINED and machine.is_ready and machine.is_idle:
                return False
        nested = self.supervisors().get(key) if below else None
        return nested is None or nested.will_run(*below)  # None: it is being started

    def supervisors(self) -> dict[str, SupervisorActor]:
        """Return the supervisors that run as children, by key."""
        with self._lock:
            starts = list(self._starts.values())
        return {start.key: start.nested for start in starts if start.nested is not None}

    def snapshot(self, below: Below) -> SupervisorSnapshot:
        """Return this supervisor as it is now; *below* are those below it, by path."""
        with self._deciding:
            return snapshot_of(self.machine, self.services.clock(), below)

    def on_start(self) -> None:
        """Begin with a first message to itself."""
        self.thread = threading.current_thread()
        self.post(msg.Booted())

    def on_message(self, message: Any, /) -> None:
        """Decide and perform; what is no event, such as a broadcast of Pykka's, has no effect."""
        if not isinstance(message, msg.Event):
            return
        if isinstance(message, msg.Request):
            self._unanswered[id(message.caller)] = message.caller
        if self._is_killed:
            self.stop()
            return
        event = message
        if isinstance(event, msg.Exited | msg.NotStarted):
            with self._lock:
                start = self._starts.get(event.child)
                if start is not None and start.serial == event.serial:
                    del self._starts[event.child]
            if start and isinstance(event, msg.Exited) and self.machine.running(event):
                # Not under the lock: rules may take a snapshot of the tree.
                event = replace(event, directive=event.directive or start.directive(event.reason))
        elif isinstance(event, msg.Request):
            starts = list(self._starts.values())
            event = replace(event, dead=frozenset(one.serial for one in starts if one.has_ended))
        path, known = self.machine.path, len(self.machine.children)
        with self._deciding:
            # Time is that of the handling, as in OTP: a late look at the mailbox is a late restart.
            actions = self.machine.handle(event, self.services.clock())
        if self.machine.instances:
            self.services.instances[path] = self.machine.instances
        if len(self.machine.children) < known:
            self.services.forget_instances(path, self.machine.children)
        for action in actions:
            self._perform(action)

    def _perform(self, action: msg.Action) -> None:
        match action:
            case msg.StartChild():
                self._start(action)
            case msg.AbandonStart(key):
                self._abandon(key)
            case msg.TerminateChild(key):
                self._starts[key].terminate(SHUTDOWN)
            case msg.KillChild(key):
                self._starts[key].kill()
            case msg.Retry(attempt=attempt):
                backoff = self.machine.spec.backoff
                if backoff is None or not attempt:
                    self.post(action)
                else:
                    self._post_after(backoff.delay(attempt, self.services.jitter()), action)
            case msg.Alarm(delay=delay):
                if self._alarm is not None:
                    self._alarm()
                self._alarm = self._post_after(delay, action)
            case msg.Reply(caller, answer):
                del self._unanswered[id(caller)]
                caller.set(answer)
            case msg.BecomeReady():
                self._on_start(self, None)
            case msg.Exit(reason, error):
                if error is not None:
                    self._on_start(None, error)
                self._finish(reason if error is None else None)
                self.stop()
            case Notice():
                self.services.announce(action)
            case _:
                assert_never(action)

    def _start(self, action: msg.StartChild) -> None:
        key, spec = action.child, action.spec
        limit = math.inf if spec.start_within is None else spec.start_within
        context = StartContext(self, action, self.services.clock() + limit)
        if isinstance(spec.start, SupervisorSpec):  # first: `kill` ends it with its context
            context.nested = SupervisorActor(
                *(spec.start, context.path, self.services),
                on_start=context.settle,
                on_exit=context.exited,
                on_use=context.progressed,
            )
        with self._lock:
            if self._is_killed:
                return
            self._starts[key] = context
        try:
            if context.nested is not None:
                self.services.run(context.nested)
                return
            assert not isinstance(spec.start, SupervisorSpec)
            actor = actor_class(spec.start)
            start = spec.start if actor is None else pykka_child(actor)
            self.services.spawn(partial(context.launch, start), f"phalanx-start {context.path}")
        except (RuntimeError, MemoryError) as error:  # no thread is left: this start has failed
            context.settle(None, error)

    def _abandon(self, key: str) -> None:
        with self._lock:
            context = self._starts.pop(key)
        if context.nested is not None:
            context.nested.kill()
        context.abandon()

    def _post_after(self, delay: float, event: msg.Event) -> Cancel:
        at = self.services.clock() + delay
        return self.services.timers.call_at(at, partial(self.post, event))

    def _finish(self, reason: ExitReason | None) -> None:
        """Report the end to the owner, once; None after a failed start, which reported it."""
        with self._lock:
            if self.is_over:
                return
            self.is_over = True
        if self._alarm is not None:
            self._alarm()
        if reason is not None:
            self.ended = reason
            self._on_exit(reason)

    def _end_now(self, reason: ExitReason, error: BaseException | None = None) -> None:
        """End the children and report the end, or a start that failed by *error*."""
        path = self.machine.path
        self.services.announce(SupervisorExited(path, self.services.clock(), reason))
        with self._lock:
            starts = list(self._starts.values())
        for start in reversed(starts):
            start.abandon(reason)
            # One that still starts would handle a request to stop only after a start that may hang.
            if start.nested is not None and not start.nested.machine.is_ready:
                start.nested.kill()
        if error is not None and not self.machine.is_ready:
            self._on_start(None, error)
        self._finish(reason)

    def failed(self, error: BaseException, /) -> None:
        """End after *error*, a fault of the supervisor: the children end too."""
        reason = ExitReason(ExitKind.CRASH, f"supervisor failed: {error_text(error)}")
        with self._lock:
            self._is_killed = True
        self._end_now(reason, error)
        self.stop()

    def _actor_loop_teardown(self) -> None:
        # Requests are sent by `tell`, because their answers may come later; so Pykka does not
        # answer those that are left. After a kill or a failure they are anywhere: in the inbox, in
        # the machine's mailbox or its operation, in actions that were not performed.
        with self._lock:
            self._is_closed = True
        while not self.actor_inbox.empty():
            message = self.actor_inbox.get().message
            if isinstance(message, msg.Request):
                self._unanswered[id(message.caller)] = message.caller
        for caller in self._unanswered.values():
            caller.set(SupervisorDown())
        self._unanswered.clear()
        self.services.leave(self)
