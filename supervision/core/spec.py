"""Specs of children and supervisors, and the contract of a child.

- An invalid spec cannot be built: a `SpecError` names the field and the value, before
  anything starts. Fields that hold a word of OTP's accept its plain string too.
- A child is anything that a *start function* starts: a process, an actor, a thread, a group.
  ``start(ctx, *args)`` is called on its own thread with a `StartContext`. It returns a
  `ChildHandle` when the child has finished its initialisation, or `IGNORE` if there is nothing to
  run; raising is a failed start. It has until ``ctx.deadline``: after that the start counts as
  failed, and a handle that is returned later is killed at once.
- ``ctx.exited(reason)`` is called once, from any thread, when the child has ended, by itself or on
  request. Nothing else ends it for its supervisor.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import KW_ONLY, dataclass, field
from enum import Enum
from typing import Any, Final, Literal, Protocol, TypeAlias, cast, runtime_checkable

import pykka

from phalanx.supervision.errors import SpecError
from phalanx.supervision.validate import check_count, check_kind, check_seconds, check_word

from .decider import Decider
from .restart_rules import (
    AutoShutdown,
    BackOff,
    ChildType,
    ExitReason,
    Intensity,
    Restart,
    Strategy,
)


class Word(Enum):
    """Values of a spec or a start function that are words of OTP's."""

    IGNORE = "ignore"
    BRUTAL_KILL = "brutal_kill"


IGNORE: Final = Word.IGNORE
"""The return value of a start function that has nothing to run; not a failure."""

BRUTAL_KILL: Final = Word.BRUTAL_KILL
"""The shutdown of a child that is killed without a request to end."""

Shutdown: TypeAlias = float | Literal[Word.BRUTAL_KILL]
StartFunction: TypeAlias = Callable[..., Any]


@runtime_checkable
class ChildHandle(Protocol):
    """One running incarnation of a child; `Supervisor.child` returns its ``ref`` if it has one."""

    def terminate(self, reason: ExitReason) -> None:
        """Ask the child to end; returns at once."""
        ...

    def kill(self) -> None:
        """End the child now, if anything can; returns at once."""
        ...


@dataclass(frozen=True, slots=True)
class ChildSpec:
    """How one child is started, stopped and restarted.

    Attributes:
        id: Unique among its siblings; no slash, because paths are ids joined by slashes.
        start: A start function, the ``start`` of a Pykka actor class, or a supervisor's spec.
        args: Given to the start function after its context.
        restart: The ends that lead to a restart.
        shutdown: Seconds between the request to end and the kill; ``math.inf`` for no
            limit, or `BRUTAL_KILL`. None: 5 for a worker, no limit for a supervisor.
        type: Worker or supervisor; follows from *start* unless given.
        significant: Whether its end can end the supervisor (`AutoShutdown`).
        killable: Whether it can be ended by force; follows from *start* unless given: by its
            attribute ``killable``, else true except for actors.
        start_within: Seconds until a start counts as failed; ``math.inf`` as in OTP. None: 600 for
            a worker, no limit for a supervisor (its children have theirs).
        kill_within: Seconds until a killed child that has not ended is reported lost and given up.
            For one that nothing can kill they begin where *shutdown* ends.
    """

    id: str
    start: StartFunction | SupervisorSpec
    args: tuple[Any, ...] = ()
    restart: Restart = Restart.PERMANENT
    shutdown: Shutdown | None = None
    type: ChildType | None = None
    significant: bool = False
    killable: bool | None = None
    start_within: float | None = None
    kill_within: float = 30.0

    def __post_init__(self) -> None:
        _check_id(self.id)
        start: object = self.start
        nested = isinstance(start, SupervisorSpec)
        if not (nested or callable(start)):
            raise SpecError("start", start, "give a start function or a SupervisorSpec")
        if isinstance(start, type) and not issubclass(start, ChildHandle):
            remedy = "pass a function, or a class with terminate() and kill()"
            remedy += "; for a Pykka actor give its .start, for workers an executor_child"
            raise SpecError("start", self.start, remedy)
        _set(self, "args", _items("args", self.args))
        if nested and self.args:
            raise SpecError("args", self.args, "a SupervisorSpec takes none")
        _set(self, "restart", check_word("restart", self.restart, Restart))
        kind = ChildType.SUPERVISOR if nested else ChildType.WORKER
        _set(self, "type", check_word("type", kind if self.type is None else self.type, ChildType))
        check_kind("significant", self.significant, bool)
        if self.significant and self.restart is Restart.PERMANENT:
            remedy = "a permanent child never ends for good; make it transient or temporary"
            raise SpecError("significant", self.significant, remedy)
        if self.killable is None:
            said: object = getattr(self.start, "killable", None)
            _set(self, "killable", actor_class(self.start) is None if said is None else bool(said))
        check_kind("killable", self.killable, bool)
        shutdown: Any = self.shutdown
        if shutdown is None:
            shutdown = math.inf if self.is_supervisor else 5.0
        elif shutdown == BRUTAL_KILL.value:
            shutdown = BRUTAL_KILL
        elif shutdown == "infinity":
            shutdown = math.inf
        if shutdown is not BRUTAL_KILL:
            shutdown = check_seconds("shutdown", shutdown, finite=False)
        _set(self, "shutdown", shutdown)
        if self.shutdown is BRUTAL_KILL and not self.killable:
            remedy = "nothing can kill a thread or an actor of this process; give it seconds to "
            raise SpecError("shutdown", self.shutdown, f"{remedy}stop in")
        if self.start_within is None:
            _set(self, "start_within", math.inf if self.is_supervisor else 600.0)
        for limit in ("start_within", "kill_within"):
            check_seconds(limit, getattr(self, limit), finite=False)

    @property
    def kind(self) -> ChildType:
        """Its *type*, which is filled in."""
        assert self.type is not None, "a spec fills in its type"
        return self.type

    @property
    def is_supervisor(self) -> bool:
        """Whether the child counts as a supervisor."""
        return self.type is ChildType.SUPERVISOR

    @property
    def stop_within(self) -> float:
        """Seconds between the request to end and the kill; 0 if there is no request."""
        return self.shutdown if isinstance(self.shutdown, int | float) else 0.0


