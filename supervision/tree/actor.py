"""The supervisor as an actor: it hears a message, has its machine decide, and performs the actions.

- Its thread never waits for a child: start functions run on their own threads, stops are requests,
  and what follows comes back as a message.
- Every request gets one answer, also one that arrives while the actor ends.
- Whatever ends the actor, a fault of its own included, its children are ended and the owner hears
  of it once.
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
from phalanx.supervision.core.notices import SupervisorExited
from phalanx.supervision.core.policy import KILLED, ExitKind, ExitReason
from phalanx.supervision.core.snapshot import snapshot_of
from phalanx.supervision.core.spec import SupervisorSpec, actor_class
from phalanx.supervision.errors import error_text

from .adapters import pykka_child
from .mailbox import ProtectedActor
from .services import Member
from .start import StartContext

if TYPE_CHECKING:
    from collections.abc import Callable

    from phalanx.supervision.core.snapshot import Below, SupervisorSnapshot

    from .monitors import Cancel
    from .services import Subscriber, TreeServices


class SupervisorActor(ProtectedActor):
    """One supervisor of a tree.

    Only its own thread changes it; `post`, `kill`, `terminate` and `snapshot` are for any thread.
    As a child of another supervisor it is its own handle.

    Attributes:
        ended: The reason of its end, once the owner has it.
    """

    def __init__(
        self,
        spec: SupervisorSpec,
        path: str,
        services: TreeServices,
        *,
        on_start: Callable[[BaseException | None], None],
        on_exit: Callable[[ExitReason], None],
        on_use: Callable[[], None] | None = None,
    ) -> None:
        super().__init__()
        self.machine = SupervisorMachine(spec, path, services.instances.get(path, 0))
        self.member = Member(path)
        self.ended: ExitReason | None = None
        self._services = services
        self._on_start = on_start
        self._on_exit = on_exit
        self._on_use = on_use
        self._lock = threading.Lock()
        # Held while the machine decides or is shown; reentrant, for deciders that take a snapshot.
        self._deciding = threading.RLock()
        self._starts: dict[str, StartContext] = {}
        self._nested: dict[str, SupervisorActor] = {}
        self._unanswered: dict[int, Any] = {}  # callers, wherever their requests are
        self._alarm: Cancel | None = None
        self._is_killed = False
        self._is_closed = False  # nothing is accepted from now on

    def begin(self) -> None:
        """Start the actor's thread."""
        self._services.enter(self.member)
        try:
            self._services.begin(self)
        except BaseException:
            self._services.leave(self.member)
            raise

    # --- for any thread -------------------------------------------------------------------

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
        path = self.machine.path
        self._services.announce(SupervisorExited(path, KILLED, self._services.clock()))
        self._drop_children(KILLED)
        self._finish(KILLED)
        self.post(msg.StopRequested(KILLED))  # wakes the thread, which then ends

    def start_of(self, key: str) -> StartContext | None:
        """Return the latest start of child *key* that has not ended."""
        return self._starts.get(key)

    def nested(self, key: str) -> SupervisorActor | None:
        """Return the supervisor that runs as child *key*."""
        return self._nested.get(key)

    def will_run(self, key: str) -> bool:
        """Return whether child *key* runs, or is going to without a further request."""
        with self._deciding:
            child = self.machine.children.get(key)
            if child is None:
                return False
            return child.status is not Status.UNDEFINED or not self.machine.is_idle

    def supervisors(self) -> dict[str, SupervisorActor]:
        """Return the supervisors that run as children, by key."""
        with self._lock:
            return dict(self._nested)

    def needs_this_thread(self) -> bool:
        """Return whether it needs the calling thread in order to answer or to end."""
        return self._services.is_inside(self.machine.path)

    def snapshot(self, below: Below) -> SupervisorSnapshot:
        """Return this supervisor as it is now; *below* returns the snapshot of a child, by key."""
        with self._deciding:
            return snapshot_of(self.machine, self._services.clock(), below)

    def subscribe(self, subscriber: Subscriber) -> Cancel:
        """Call *subscriber* with every notice of the tree; return a function that ends that."""
        return self._services.subscribe(subscriber)

    # --- the loop -------------------------------------------------------------------------

    def on_start(self) -> None:
        """Begin with a first message to itself."""
        self.member.thread = threading.current_thread()
        self.post(msg.Booted())

    def hear(self, message: msg.Event, /) -> None:
        """Decide and perform."""
        if isinstance(message, msg.Request):
            self._unanswered[id(message.caller)] = message.caller
        if self._is_killed:
            self.stop()
            return
        event = message
        if isinstance(event, msg.Exited | msg.NotStarted | msg.StartIgnored):
            self._forget(event)
        elif isinstance(event, msg.CountRequested):
            starts = list(self._starts.values())
            event = replace(event, dead=frozenset(one.serial for one in starts if one.has_ended))
        elif isinstance(event, msg.Progressed) and self._on_use is not None:
            self._on_use()
        path, known = self.machine.path, len(self.machine.children)
        with self._deciding:
            # Time is that of the handling, as in OTP: a late look at the mailbox is a late restart.
            actions = self.machine.handle(event, self._services.clock())
        if self.machine.instances:
            self._services.instances[path] = self.machine.instances
        if len(self.machine.children) < known:
            self._services.forget_instances(path, self.machine.children)
        for action in actions:
            self._perform(action)

    def _forget(self, event: msg.Exited | msg.NotStarted | msg.StartIgnored) -> None:
        known = self._starts.get(event.child)
        if known is not None and known.serial == event.serial:
            with self._lock:
                del self._starts[event.child]
                self._nested.pop(event.child, None)

    def _perform(self, action: msg.Action) -> None:
        match action:
            case msg.StartChild():
                self._start(action)
            case msg.AbandonStart(key):
                self._abandon(key)
            case msg.TerminateChild(key, _, reason):
                self._starts[key].terminate(reason)
            case msg.KillChild(key):
                self._starts[key].kill()
            case msg.RetryLater():
                self._retry(action)
            case msg.SetAlarm(alarm, delay):
                if self._alarm is not None:
                    self._alarm()
                self._alarm = self._post_after(delay, msg.AlarmRang(alarm))
            case msg.Reply(caller, answer):
                del self._unanswered[id(caller)]
                caller.set(answer)
            case msg.BecomeReady():
                self._on_start(None)
            case msg.FailStart(_, error):
                self._on_start(error)
                self._finish(None)
                self.stop()
            case msg.Exit(reason):
                self._finish(reason)
                self.stop()
            case msg.Announce(notice):
                self._services.announce(notice)
            case _:
                assert_never(action)

    # --- performing -----------------------------------------------------------------------

    def _start(self, action: msg.StartChild) -> None:
        key, spec = action.child, action.spec
        limit = math.inf if spec.start_within is None else spec.start_within
        context = StartContext(
            f"{self.machine.path}/{key}",
            action,
            self._services.clock() + limit,
            decider=self.machine.spec.decider,
            post=self.post,
            services=self._services,
        )
        with self._lock:
            if self._is_killed:
                return
            self._starts[key] = context
        try:
            if isinstance(spec.start, SupervisorSpec):
                self._start_nested(context, spec.start)
                return
            actor = actor_class(spec.start)
            start = spec.start if actor is None else pykka_child(actor)
            self._services.spawn(partial(context.launch, start), f"phalanx-start {context.path}")
        except (RuntimeError, MemoryError) as error:  # no thread is left: this start has failed
            context.settle_failed(error)

    def _start_nested(self, context: StartContext, spec: SupervisorSpec) -> None:
        def started(error: BaseException | None) -> None:
            if error is None:
                context.settle(actor)
            else:
                context.settle_failed(error)

        actor = SupervisorActor(
            spec,
            context.path,
            self._services,
            on_start=started,
            on_exit=context.exited,
            on_use=context.progressed,
        )
        with self._lock:
            self._nested[context.key] = actor
        actor.begin()

    def _abandon(self, key: str) -> None:
        with self._lock:
            nested = self._nested.pop(key, None)
            context = self._starts.pop(key)
        if nested is not None:
            nested.kill()
        context.abandon()

    def _retry(self, action: msg.RetryLater) -> None:
        due, backoff = msg.RetryDue(action.child, action.ticket), self.machine.spec.backoff
        if backoff is None or not action.attempt:
            self.post(due)
        else:
            self._post_after(backoff.delay(action.attempt, self._services.chance()), due)

    def _post_after(self, delay: float, event: msg.Event) -> Cancel:
        def due() -> None:
            self.post(event)

        return self._services.timers.call_at(self._services.clock() + delay, due)

    # --- the end --------------------------------------------------------------------------

    def _finish(self, reason: ExitReason | None) -> None:
        """Report the end to the owner, once; None after a failed start, which reported it."""
        with self._lock:
            if self.member.is_over:
                return
            self.member.is_over = True
        if self._alarm is not None:
            self._alarm()
        if reason is not None:
            self.ended = reason
            self._on_exit(reason)

    def _drop_children(self, reason: ExitReason) -> None:
        with self._lock:
            starts, nested = list(self._starts.values()), dict(self._nested)
        for start in reversed(starts):
            start.abandon(reason)
            below = nested.get(start.key)
            # One that still starts would handle a request to stop only after a start that may hang.
            if below is not None and not below.machine.is_ready:
                below.kill()

    def failed(self, error: BaseException, /) -> None:
        """End after *error*, a fault of the supervisor: the children end too."""
        reason = ExitReason(ExitKind.CRASH, f"supervisor failed: {error_text(error)}")
        with self._lock:
            self._is_killed = True
        self._drop_children(reason)
        path = self.machine.path
        self._services.announce(SupervisorExited(path, reason, self._services.clock()))
        if not self.machine.is_ready:
            self._on_start(error)
        self._finish(reason)
        self.stop()

    def _actor_loop_teardown(self) -> None:
        # Requests are told, not asked, because their answers may come later; so Pykka does not
        # answer those that are left. After a kill or a failure they are anywhere: in the inbox, in
        # the machine's mailbox or its operation, in actions that were not performed.
        with self._lock:
            self._is_closed = True
        while not self.actor_inbox.empty():
            message = self.actor_inbox.get().message
            if isinstance(message, msg.Request):
                self._unanswered[id(message.caller)] = message.caller
        for caller in self._unanswered.values():
            caller.set(msg.Refused(msg.Refusal.NOPROC))
        self._unanswered.clear()
        self._services.leave(self.member)
