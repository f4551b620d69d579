"""One OTP supervisor as a machine without effects: events in, actions out.

- `SupervisorMachine.handle` alone changes it. Time is an argument; nothing here waits.
- Actions and their order are those of OTP's ``supervisor`` and Elixir's ``DynamicSupervisor``,
  but for the additions of a spec (back-off, decider, limits); ``tests/conformance`` compares them.
- What OTP does in one go (start a list of children, stop one) is an *operation*, a generator:
  ``yield`` is Erlang's selective ``receive``. While it waits, every event that it does not wait
  for stays in the mailbox, in order.
- A serial names one start of one child, as a pid does in OTP: an exit with another serial than the
  child's is that of an earlier incarnation, or was absorbed when the child was stopped.

Source: ``supervisor.erl`` in OTP and ``dynamic_supervisor.ex`` in Elixir; h11's ``Connection`` for
the form.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Generator, Iterable
from dataclasses import dataclass, replace
from enum import Enum, StrEnum, auto
from typing import TYPE_CHECKING, TypeAlias, assert_never

from phalanx.supervision.errors import error_text

from .decider import Directive
from .messages import (
    AbandonStart,
    Action,
    AlarmRang,
    Announce,
    Answer,
    BecomeReady,
    Booted,
    Children,
    ChildrenRequested,
    ChildRow,
    ChildSpecRequested,
    CountRequested,
    Counts,
    DeleteChildRequested,
    Done,
    Event,
    Exit,
    Exited,
    FailStart,
    Found,
    KillChild,
    NotStarted,
    Progressed,
    Refusal,
    Refused,
    Reply,
    Request,
    RestartChildRequested,
    RetryDue,
    RetryLater,
    SetAlarm,
    Shown,
    StartChild,
    StartChildRequested,
    Started,
    StartIgnored,
    StopRequested,
    TerminateChild,
    TerminateChildRequested,
)
from .notices import (
    CallbackFailed,
    ChildExited,
    ChildLost,
    ChildStarted,
    ChildStartFailed,
    SupervisorBegan,
    SupervisorExited,
    SupervisorGaveUp,
    SupervisorReady,
    SupervisorStartFailed,
)
from .policy import SHUTDOWN, AutoShutdown, ExitKind, ExitReason, Restart, Strategy
from .spec import BRUTAL_KILL

if TYPE_CHECKING:
    from .notices import Notice
    from .policy import RestartWindow
    from .spec import ChildSpec, SupervisorSpec

SIGTERM = 15  # its number everywhere; importing `signal` is for code with effects
ROUNDING = 1e-6  # seconds; sums of times are not exact, and an alarm that rang has rung


class StartTookTooLong(TimeoutError):  # names what happened, as the others do
    """The start function did not return within ``start_within``."""


class Status(StrEnum):
    """Where a child stands."""

    UNDEFINED = "undefined"
    STARTING = "starting"
    RUNNING = "running"
    RESTARTING = "restarting"
    STOPPING = "stopping"
    KILLED = "killed"  # and not gone yet


class Verdict(Enum):
    """What the end of a child leads to."""

    RESTART = auto()
    KEEP = auto()
    REMOVE = auto()
    GIVE_UP = auto()


def verdict(restart: Restart, reason: ExitReason, directive: Directive | None = None) -> Verdict:
    """Return what the end of a child leads to: OTP's table of restart types and exits."""
    match directive, restart, reason.is_failure:
        case Directive.ESCALATE, _, _:
            return Verdict.GIVE_UP
        case _, Restart.TEMPORARY, _:
            return Verdict.REMOVE
        case Directive.STOP, _, _:
            return Verdict.KEEP
        case (Directive.RESTART, _, _) | (_, Restart.PERMANENT, _) | (_, Restart.TRANSIENT, True):
            return Verdict.RESTART
        case _:  # a transient child that ended normally
            return Verdict.KEEP