@dataclass(frozen=True, slots=True)
class SupervisorSpec:
    """A supervisor and its children.

    Attributes:
        id: The name of the supervisor in paths; its id as a child, if it stands bare in the
            *children* of another.
        strategy: The children that are restarted together.
        intensity: How many restarts are allowed; one more ends the supervisor.
        children: In start order. Exactly one, the template, for simple_one_for_one; none for
            dynamic.
        auto_shutdown: Whether the end of significant children ends the supervisor.
        max_children: For dynamic only: the greatest number of instances; None for any number.
        backoff: Delays between restarts; None, as in OTP, for none.
        decider: Overrules the table of exits; None for the table.
        fruitless_limit: The supervisor gives up when a child was restarted this many times in a
            row and each time ended before it had been of use (`StartContext.progressed`).
        count_preemption: Whether a SIGTERM from outside counts towards the intensity.
    """

    id: str
    strategy: Strategy = Strategy.ONE_FOR_ONE
    intensity: Intensity = field(default_factory=Intensity)
    children: Sequence[ChildSpec | SupervisorSpec] = ()
    _: KW_ONLY
    auto_shutdown: AutoShutdown = AutoShutdown.NEVER
    max_children: int | None = None
    backoff: BackOff | None = None
    decider: Decider | None = None
    fruitless_limit: int | None = None
    count_preemption: bool = True

    def __post_init__(self) -> None:
        _check_id(self.id)
        _set(self, "strategy", check_word("strategy", self.strategy, Strategy))
        _set(self, "auto_shutdown", check_word("auto_shutdown", self.auto_shutdown, AutoShutdown))
        _set(self, "children", tuple(map(_child, _items("children", self.children))))
        check_kind("intensity", self.intensity, Intensity)
        check_kind("backoff", self.backoff, BackOff | None)
        check_kind("decider", self.decider, Decider | None)
        check_kind("count_preemption", self.count_preemption, bool)
        ids: set[str] = set()
        for child in self.child_specs:
            if child.id in ids:
                raise SpecError("children", child.id, "ids must be unique among siblings")
            ids.add(child.id)
            self.check_child(child)
        if self.strategy is Strategy.SIMPLE_ONE_FOR_ONE and len(ids) != 1:
            raise SpecError("children", len(ids), "a template needs exactly one child")
        if self.strategy is Strategy.DYNAMIC:
            if ids:
                raise SpecError("children", len(ids), "dynamic: add them when it runs")
            if self.auto_shutdown is not AutoShutdown.NEVER:
                raise SpecError("auto_shutdown", self.auto_shutdown, "dynamic knows only never")
        if self.fruitless_limit is not None:
            check_count("fruitless_limit", self.fruitless_limit)
        if self.max_children is not None:
            check_count("max_children", self.max_children, least=0)
            if self.strategy is not Strategy.DYNAMIC:
                raise SpecError("max_children", self.max_children, "only strategy dynamic has it")

    @property
    def child_specs(self) -> tuple[ChildSpec, ...]:
        """The children; those that were given as bare supervisors are children here."""
        return cast("tuple[ChildSpec, ...]", self.children)

    def check_child(self, child: ChildSpec) -> None:
        """Raise unless *child* can be a child of this supervisor."""
        if child.significant and self.auto_shutdown is AutoShutdown.NEVER:
            remedy = f"child {child.id} is significant: give any_significant or all_significant"
            raise SpecError("auto_shutdown", self.auto_shutdown, remedy)


def actor_class(start: object) -> type[pykka.ThreadingActor] | None:
    """Return the Pykka class of which *start* is the ``start`` method, or None."""
    if not inspect.ismethod(start) or start.__func__ is not pykka.Actor.start.__func__:  # type: ignore[attr-defined] # a class method has it
        return None
    owner: object = start.__self__
    return owner if isinstance(owner, type) and issubclass(owner, pykka.ThreadingActor) else None


def _set(spec: ChildSpec | SupervisorSpec, name: str, value: object) -> None:
    object.__setattr__(spec, name, value)


def _items(name: str, given: object) -> tuple[Any, ...]:
    if isinstance(given, str | bytes) or not isinstance(given, Iterable):
        raise SpecError(name, given, "give a tuple or a list")
    return tuple(cast("Iterable[object]", given))


def _child(given: object) -> ChildSpec:
    if isinstance(given, SupervisorSpec):
        return ChildSpec(given.id, given)
    check_kind("children", given, ChildSpec)
    return cast("ChildSpec", given)


def _check_id(value: object) -> None:
    if not isinstance(value, str) or not value or "/" in value:
        raise SpecError("id", value, "give a name that is not empty and has no slash")
