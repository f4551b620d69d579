"""One OTP supervisor as a machine without effects: events in, actions out.

- `SupervisorMachine.handle` alone changes it. Time is an argument; nothing here blocks.
- Actions and their order are those of OTP's ``supervisor`` and Elixir's ``DynamicSupervisor``,
  except for the additions of a spec (back-off, limits, directives); ``tests/conformance`` compares.
- An *operation* (start a list of children, stop one), which OTP runs in one go, is a generator:
  ``yield`` is Erlang's selective ``receive``. While it waits, other events stay in the mailbox.

Source: ``supervisor.erl`` and ``dynamic_supervisor.ex``; the form is that of h11's ``Connection``.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Collection, Generator, Iterable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar, cast

from phalanx.supervision.errors import (
    ChildRefused,
    PhalanxError,
    SpecError,
    StartFailed,
    SupervisorDown,
    error_text,
)
from phalanx.supervision.validate import check_kind

from . import messages as msg
from . import notices
from .decider import Directive
from .restart_rules import AutoShutdown, ExitKind, ExitReason, Restart, Strategy, in_period
from .spec import BRUTAL_KILL, ChildSpec

if TYPE_CHECKING:
    from .restart_rules import RestartWindow
    from .spec import SupervisorSpec

SIGTERM = 15  # its number everywhere; importing `signal` is for code with effects
ROUNDING = 1e-6  # seconds; sums of times are not exact


class Status(StrEnum):
    """The state of a child."""

    UNDEFINED = "undefined"
    STARTING = "starting"
    RUNNING = "running"
    RESTARTING = "restarting"
    STOPPING = "stopping"
    KILLED = "killed"  # and its exit is not known yet


def verdict(restart: Restart, reason: ExitReason, directive: Directive | None = None) -> Directive:
    """Return what follows from a child's end: OTP's table of restart types and exits."""
    match directive, restart, reason.is_failure:
        case Directive.ESCALATE, _, _:
            return Directive.ESCALATE
        case (Directive.STOP, _, _) | (_, Restart.TEMPORARY, _):
            return Directive.STOP
        case (Directive.RESTART, _, _) | (_, Restart.PERMANENT, _) | (_, Restart.TRANSIENT, True):
            return Directive.RESTART
        case _:  # a transient child that ended normally
            return Directive.STOP


@dataclass(slots=True, eq=False)
class Child:
    """One child.

    Attributes:
        key: Its id, or the id and number of an instance.
        serial: The serial of its latest start that succeeded; 0 before the first.
        incarnation: How often it has been started, attempts that failed included.
        exited: Its exit, while that is in the mailbox.
        since: When it was last started, requested to end or killed, in seconds of `handle`'s clock.
        attempt: Restarts in a row without a healthy time, for the back-off.
        ticket: The retry that is due next; 0 for one without delay.
        fruitless: Restarts in a row since it was last of use.
        last_exit: None if it has never ended.
    """

    key: str
    spec: ChildSpec
    status: Status = Status.UNDEFINED
    serial: int = 0
    incarnation: int = 0
    exited: msg.Exited | None = None
    since: float = 0.0
    attempt: int = 0
    ticket: int = 0
    fruitless: int = 0
    last_exit: ExitReason | None = None

    @property
    def has_process(self) -> bool:
        """Whether there is a process to stop or wait for."""
        return self.status in (Status.RUNNING, Status.STOPPING, Status.KILLED)

    @property
    def shown(self) -> Status:
        """The state as requests show it: running, restarting or undefined."""
        if self.status is Status.RESTARTING:
            return self.status
        return Status.RUNNING if self.has_process else Status.UNDEFINED

    @property
    def stop_step_timeout(self) -> float:
        """Seconds until the next step of its stop: the kill, or giving it up."""
        if self.status is Status.KILLED:
            return self.spec.kill_within
        if self.spec.killable:
            return self.spec.stop_within
        return self.spec.stop_within + self.spec.kill_within


_Result = TypeVar("_Result")
Doing: TypeAlias = Generator[None, msg.Event, _Result]
Operation: TypeAlias = Doing[None]


class SupervisorMachine:
    """One supervisor.

    Attributes:
        path: Its ids from the top of the tree, joined by slashes.
        children: By key, in start order; restarts never change that order.
        window: The restarts that count.
        instances: Instances numbered so far; a key never names two of them.
        is_ready: The initial start is over.
        ended: The reason of its end; None before.
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
        self._mailbox: deque[msg.Event] = deque()
        self._operation: Operation | None = None
        self._awaited: Collection[int] = ()  # serials, for the operation
        self._alarm = 0  # what else it waits for; 0 for none
        self._numbers = 0  # serials, tickets and alarms given so far
        self._now = 0.0
        self._dead: frozenset[int] = frozenset()  # `Request.dead` of the latest
        self._actions: list[msg.Action] = []
        if not spec.strategy.has_instances:
            self.children = {child.id: Child(child.id, child) for child in spec.child_specs}

    @property
    def is_idle(self) -> bool:
        """Whether no operation is under way and the mailbox is empty."""
        return self._operation is None and not self._mailbox

    def handle(self, event: msg.Event, now: float) -> tuple[msg.Action, ...]:
        """Return the actions that *event* leads to, in order.

        *now* is the time of the handling, in seconds on any monotonic clock.
        """
        self._now, self._actions = now, []
        if self.ended is not None:
            self._refuse(event)
        elif isinstance(event, msg.Alarm):
            if event.number == self._alarm:
                self._resume(event)
        elif isinstance(event, msg.OfStart) and event.serial in self._awaited:
            self._resume(event)
        elif not isinstance(event, msg.Outcome):  # one of an abandoned start is void
            if isinstance(event, msg.Exited) and (child := self.running(event)) is not None:
                child.exited = event
                child.fruitless *= not event.was_useful
            self._mailbox.append(event)
        while self._operation is None and self._mailbox:
            self._operation = self._begun(self._mailbox.popleft())
            self._resume(None)
        return tuple(self._actions)

    def _resume(self, event: msg.Event | None) -> None:
        assert self._operation is not None
        try:
            # A generator that has not begun takes None, and only then.
            self._operation.send(event)  # type: ignore[arg-type]
        except StopIteration:
            self._operation, self._awaited, self._alarm = None, (), 0

    def _begun(self, event: msg.Event) -> Operation:
        match event:
            case msg.Booted():
                return self._boot()
            case msg.Exited():
                return self._exited(event)
            case msg.Retry():
                return self._retry_due(event)
            case msg.StopRequested(reason):
                return self._leave(reason)
            case msg.Request():
                return self._answer(event)
            case _:
                raise AssertionError(f"{event} never lies in the mailbox")

    # --- one child: start and stop --------------------------------------------------------

    def _start(self, child: Child) -> Doing[BaseException | None]:
        """Start *child*; return the error if that failed."""
        child.status, child.since = Status.STARTING, self._now
        child.incarnation += 1
        serial = self._number()
        self._actions.append(msg.StartChild(child.key, serial, child.incarnation, child.spec))
        limit = math.inf if child.spec.start_within is None else child.spec.start_within
        self._awaited = (serial,)
        self._set_alarm(limit)
        match (yield):
            case msg.Started():
                self._announce(notices.ChildStarted, child.incarnation, child=child)
                child.status, child.serial, child.since = Status.RUNNING, serial, self._now
                return None
            case msg.NotStarted(error=None):
                self._not_running(child)
                return None
            case msg.NotStarted(error=BaseException() as error):
                pass
            case _:  # the alarm
                self._actions.append(msg.AbandonStart(child.key, serial))
                error = TimeoutError(f"{child.key}: not started within {limit:g} s")
        text = error_text(error)
        self._announce(notices.ChildStartFailed, child.incarnation, text, child=child)
        child.status = Status.UNDEFINED
        return error

    def _start_all(self, keys: Iterable[str]) -> Doing[tuple[Child, BaseException] | None]:
        """Start children one after the other; return the first that failed, and its error."""
        for key in keys:
            child = self.children.get(key)
            if child is not None and (error := (yield from self._start(child))) is not None:
                return child, error
        return None

    def _stop(self, child: Child) -> Operation:
        """Stop *child*: OTP's ``shutdown/1``. One whose exit is in the mailbox is stopped."""
        if child.status is Status.RUNNING:
            yield from self._stop_together([child])
        self._not_running(child)

    def _stop_all(self, keys: Iterable[str]) -> Operation:
        """Stop children one after the other, the last first."""
        for key in reversed(list(keys)):
            if (child := self.children.get(key)) is not None:
                yield from self._stop(child)

    def _stop_together(self, children: Iterable[Child]) -> Operation:
        """Stop *children*, which run, at once; for instances: ``terminate_dynamic_children``."""
        self._awaited = left = {child.serial: child for child in children}
        for child in list(left.values()):
            if child.exited is not None:
                self._gone(left.pop(child.serial), child.exited)
            elif child.spec.shutdown is BRUTAL_KILL:
                self._kill(child)
            else:
                child.status, child.since = Status.STOPPING, self._now
                self._actions.append(msg.TerminateChild(child.key, child.serial))
        self._set_alarm(min((child.stop_step_timeout for child in left.values()), default=math.inf))
        while left:
            event = yield
            if isinstance(event, msg.Exited):
                self._gone(left.pop(event.serial), event)
            else:
                self._set_alarm(self._enforce_stop_limits(left))

    def _enforce_stop_limits(self, left: dict[int, Child]) -> float:
        """Kill or give up each child whose limit has passed; return the seconds to the next."""
        soonest = math.inf
        for child in list(left.values()):
            rest = child.since + child.stop_step_timeout - self._now
            if rest < ROUNDING and child.status is Status.STOPPING and child.spec.killable:
                # Killed first even if the alarm comes so late that `kill_within` has passed too.
                self._kill(child)
                rest = child.stop_step_timeout
            elif rest < ROUNDING:
                self._gone(left.pop(child.serial), None)
                continue
            soonest = min(soonest, rest)
        return soonest

    def _kill(self, child: Child) -> None:
        child.status, child.since = Status.KILLED, self._now
        self._actions.append(msg.KillChild(child.key, child.serial))

    def _gone(self, child: Child, event: msg.Exited | None) -> None:
        """Announce the end of a child that had to end; without an exit it is lost."""
        child.status, child.exited = Status.UNDEFINED, None
        if event is None:
            waited = self._now - child.since
            self._announce(notices.ChildLost, child.incarnation, waited, child=child)
        else:
            child.last_exit = event.reason
            child.fruitless *= not event.was_useful
            self._announce_exit(child, "stopped by request")

    def _not_running(self, child: Child) -> None:
        child.status = Status.UNDEFINED
        if self._is_forgotten(child):
            del self.children[child.key]

    def _is_forgotten(self, child: Child) -> bool:
        """Return whether *child* is removed when it has ended and is not restarted."""
        return child.spec.restart is Restart.TEMPORARY or self.spec.strategy.has_instances

    # --- begin and end --------------------------------------------------------------------

    def _boot(self) -> Operation:
        self._announce(notices.SupervisorBegan)
        failed = yield from self._start_all(list(self.children))
        if failed is None:
            self._announce(notices.SupervisorReady)
            self._actions.append(msg.BecomeReady())
            self.is_ready = True
        else:
            reason = ExitReason(ExitKind.SHUTDOWN, f"failed to start {failed[0].key}")
            yield from self._leave(reason, failed)

    def _leave(
        self, reason: ExitReason, failed: tuple[Child, BaseException] | None = None
    ) -> Operation:
        """Stop every child, then end with *reason*; *failed* is the child that did not start."""
        if self.spec.strategy.has_instances:
            yield from self._stop_together(one for one in self.children.values() if one.has_process)
            self.children.clear()
        else:
            yield from self._stop_all(self.children)
        if failed is None:
            self._announce(notices.SupervisorExited, reason)
        else:
            self._announce(notices.SupervisorStartFailed, failed[0].key, error_text(failed[1]))
        self._actions.append(msg.Exit(reason, failed and failed[1]))
        self.ended = reason
        for event in self._mailbox:
            self._refuse(event)
        self._mailbox.clear()

    def _give_up(self, child: Child, why: str) -> Operation:
        self._announce(notices.SupervisorGaveUp, child.key, why)
        child.status = Status.UNDEFINED
        yield from self._leave(ExitReason(ExitKind.SHUTDOWN, f"gave up: {why}"))

    # --- an exit: ``handle_info``, ``restart/2`` and ``do_auto_shutdown`` ------------------

    def _exited(self, event: msg.Exited) -> Operation:
        child = self.running(event)
        if child is None:
            return
        reason = event.reason
        child.last_exit, child.exited = reason, None
        match verdict(child.spec.restart, reason, event.directive):
            case Directive.RESTART:
                is_preempted = reason.signal == SIGTERM and reason.is_failure
                free = is_preempted and not self.spec.count_preemption
                yield from self._restart(child, healthy_for=self._now - child.since, free=free)
            case Directive.ESCALATE:
                self._announce_exit(child, "escalated by the decider")
                yield from self._give_up(child, "escalated by the decider")
            case _:
                removed = "; removed" if self._is_forgotten(child) else ""
                self._announce_exit(child, f"not restarted{removed}")
                self._not_running(child)
                if self._shuts_down_after(child):
                    why = f"auto-shutdown: {child.key} ended"
                    yield from self._leave(ExitReason(ExitKind.SHUTDOWN, why))

    def running(self, event: msg.Exited) -> Child | None:
        """Return the child whose exit *event* is; None for an exit of an earlier incarnation."""
        child = self.children.get(event.child)
        if child is None or child.serial != event.serial or child.status is not Status.RUNNING:
            return None
        return child

    def _shuts_down_after(self, child: Child) -> bool:
        """Return whether the end of *child* for good ends the supervisor."""
        if self.spec.auto_shutdown is AutoShutdown.NEVER or not child.spec.significant:
            return False
        return self.spec.auto_shutdown is AutoShutdown.ANY_SIGNIFICANT or not any(
            other.spec.significant and other.status is not Status.UNDEFINED
            for other in self.children.values()
        )

    # --- restarts: ``do_restart`` and ``restart_multiple_children`` ------------------------

    def _restart(
        self, child: Child, *, healthy_for: float | None = None, free: bool = False
    ) -> Operation:
        """Restart *child* with those that the strategy ties to it, or give up.

        *healthy_for* is None after a failed start; a *free* restart does not count.
        """
        window = self.window if free else self.window.admit(self._now)
        limit, most = self.spec.fruitless_limit, self.spec.intensity
        why = ""
        if limit is not None and child.fruitless >= limit:
            why = f"{child.key} was restarted {limit} times in a row and was of no use"
        elif window is None:
            why = f"more than {most.max_restarts} restarts{in_period(most.period)}"
        if healthy_for is not None:
            count = ", not counted: preempted"
            if not free and window is not None:
                count = f" {len(window.spent)} of {most.max_restarts}{in_period(most.period)}"
            self._announce_exit(child, f"gave up: {why}" if why else f"restart{count}")
        if why or window is None:
            yield from self._give_up(child, why)
            return
        self.window, child.status = window, Status.UNDEFINED
        child.fruitless += 1
        if self.spec.backoff is None:
            yield from self._start_again(child)
            return
        child.attempt = self.spec.backoff.attempt_after(child.attempt, healthy_for or 0.0)
        yield from self._stop_tied(child)
        child.status, child.ticket = Status.RESTARTING, self._number()
        self._actions.append(msg.Retry(child.key, child.ticket, child.attempt))

    def _start_again(self, child: Child) -> Operation:
        failed = yield from self._start_all((yield from self._stop_tied(child)))
        if failed is None:
            return
        failed[0].fruitless += failed[0] is not child
        child = failed[0]
        if self.spec.backoff is not None:
            yield from self._restart(child)
        else:  # OTP's ``try_again_restart``: through the mailbox, and it counts again
            child.status, child.ticket = Status.RESTARTING, 0
            self._actions.append(msg.Retry(child.key, ticket=0, attempt=0))

    def _retry_due(self, event: msg.Retry) -> Operation:
        child = self.children.get(event.child)
        if child is None or child.status is not Status.RESTARTING or child.ticket != event.ticket:
            return  # terminated, deleted or started meanwhile
        if self.spec.backoff is not None:
            yield from self._start_again(child)  # it was admitted when the delay began
        else:
            yield from self._restart(child)

    def _stop_tied(self, child: Child) -> Doing[Sequence[str]]:
        """Stop the children that are restarted with *child*; return all, in start order."""
        tied = self.spec.strategy.tied(list(self.children), child.key)
        if len(tied) > 1:
            yield from self._stop_all(tied)
        return tied

    # --- requests: ``handle_call`` --------------------------------------------------------

    def _answer(self, request: msg.Request) -> Operation:
        self._dead = request.dead
        try:
            answer: Any = request.ask(self)
            if isinstance(answer, Generator):
                answer = yield from cast("Doing[Any]", answer)
        except PhalanxError as refusal:
            answer = refusal
        self._actions.append(msg.Reply(request.caller, answer))

    def start_child(self, spec: ChildSpec | None, args: tuple[Any, ...] = ()) -> Doing[msg.Done]:
        """Add *spec* as the last child, or for simple_one_for_one the template with *args*."""
        check_kind("child", spec, ChildSpec | None)
        if self._is_simple is not (spec is None) or (args and not self._is_simple):
            remedy = "simple_one_for_one takes arguments for its template, every other strategy a "
            raise SpecError("child", "" if spec is None else spec.id, f"{remedy}ChildSpec")
        if spec is None:
            spec = self.spec.child_specs[0]
            spec = replace(spec, args=(*spec.args, *args)) if args else spec
        self.spec.check_child(spec)
        key = spec.id
        if self.spec.strategy.has_instances:
            self.instances += 1
            key = f"{spec.id}#{self.instances}"
            if self.spec.max_children is not None and len(self.children) >= self.spec.max_children:
                raise ChildRefused("max_children", spec.id)
        elif (known := self.children.get(key)) is not None:
            raise ChildRefused("already_started" if known.has_process else "already_present", key)
        child = self.children[key] = Child(key, spec)
        error = yield from self._start(child)
        if error is not None:
            del self.children[key]
        return self._started(child, error)

    def terminate_child(self, key: str, serial: int | None = None) -> Doing[msg.Done]:
        """Stop a child; *serial* limits it to that start of an instance, as a pid does in OTP."""
        check_kind("key", key, str)
        child = self.children.get(key)
        if child is not None and serial in (None, child.serial):
            yield from self._stop(child)
        elif not self._is_simple:
            raise ChildRefused("not_found", key)
        elif serial is None and not self._is_ended_instance(key):
            raise ChildRefused("simple_one_for_one", key)
        return msg.Done(key)

    def _is_ended_instance(self, key: str) -> bool:
        template, _, number = key.rpartition("#")
        is_known = template == self.spec.child_specs[0].id and number.isdecimal()
        # `int` raises for thousands of digits.
        return is_known and len(number) < 20 and 1 <= int(number) <= self.instances

    def restart_child(self, key: str) -> Doing[msg.Done]:
        """Start a child that does not run."""
        child = self._stopped_child(key)
        return self._started(child, (yield from self._start(child)))

    def delete_child(self, key: str) -> msg.Done:
        """Remove a child that does not run."""
        del self.children[self._stopped_child(key).key]
        return msg.Done(key)

    def _started(self, child: Child, error: BaseException | None) -> msg.Done:
        if error is not None:
            raise StartFailed(f"{child.key}: did not start: {error_text(error)}") from error
        is_kept = child.key in self.children  # one that was ignored may not be
        return msg.Done(child.key if is_kept else "", is_kept and child.has_process)

    def _stopped_child(self, key: str) -> Child:
        if self._is_simple:
            raise ChildRefused("simple_one_for_one", key)
        check_kind("key", key, str)
        child = self.children.get(key)
        if child is None:
            raise ChildRefused("not_found", key)
        if child.shown is not Status.UNDEFINED:
            raise ChildRefused(child.shown, key)
        return child

    def child_spec(self, key: str) -> ChildSpec:
        """Return the spec of a child."""
        check_kind("key", key, str)
        if (child := self.children.get(key)) is not None:
            return child.spec
        if self._is_simple and key == self.spec.child_specs[0].id:
            return self.spec.child_specs[0]
        raise ChildRefused("not_found", key)

    def child_rows(self) -> tuple[msg.ChildRow, ...]:
        """List the children, the newest first."""
        children = reversed(self.children.values())
        return tuple(msg.ChildRow(one.key, one.shown, one.spec.kind) for one in children)

    def counts(self) -> msg.Counts:
        """Count the children."""
        children = list(self.children.values())
        running = [child for child in children if child.has_process]
        supervisors = sum(child.spec.is_supervisor for child in children)
        active, specs = len(running), len(children)
        if self._is_simple:
            specs = 1
        elif self.spec.strategy is not Strategy.DYNAMIC:
            # Only for these strategies does OTP ask whether the process lives.
            active -= sum(1 for child in running if child.exited or child.serial in self._dead)
        return msg.Counts(specs, active, supervisors, len(children) - supervisors)

    @property
    def _is_simple(self) -> bool:
        return self.spec.strategy is Strategy.SIMPLE_ONE_FOR_ONE

    def _refuse(self, event: msg.Event) -> None:
        """Answer *event*, if it is a request: the supervisor has ended."""
        if isinstance(event, msg.Request):
            self._actions.append(msg.Reply(event.caller, SupervisorDown()))

    # --- numbers and notices --------------------------------------------------------------

    def _number(self) -> int:
        self._numbers += 1
        return self._numbers

    def _set_alarm(self, seconds: float) -> None:
        """Set the alarm of the operation; none if *seconds* is infinite."""
        self._alarm = 0
        if seconds != math.inf:
            self._alarm = self._number()
            self._actions.append(msg.Alarm(self._alarm, seconds))

    def _announce(
        self, kind: Callable[..., notices.Notice], *values: object, child: Child | None = None
    ) -> None:
        """Announce *kind* about the supervisor, or about *child*, with its further *values*."""
        path = self.path if child is None else f"{self.path}/{child.key}"
        self._actions.append(kind(path, self._now, *values))

    def _announce_exit(self, child: Child, decision: str) -> None:
        values = child.incarnation, child.last_exit, decision
        self._announce(notices.ChildExited, *values, child=child)
