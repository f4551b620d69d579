"""The supervisor as an actor: wait for a message, decide, perform.

Guarantees: the actor's thread never waits for a child: start functions run on threads of their
own, stops are asked for, and what follows comes back as a message. Every request gets one answer,
also one that arrives while the actor ends. Whatever ends the actor, a bug in it included, its
children are told and whoever started it hears of it once.

Left to others: what to do (`machine`), and what a child is (`child`).
"""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import TYPE_CHECKING, Any, assert_never

import pykka

from phalanx.supervision.core.child import actor_class
from phalanx.supervision.core.machine import SupervisorMachine
from phalanx.supervision.core.messages import (
    AbandonStart,
    Action,
    AlarmRang,
    Announce,
    BecomeReady,
    Booted,
    CountRequested,
    Event,
    Exit,
    Exited,
    FailStart,
    KillChild,
    NotStarted,
    Progressed,
    Refusal,
    Refused,
    Reply,
    Request,
    RetryDue,
    RetryLater,
    SetAlarm,
    StartChild,
    StartIgnored,
    StopRequested,
    TerminateChild,
)
from phalanx.supervision.core.notices import SupervisorExited
from phalanx.supervision.core.policy import KILLED, ExitKind, ExitReason
from phalanx.supervision.core.snapshot import snapshot_of
from phalanx.supervision.core.spec import SupervisorSpec
from phalanx.supervision.errors import error_text

from .adapters import pykka_child
from .mailbox import SteadfastActor
from .start import Incarnation

if TYPE_CHECKING:
    from collections.abc import Callable

    from phalanx.supervision.core.snapshot import Below, SupervisorSnapshot

    from .services import Cancel, Tree