@dataclass(slots=True, eq=False)
class Child:
    """One child.

    Attributes:
        key: Its id, or the id and number of an instance.
        spec: How it is started and stopped.
        status: Where it stands.
        serial: The serial of its latest start that succeeded; 0 before the first.
        incarnation: How often it has been started, attempts that failed included.
        has_exited: It has ended, and its exit lies in the mailbox.
        since: When it was last started, told to end or killed, in seconds of `handle`'s clock.
        attempt: Restarts in a row without a healthy time, for the back-off.
        ticket: Which retry it waits for; 0 for one without delay.
        has_progressed: This incarnation has been of use.
        fruitless: Restarts in a row that were of no use.
        last_exit: Why it last ended; None where it never did.
    """

    key: str
    spec: ChildSpec
    status: Status = Status.UNDEFINED
    serial: int = 0
    incarnation: int = 0
    has_exited: bool = False
    since: float = 0.0
    attempt: int = 0
    ticket: int = 0
    has_progressed: bool = False
    fruitless: int = 0
    last_exit: ExitReason | None = None

    @property
    def has_process(self) -> bool:
        """Whether there is something to stop or wait for."""
        return self.status in (Status.RUNNING, Status.STOPPING, Status.KILLED)

    @property
    def shown(self) -> Shown:
        """The state as requests show it."""
        if self.status is Status.RESTARTING:
            return Shown.RESTARTING
        return Shown.RUNNING if self.has_process else Shown.UNDEFINED

    @property
    def is_to_be_killed(self) -> bool:
        """Whether it was told to end, and is killed if it does not."""
        return self.status is Status.STOPPING and bool(self.spec.killable)

    @property
    def patience(self) -> float:
        """Seconds until more is done about it, once it was told to end or was killed."""
        if self.status is Status.KILLED:
            return self.spec.kill_within
        if self.spec.killable:
            return self.spec.stop_within
        return self.spec.stop_within + self.spec.kill_within


@dataclass(frozen=True, slots=True)
class _Receive:
    """What an operation waits for: an outcome or an exit with one of *serials*, or *alarm*."""

    kind: type[Exited] | tuple[type[Started], type[StartIgnored], type[NotStarted]]
    serials: Collection[int]
    alarm: int

    def takes(self, event: Event) -> bool:
        if isinstance(event, AlarmRang):
            return event.alarm == self.alarm
        return isinstance(event, self.kind) and event.serial in self.serials


_OUTCOMES = (Started, StartIgnored, NotStarted)
Operation: TypeAlias = Generator[_Receive, Event, None]