class SupervisorActor(SteadfastActor):
    """One supervisor of a tree.

    Its own thread alone changes it; `post`, `kill` and `snapshot` are for any thread.
    """

    def __init__(
        self,
        spec: SupervisorSpec,
        path: str,
        tree: Tree,
        *,
        on_start: Callable[[BaseException | None], None],
        on_exit: Callable[[ExitReason], None],
        on_use: Callable[[], None] | None = None,
    ) -> None:
        super().__init__()
        self.machine = SupervisorMachine(spec, path, tree.instances.get(path, 0))
        self.thread: threading.Thread | None = None
        self.ended: ExitReason | None = None  # why, once whoever started it has been told
        self._tree = tree
        self._on_start = on_start
        self._on_exit = on_exit
        self._on_use = on_use
        self._lock = threading.Lock()
        self._deciding = (
            threading.RLock()
        )  # the machine changes, or is shown; a user's decider may look
        self._incarnations: dict[str, Incarnation] = {}
        self._nested: dict[str, SupervisorActor] = {}
        self._unanswered: dict[int, Any] = {}  # callers, wherever their requests wait
        self._alarm: Cancel | None = None
        self._is_killed = False
        self._is_closed = False  # nothing is accepted any more
        self._is_over = False  # whoever started it has been told

    # --- for any thread -------------------------------------------------------------------

    def post(self, event: Event) -> bool:
        """Put *event* at the end of the mailbox; return False where nobody will read it."""
        with self._lock:
            if self._is_closed:
                return False
            try:
                self.actor_ref.tell(event)
            except pykka.ActorDeadError:
                return False
            return True

    def kill(self) -> None:
        """End at once, without a word to the mailbox; the children are orphans and end too."""
        with self._lock:
            if self._is_killed or self._is_closed:
                return
            self._is_killed = True
        self._tree.announce(SupervisorExited(self.machine.path, KILLED, self._tree.clock()))
        self._orphan(KILLED)
        self._finish(KILLED)
        self.post(StopRequested(KILLED))  # so that the thread sees that it is over

    def incarnation(self, key: str) -> Incarnation | None:
        """Return the latest start of child *key* that has not ended."""
        return self._incarnations.get(key)

    def nested(self, key: str) -> SupervisorActor | None:
        """Return the supervisor that runs as child *key*."""
        return self._nested.get(key)

    @property
    def is_over(self) -> bool:
        """Whether its starter has been sent its end."""
        return self._is_over

    def needs_this_thread(self) -> bool:
        """Return whether it needs this thread in order to answer or to end."""
        return self._tree.is_inside(self.machine.path)

    def supervisors(self) -> dict[str, SupervisorActor]:
        """Return the supervisors that run as children, by key."""
        with self._lock:
            return dict(self._nested)

    def snapshot(self, below: Below) -> SupervisorSnapshot:
        """Return this supervisor as it is now; *below* gives the snapshot of a child, by key."""
        with self._deciding:
            return snapshot_of(self.machine, self._tree.clock(), below)

    # --- the loop -------------------------------------------------------------------------

    def on_start(self) -> None:
        """Begin: the first message to oneself."""
        self.thread = threading.current_thread()
        self.post(Booted())

    def hear(self, message: Event, /) -> None:
        """Decide and perform; whatever goes wrong here ends the supervisor, not the program."""
        if isinstance(message, Request):
            self._unanswered[id(message.caller)] = message.caller
        if self._is_killed:
            self.stop()
            return
        event = message
        if isinstance(event, Exited | NotStarted | StartIgnored):
            self._forget(event)
        elif isinstance(event, CountRequested):
            event = replace(event, dead=self._dead())
        elif isinstance(event, Progressed) and self._on_use is not None:
            self._on_use()
        known = len(self.machine.children)
        with self._deciding:
            # Time is that of the handling, as in OTP: a late look at the mailbox is a late restart.
            actions = self.machine.handle(event, self._tree.clock())
        if self.machine.instances:
            self._tree.instances[self.machine.path] = self.machine.instances
        if len(self.machine.children) < known:
            self._tree.forget_instances(self.machine.path, self.machine.children)
        for action in actions:
            self._perform(action)

    def _forget(self, event: Exited | NotStarted | StartIgnored) -> None:
        known = self._incarnations.get(event.child)
        if known is not None and known.serial == event.serial:
            with self._lock:
                del self._incarnations[event.child]
                self._nested.pop(event.child, None)

    def _dead(self) -> frozenset[int]:
        known = list(self._incarnations.values())
        return frozenset(one.serial for one in known if one.has_ended)

    def _perform(self, action: Action) -> None:
        match action:
            case StartChild():
                self._start(action)
            case AbandonStart(key):
                self._dropped(key).abandon()
            case TerminateChild(key, _, reason):
                self._incarnations[key].terminate(reason)
            case KillChild(key):
                self._incarnations[key].kill()
            case RetryLater():
                self._retry(action)
            case SetAlarm(alarm, delay):
                self._set_alarm(alarm, delay)
            case Reply(caller, answer):
                del self._unanswered[id(caller)]
                caller.set(answer)
            case BecomeReady():
                self._on_start(None)
            case FailStart(_, error):
                self._on_start(error)
                self._finish(None)
                self.stop()
            case Exit(reason):
                self._finish(reason)
                self.stop()
            case Announce(notice):
                self._tree.announce(notice)
            case _:
                assert_never(action)

    # --- performing -----------------------------------------------------------------------

    def _start(self, action: StartChild) -> None:
        key, spec = action.child, action.spec
        limit = float("inf") if spec.start_within is None else spec.start_within
        incarnation = Incarnation(
            f"{self.machine.path}/{key}",
            action.incarnation,
            self._tree.clock() + limit,
            key=key,
            serial=action.serial,
            spec=spec,
            decider=self.machine.spec.decider,
            post=self.post,
            tree=self._tree,
        )
        with self._lock:
            if self._is_killed:
                return
            self._incarnations[key] = incarnation
        if isinstance(spec.start, SupervisorSpec):
            self._start_nested(incarnation, spec.start)
            return
        actor = actor_class(spec.start)
        start = spec.start if actor is None else pykka_child(actor)
        name = f"phalanx-start {incarnation.path}"
        thread = threading.Thread(target=incarnation.launch, args=(start,), name=name, daemon=True)
        try:
            thread.start()
        except (RuntimeError, MemoryError) as error:  # no thread is left: this start has failed
            incarnation.settle_failed(error)

    def _start_nested(self, incarnation: Incarnation, spec: SupervisorSpec) -> None:
        actor: SupervisorActor

        def started(error: BaseException | None) -> None:
            if error is None:
                incarnation.settle(NestedSupervisor(actor))
            else:
                incarnation.settle_failed(error)

        actor = SupervisorActor(
            spec,
            incarnation.path,
            self._tree,
            on_start=started,
            on_exit=incarnation.exited,
            on_use=incarnation.progressed,
        )
        with self._lock:
            self._nested[incarnation.key] = actor
        try:
            run(actor, self._tree)
        except (RuntimeError, MemoryError) as error:  # as above
            incarnation.settle_failed(error)

    def _dropped(self, key: str) -> Incarnation:
        with self._lock:
            nested = self._nested.pop(key, None)
            incarnation = self._incarnations.pop(key)
        if nested is not None:
            nested.kill()
        return incarnation

    def _retry(self, action: RetryLater) -> None:
        due = RetryDue(action.child, action.ticket)
        backoff = self.machine.spec.backoff
        if backoff is None or not action.attempt:
            self.post(due)
            return
        delay = backoff.delay(action.attempt, self._tree.chance())
        self._tree.call_at(self._tree.clock() + delay, lambda: self.post(due))

    def _set_alarm(self, alarm: int, delay: float) -> None:
        if self._alarm is not None:
            self._alarm()
        at = self._tree.clock() + delay
        self._alarm = self._tree.call_at(at, lambda: self.post(AlarmRang(alarm)))

    # --- the end --------------------------------------------------------------------------

    def _finish(self, reason: ExitReason | None) -> None:
        """Tell whoever started this supervisor that it is over, once; None: its start told it."""
        with self._lock:
            if self._is_over:
                return
            self._is_over = True
        if self._alarm is not None:
            self._alarm()
        if reason is not None:
            self.ended = reason
            self._on_exit(reason)

    def _orphan(self, reason: ExitReason) -> None:
        with self._lock:
            orphans = list(self._incarnations.values())
            nested = dict(self._nested)
        for orphan in reversed(orphans):
            orphan.abandon(reason)
            below = nested.get(orphan.key)
            # One that still starts would see a request to stop only after a start that may hang.
            if below is not None and not below.machine.is_ready:
                below.kill()

    def failed(self, error: BaseException, /) -> None:
        """End after *error*, which is a fault of ours: the children are orphans and end too."""
        reason = ExitReason(ExitKind.CRASH, f"supervisor failed: {error_text(error)}")
        with self._lock:
            self._is_killed = True
        self._orphan(reason)
        self._tree.announce(SupervisorExited(self.machine.path, reason, self._tree.clock()))
        if not self.machine.is_ready:
            self._on_start(error)
        self._finish(reason)
        self.stop()

    def _actor_loop_teardown(self) -> None:
        # Requests are told, not asked, because their answers may come later; so Pykka does not
        # answer those that are left. After a kill or a failure they lie anywhere: in the inbox, in
        # the state's mailbox, in its task, in actions that were not performed.
        with self._lock:
            self._is_closed = True
        while not self.actor_inbox.empty():
            message = self.actor_inbox.get().message
            if isinstance(message, Request):
                self._unanswered[id(message.caller)] = message.caller
        for caller in self._unanswered.values():
            caller.set(Refused(Refusal.NOPROC))
        self._unanswered.clear()
        self._tree.leave(self)


class NestedSupervisor:
    """The handle of a supervisor that is a child; *ref* is its actor."""

    def __init__(self, actor: SupervisorActor) -> None:
        self.ref = actor

    def terminate(self, reason: ExitReason) -> None:
        """Ask it to stop its children and to end with *reason*."""
        self.ref.post(StopRequested(reason))

    def kill(self) -> None:
        """End it at once; its children are orphans."""
        self.ref.kill()


def run(actor: SupervisorActor, tree: Tree) -> None:
    """Start *actor* in *tree*: what `pykka.Actor.start` does after it has made one."""
    tree.enter(actor)
    pykka.ActorRegistry.register(actor.actor_ref)
    try:
        actor._start_actor_loop()  # noqa: SLF001 # the class method would make another actor  # pyright: ignore[reportPrivateUsage] # as above
    except BaseException:
        pykka.ActorRegistry.unregister(actor.actor_ref)
        tree.leave(actor)
        raise