class SupervisorMachine:
    """One supervisor.

    Attributes:
        spec: What it was built from.
        path: Where it stands in the tree.
        children: By key, in start order; restarts never change that order.
        window: The restarts that count.
        instances: Instances numbered so far; a key never names two of them.
        is_ready: The initial start is over.
        ended: Why it has ended; None while it lives.
    """

    def __init__(self, spec: SupervisorSpec, path: str = "", instances: int = 0) -> None:
        """Build a supervisor that has not begun: deliver `Booted` to it."""
        self.spec = spec
        self.path = path or spec.id
        self.children: dict[str, Child] = {}
        self.window: RestartWindow = spec.intensity.window()
        self.instances = instances
        self.is_ready = False
        self.ended: ExitReason | None = None
        self._mailbox: deque[Event] = deque()
        self._operation: Operation | None = None
        self._waits_for: _Receive | None = None
        self._numbers = 0  # serials, tickets and alarms given so far
        self._now = 0.0
        self._actions: list[Action] = []
        if not spec.strategy.has_instances:
            self.children = {child.id: Child(child.id, child) for child in spec.children}

    @property
    def is_idle(self) -> bool:
        """Whether it is in the middle of nothing, and its mailbox is empty."""
        return self._operation is None and not self._mailbox

    def handle(self, event: Event, now: float) -> tuple[Action, ...]:
        """Return what is to be done about *event*, in order.

        *now* is the time of the handling, in seconds on any monotonic clock.
        """
        self._now, self._actions = now, []
        if self.ended is not None:
            self._refuse(event)
        elif isinstance(event, Progressed):
            self._progressed(event)
        elif self._waits_for is not None and self._waits_for.takes(event):
            self._resume(event)
        elif not isinstance(event, (*_OUTCOMES, AlarmRang)):  # these are void: nothing waits
            if isinstance(event, Exited) and (child := self._running(event)) is not None:
                child.has_exited = True
            self._mailbox.append(event)
        while self._operation is None and self._mailbox:
            self._operation = self._begun(self._mailbox.popleft())
            self._resume(None)
        return tuple(self._actions)

    def _resume(self, event: Event | None) -> None:
        assert self._operation is not None
        try:
            # A generator that has not begun takes None, and only then.
            self._waits_for = self._operation.send(event)  # type: ignore[arg-type]
        except StopIteration:
            self._operation = self._waits_for = None

    def _begun(self, event: Event) -> Operation:
        match event:
            case Booted():
                return self._boot()
            case Exited():
                return self._exited(event)
            case RetryDue():
                return self._retry_due(event)
            case StopRequested(reason):
                return self._leave(reason)
            case Started() | StartIgnored() | NotStarted() | AlarmRang() | Progressed():
                raise AssertionError(f"{event} never lies in the mailbox")
            case _:
                return self._requested(event)

    # --- one child: start and stop --------------------------------------------------------

    def _start(self, child: Child) -> Generator[_Receive, Event, BaseException | None]:
        """Start *child*; return the error where that failed."""
        child.status, child.since, child.has_exited = Status.STARTING, self._now, False
        child.incarnation += 1
        serial = self._number()
        self._actions.append(StartChild(child.key, serial, child.incarnation, child.spec))
        limit = math.inf if child.spec.start_within is None else child.spec.start_within
        match (yield _Receive(_OUTCOMES, (serial,), self._alarm(limit))):
            case Started():
                self._announce(ChildStarted(self._path(child), child.incarnation, self._now))
                child.status, child.serial, child.since = Status.RUNNING, serial, self._now
                child.has_progressed = False
                return None
            case StartIgnored():
                is_temporary = child.spec.restart is Restart.TEMPORARY
                self._not_running(child, forget=is_temporary or self.spec.strategy.has_instances)
                return None
            case NotStarted(error=error):
                pass
            case _:  # the alarm
                self._actions.append(AbandonStart(child.key, serial))
                error = StartTookTooLong(f"{child.key}: not started within {limit:g} s")
        text = error_text(error)
        self._announce(ChildStartFailed(self._path(child), child.incarnation, text, self._now))
        child.status = Status.UNDEFINED
        return error

    def _start_all(
        self, keys: Iterable[str]
    ) -> Generator[_Receive, Event, tuple[Child, BaseException] | None]:
        """Start children one after the other; return the first that failed, and its error."""
        for key in keys:
            child = self.children.get(key)
            if child is not None and (error := (yield from self._start(child))) is not None:
                return child, error
        return None

    def _stop(self, child: Child, *, forget: bool) -> Operation:
        """Stop *child*: OTP's ``shutdown/1``. One whose exit is in the mailbox has stopped."""
        if child.status is not Status.RUNNING or child.has_exited:
            self._not_running(child, forget=forget)
            return
        self._tell_to_end(child)
        event = yield self._exit_of((child.serial,), child.patience)
        if not isinstance(event, Exited) and child.is_to_be_killed:
            self._kill(child)
            event = yield self._exit_of((child.serial,), child.patience)
        self._gone(child, event)
        self._not_running(child, forget=forget)

    def _stop_all(self, keys: Iterable[str], *, forget_temporary: bool = True) -> Operation:
        """Stop children one after the other, the last first."""
        for key in reversed(list(keys)):
            if (child := self.children.get(key)) is not None:
                is_temporary = child.spec.restart is Restart.TEMPORARY
                yield from self._stop(child, forget=is_temporary and forget_temporary)

    def _stop_instances(self) -> Operation:
        """Stop all instances at once: OTP's ``terminate_dynamic_children``."""
        left = {
            child.serial: child
            for child in self.children.values()
            if child.has_process and not child.has_exited
        }
        for child in left.values():
            self._tell_to_end(child)
        receive = self._exit_of(left, min((c.patience for c in left.values()), default=math.inf))
        while left:
            event = yield receive
            if isinstance(event, Exited):
                child = left.pop(event.serial)
                self._gone(child, event)
                del self.children[child.key]
            else:
                receive = self._exit_of(left, self._lose_patience(left))

    def _lose_patience(self, left: dict[int, Child]) -> float:
        """Kill or give up each child whose time is over; return the seconds to the next."""
        soonest = math.inf
        for child in list(left.values()):
            rest = child.since + child.patience - self._now
            if rest < ROUNDING and child.is_to_be_killed:
                # Killed first even where the alarm comes so late that its time for that is over.
                self._kill(child)
                rest = child.patience
            elif rest < ROUNDING:
                self._gone(child, None)
                del left[child.serial], self.children[child.key]
                continue
            soonest = min(soonest, rest)
        return soonest

    def _tell_to_end(self, child: Child) -> None:
        if child.spec.shutdown is BRUTAL_KILL:
            self._kill(child)
        else:
            child.status, child.since = Status.STOPPING, self._now
            self._actions.append(TerminateChild(child.key, child.serial, SHUTDOWN))

    def _kill(self, child: Child) -> None:
        child.status, child.since = Status.KILLED, self._now
        self._actions.append(KillChild(child.key, child.serial))

    def _exit_of(self, serials: Collection[int], within: float) -> _Receive:
        return _Receive(Exited, serials, self._alarm(within))

    def _gone(self, child: Child, event: Event | None) -> None:
        """Announce the end of a child that was told to end; without an exit it is lost."""
        path, incarnation, now = self._path(child), child.incarnation, self._now
        if isinstance(event, Exited):
            child.last_exit = event.reason
            self._announce(ChildExited(path, incarnation, event.reason, "was told to stop", now))
        else:
            self._announce(ChildLost(path, incarnation, now - child.since, now))

    def _not_running(self, child: Child, *, forget: bool) -> None:
        child.status, child.has_exited = Status.UNDEFINED, False
        if forget:
            del self.children[child.key]

    # --- begin and end --------------------------------------------------------------------

    def _boot(self) -> Operation:
        self._announce(SupervisorBegan(self.path, self._now))
        failed = yield from self._start_all(list(self.children))
        if failed is None:
            self._announce(SupervisorReady(self.path, self._now))
            self._actions.append(BecomeReady())
            self.is_ready = True
        else:
            reason = ExitReason(ExitKind.SHUTDOWN, f"failed to start {failed[0].key}")
            yield from self._leave(reason, failed)

    def _leave(
        self, reason: ExitReason, failed: tuple[Child, BaseException] | None = None
    ) -> Operation:
        """Stop every child, then end with *reason*; *failed* is the child that did not start."""
        if self.spec.strategy.has_instances:
            yield from self._stop_instances()
        else:
            yield from self._stop_all(self.children, forget_temporary=False)
        if failed is None:
            self._announce(SupervisorExited(self.path, reason, self._now))
            self._actions.append(Exit(reason))
        else:
            key, error = failed[0].key, failed[1]
            self._announce(SupervisorStartFailed(self.path, key, error_text(error), self._now))
            self._actions.append(FailStart(key, error))
        self.ended = reason
        for event in self._mailbox:
            self._refuse(event)
        self._mailbox.clear()

    def _give_up(self, child: Child, why: str) -> Operation:
        self._announce(SupervisorGaveUp(self.path, child.key, why, self._now))
        child.status = Status.UNDEFINED
        yield from self._leave(ExitReason(ExitKind.SHUTDOWN, f"gave up: {why}"))

    # --- an exit: ``handle_info``, ``restart/2`` and ``do_auto_shutdown`` ------------------

    def _exited(self, event: Exited) -> Operation:
        child = self._running(event)
        if child is None:
            return
        reason, directive = event.reason, event.directive
        if directive is None and self.spec.decider is not None:
            directive = self.spec.decider.directive(
                reason, child.spec.id, failed=lambda error: self._decider_failed(child, error)
            )
        child.fruitless += child.incarnation > 1 and not child.has_progressed
        child.last_exit, child.has_exited = reason, False
        outcome = verdict(child.spec.restart, reason, directive)
        match outcome:
            case Verdict.RESTART:
                is_preempted = reason.signal == SIGTERM and reason.is_failure
                free = is_preempted and not self.spec.count_preemption
                yield from self._restart(child, healthy_for=self._now - child.since, free=free)
            case Verdict.GIVE_UP:
                self._announce_exit(child, "escalated by the decider")
                yield from self._give_up(child, "escalated by the decider")
            case Verdict.KEEP | Verdict.REMOVE:
                forget = outcome is Verdict.REMOVE or self.spec.strategy.has_instances
                self._announce_exit(child, "not restarted; removed" if forget else "not restarted")
                self._not_running(child, forget=forget)
                if self._shuts_down_after(child):
                    why = f"auto-shutdown: {child.key} ended"
                    yield from self._leave(ExitReason(ExitKind.SHUTDOWN, why))
            case _:
                assert_never(outcome)

    def _running(self, event: Exited) -> Child | None:
        """Return the child whose exit *event* is; None where it is an earlier incarnation's."""
        child = self.children.get(event.child)
        if child is None or child.serial != event.serial or child.status is not Status.RUNNING:
            return None
        return child

    def _decider_failed(self, child: Child, error: BaseException) -> None:
        self._announce(CallbackFailed(self._path(child), "decider", error_text(error), self._now))

    def _progressed(self, event: Progressed) -> None:
        child = self.children.get(event.child)
        if child is not None and child.serial == event.serial and not child.has_progressed:
            child.has_progressed, child.fruitless = True, 0

    def _shuts_down_after(self, child: Child) -> bool:
        """Return whether *child*, which ended for good, was significant enough to end all."""
        match self.spec.auto_shutdown:
            case AutoShutdown.NEVER:
                return False
            case AutoShutdown.ANY_SIGNIFICANT:
                return child.spec.significant
            case AutoShutdown.ALL_SIGNIFICANT:
                return child.spec.significant and not any(
                    other.spec.significant and other.status is not Status.UNDEFINED
                    for other in self.children.values()
                )
            case _:
                assert_never(self.spec.auto_shutdown)

    # --- restarts: ``do_restart`` and ``restart_multiple_children`` ------------------------

    def _restart(
        self, child: Child, *, healthy_for: float | None = None, free: bool = False
    ) -> Operation:
        """Restart *child* with those that its strategy names, or give up.

        *healthy_for* is None where a failed start led here, not an exit; *free* does not count.
        """
        window = self.window if free else self.window.admit(self._now)
        why = self._why_no_more(child, window)
        if healthy_for is not None:
            self._announce_exit(child, self._account(window, why, free=free))
        if why or window is None:
            yield from self._give_up(child, why)
            return
        self.window, child.status = window, Status.UNDEFINED
        if self.spec.backoff is None:
            yield from self._start_again(child)
            return
        child.attempt = self.spec.backoff.attempt_after(child.attempt, healthy_for or 0.0)
        yield from self._stop_all(self._affected(child))
        child.status, child.ticket = Status.RESTARTING, self._number()
        self._actions.append(RetryLater(child.key, child.ticket, child.attempt))

    def _why_no_more(self, child: Child, window: RestartWindow | None) -> str:
        limit, allowed = self.spec.fruitless_limit, self.spec.intensity
        if limit is not None and child.fruitless >= limit:
            return f"{child.key} was restarted {limit} times in a row and was of no use"
        if window is None:
            return f"more than {allowed.max_restarts} restarts in {allowed.period:g} s"
        return ""

    def _account(self, window: RestartWindow | None, why: str, *, free: bool) -> str:
        if why:
            return f"gave up: {why}"
        if free or window is None:
            return "restart, not counted: preempted"
        allowed = self.spec.intensity
        return f"restart {len(window.spent)} of {allowed.max_restarts} in {allowed.period:g} s"

    def _start_again(self, child: Child) -> Operation:
        affected = self._affected(child)
        if affected != [child.key]:
            yield from self._stop_all(affected)
        failed = yield from self._start_all(affected)
        if failed is None:
            return
        child, limit = failed[0], self.spec.fruitless_limit
        child.fruitless += 1
        if self.spec.backoff is not None or (limit is not None and child.fruitless >= limit):
            yield from self._restart(child)
        else:  # OTP's ``try_again_restart``: through the mailbox, and it counts again
            child.status, child.ticket = Status.RESTARTING, 0
            self._actions.append(RetryLater(child.key, ticket=0, attempt=0))

    def _retry_due(self, event: RetryDue) -> Operation:
        child = self.children.get(event.child)
        if child is None or child.status is not Status.RESTARTING or child.ticket != event.ticket:
            return  # terminated, deleted or started meanwhile
        if self.spec.backoff is not None:
            yield from self._start_again(child)  # it was admitted when the delay began
        else:
            yield from self._restart(child)

    def _affected(self, child: Child) -> list[str]:
        """Return the keys of the children that are restarted with *child*, in start order."""
        match self.spec.strategy:
            case Strategy.ONE_FOR_ONE | Strategy.SIMPLE_ONE_FOR_ONE | Strategy.DYNAMIC:
                return [child.key]
            case Strategy.ONE_FOR_ALL:
                return list(self.children)
            case Strategy.REST_FOR_ONE:
                keys = list(self.children)
                return keys[keys.index(child.key) :]
            case _:
                assert_never(self.spec.strategy)

    # --- requests: ``handle_call`` --------------------------------------------------------

    def _requested(self, event: Request) -> Operation:
        answer: Answer
        match event:
            case StartChildRequested():
                answer = yield from self._start_child(event)
            case TerminateChildRequested():
                answer = yield from self._terminate_child(event)
            case RestartChildRequested(_, key):
                child = self._stopped_child(key)
                if isinstance(child, Child):
                    answer = self._started(child, (yield from self._start(child)))
                else:
                    answer = child
            case DeleteChildRequested(_, key):
                child = self._stopped_child(key)
                if isinstance(child, Child):
                    del self.children[key]
                    answer = Done(key)
                else:
                    answer = child
            case ChildSpecRequested(_, key):
                answer = self._child_spec(key)
            case ChildrenRequested():
                answer = Children(tuple(_row(child) for child in reversed(self.children.values())))
            case CountRequested(dead=dead):
                answer = self._counts(dead)
            case _:
                assert_never(event)
        self._actions.append(Reply(event.caller, answer))

    def _start_child(self, event: StartChildRequested) -> Generator[_Receive, Event, Answer]:
        spec = self._spec_to_start(event)
        if not isinstance(spec, Refused) and self.spec.refuses(spec):
            spec = Refused(Refusal.BAD_COMBINATION, spec.id)
        if isinstance(spec, Refused):
            return spec
        key = spec.id
        if self.spec.strategy.has_instances:
            self.instances += 1
            key = f"{spec.id}#{self.instances}"
            if self.spec.max_children is not None and len(self.children) >= self.spec.max_children:
                return Refused(Refusal.MAX_CHILDREN, spec.id)
        elif (known := self.children.get(key)) is not None:
            is_up = known.has_process
            return Refused(Refusal.ALREADY_STARTED if is_up else Refusal.ALREADY_PRESENT, key)
        child = self.children[key] = Child(key, spec)
        error = yield from self._start(child)
        if error is not None:
            del self.children[key]
        return self._started(child, error)

    def _spec_to_start(self, event: StartChildRequested) -> ChildSpec | Refused:
        spec = event.spec
        if self.spec.strategy is not Strategy.SIMPLE_ONE_FOR_ONE:
            return Refused(Refusal.INVALID_SPEC) if spec is None or event.args else spec
        if spec is not None:
            return Refused(Refusal.INVALID_SPEC, spec.id)
        template = self.spec.children[0]
        return replace(template, args=(*template.args, *event.args)) if event.args else template

    def _started(self, child: Child, error: BaseException | None) -> Answer:
        if error is not None:
            return Refused(Refusal.START_FAILED, child.key, error)
        is_kept = child.key in self.children  # one that was ignored may not be
        return Done(child.key if is_kept else "", is_kept and child.has_process)

    def _terminate_child(
        self, event: TerminateChildRequested
    ) -> Generator[_Receive, Event, Answer]:
        child = self.children.get(event.child)
        if child is not None and event.serial in (None, child.serial):
            is_temporary = child.spec.restart is Restart.TEMPORARY
            yield from self._stop(child, forget=is_temporary or self.spec.strategy.has_instances)
            return Done(child.key)
        if self.spec.strategy is not Strategy.SIMPLE_ONE_FOR_ONE:
            return Refused(Refusal.NOT_FOUND, event.child)
        if event.serial is not None or self._is_ended_instance(event.child):
            return Done(event.child)
        return Refused(Refusal.SIMPLE_ONE_FOR_ONE, event.child)

    def _is_ended_instance(self, key: str) -> bool:
        template, _, number = key.rpartition("#")
        is_known = template == self.spec.children[0].id and number.isdecimal()
        return is_known and 1 <= int(number) <= self.instances

    def _stopped_child(self, key: str) -> Child | Refused:
        """Return the child *key*, which does not run, or why it cannot be started or deleted."""
        if self.spec.strategy is Strategy.SIMPLE_ONE_FOR_ONE:
            return Refused(Refusal.SIMPLE_ONE_FOR_ONE, key)
        child = self.children.get(key)
        if child is None:
            return Refused(Refusal.NOT_FOUND, key)
        match child.shown:
            case Shown.RUNNING:
                return Refused(Refusal.RUNNING, key)
            case Shown.RESTARTING:
                return Refused(Refusal.RESTARTING, key)
            case Shown.UNDEFINED:
                return child
            case _:
                assert_never(child.shown)

    def _child_spec(self, key: str) -> Answer:
        if (child := self.children.get(key)) is not None:
            return Found(child.spec)
        is_simple = self.spec.strategy is Strategy.SIMPLE_ONE_FOR_ONE
        if is_simple and key == self.spec.children[0].id:
            return Found(self.spec.children[0])
        return Refused(Refusal.NOT_FOUND, key)

    def _counts(self, dead: frozenset[int]) -> Counts:
        children = list(self.children.values())
        running = [child for child in children if child.has_process]
        supervisors = sum(child.spec.is_supervisor for child in children)
        active, specs = len(running), len(children)
        if self.spec.strategy is Strategy.SIMPLE_ONE_FOR_ONE:
            specs = 1
        elif self.spec.strategy is not Strategy.DYNAMIC:
            # Only here does OTP look whether the process lives.
            active -= sum(child.has_exited or child.serial in dead for child in running)
        return Counts(specs, active, supervisors, len(children) - supervisors)

    def _refuse(self, event: Event) -> None:
        """Answer *event*, where it is a request: the supervisor has ended."""
        if isinstance(event, Request):
            self._actions.append(Reply(event.caller, Refused(Refusal.NOPROC)))

    # --- numbers and notices --------------------------------------------------------------

    def _number(self) -> int:
        self._numbers += 1
        return self._numbers

    def _alarm(self, seconds: float) -> int:
        """Set an alarm; return its number, 0 for one that never rings."""
        if seconds == math.inf:
            return 0
        alarm = self._number()
        self._actions.append(SetAlarm(alarm, seconds))
        return alarm

    def _path(self, child: Child) -> str:
        return f"{self.path}/{child.key}"

    def _announce(self, notice: Notice) -> None:
        self._actions.append(Announce(notice))

    def _announce_exit(self, child: Child, decision: str) -> None:
        assert child.last_exit is not None, "only called about an exit"
        self._announce(
            ChildExited(self._path(child), child.incarnation, child.last_exit, decision, self._now)
        )


def _row(child: Child) -> ChildRow:
    assert child.spec.type is not None, "a spec fills in its type"
    return ChildRow(child.key, child.shown, child.spec.type)
