"""Specs of children and supervisors: a spec that makes no sense cannot be built.

Guarantees: every error is a `SpecError` that names the field and the value, raised where the spec
is built, before anything starts. Fields that accept a word of OTP's accept its plain string too.

Left to others: what the fields lead to (`decide`), calling the start function (the actor), and
trees written in TOML (`declared`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum, StrEnum
from typing import Any, Final, TypeAlias, TypeVar, cast

from phalanx.supervision.errors import SpecError

from .child import StartFunction, is_bare_actor, is_killable
from .decider import Decider
from .policy import AutoShutdown, BackOff, ChildType, Intensity, Restart, Strategy


class BrutalKill(Enum):
    """The type of `BRUTAL_KILL`."""

    BRUTAL_KILL = "brutal_kill"


BRUTAL_KILL: Final = BrutalKill.BRUTAL_KILL
"""The shutdown of a child that is killed without being asked."""

Shutdown: TypeAlias = float | BrutalKill
Word = TypeVar("Word", bound=StrEnum)


@dataclass(frozen=True, slots=True)
class ChildSpec:
    """How one child is started, stopped and restarted.

    Attributes:
        id: Unique among its siblings; no slash, because paths are ids joined by slashes.
        start: A start function (`child`), the ``start`` of a Pykka actor class, or the spec of a
            supervisor.
        args: Given to the start function after its context.
        restart: Which ends lead to a restart.
        shutdown: Seconds the child has to end after it was asked, before it is killed;
            ``math.inf`` for no limit, or `BRUTAL_KILL`. None: 5 for a worker, no limit for a
            supervisor.
        type: Worker or supervisor; follows from *start* unless given.
        significant: Whether its end can end the supervisor (`AutoShutdown`).
        killable: Whether it can be ended by force; follows from *start* unless given.
        start_within: Seconds a start may take; then it has failed. ``math.inf`` as in OTP. None:
            600 for a worker, no limit for a supervisor (its children have theirs).
        kill_within: Seconds a killed child may take to be gone; then it is reported lost and no
            longer waited for. For one that nothing can kill they begin where *shutdown* ends.
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
        _check_id("id", self.id)
        start: object = self.start
        nested = isinstance(start, SupervisorSpec)
        if not (nested or callable(start)):
            raise SpecError("start", start, "must be a start function or a SupervisorSpec")
        if is_bare_actor(start):
            raise SpecError(
                "start", start, "a Pykka class by itself is no start function; give its .start, "
                "or pykka_child(the class, its arguments)"
            )  # fmt: skip
        self._set("args", _args(self.args))
        self._set("restart", _word(Restart, "restart", self.restart))
        kind = ChildType.SUPERVISOR if nested else ChildType.WORKER
        self._set("type", kind if self.type is None else _word(ChildType, "type", self.type))
        _check_flag("significant", self.significant)
        if self.significant and self.restart is Restart.PERMANENT:
            raise SpecError(
                "significant", self.significant, "a permanent child never ends for good; "
                "make it transient or temporary"
            )  # fmt: skip
        if self.killable is not None:
            _check_flag("killable", self.killable)
        else:
            self._set("killable", nested or is_killable(start))
        unlimited = self.type is ChildType.SUPERVISOR
        default = math.inf if unlimited else 5.0
        shutdown = _shutdown(default if self.shutdown is None else self.shutdown)
        if shutdown is BRUTAL_KILL and not self.killable:
            raise SpecError(
                "shutdown", shutdown, "nothing can kill a thread or an actor of this process; "
                "give it seconds to stop in"
            )  # fmt: skip
        self._set("shutdown", shutdown)
        if self.start_within is None:
            self._set("start_within", math.inf if unlimited else 600.0)
        _check_seconds("start_within", self.start_within)
        _check_seconds("kill_within", self.kill_within)

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    @property
    def is_supervisor(self) -> bool:
        """Whether the child counts as a supervisor."""
        return self.type is ChildType.SUPERVISOR

    @property
    def stop_within(self) -> float:
        """Seconds between asking the child to end and killing it; 0 where it is not asked."""
        return self.shutdown if isinstance(self.shutdown, int | float) else 0.0


@dataclass(frozen=True, slots=True)
class SupervisorSpec:
    """A supervisor and its children.

    Attributes:
        id: The name of the supervisor in paths; also its id as a child, where it stands bare in
            the *children* of another.
        strategy: Who is restarted together.
        intensity: How many restarts are allowed; one more ends the supervisor.
        children: In start order. Exactly one, the template, for simple_one_for_one; none for
            dynamic.
        auto_shutdown: Whether the end of significant children ends the supervisor.
        max_children: For dynamic only: how many instances there may be; None for any number.
        backoff: Delays between restarts; None, as in OTP, for none.
        decider: Overrules the table of exits; None for the table.
        fruitless_limit: The supervisor gives up when a child was restarted this many times in a
            row and each time ended before it had been of use (`StartContext.progressed`).
        count_preemption: Whether a SIGTERM from outside counts towards the intensity.
    """

    id: str
    strategy: Strategy = Strategy.ONE_FOR_ONE
    intensity: Intensity = field(default_factory=Intensity)
    children: tuple[ChildSpec, ...] = ()
    auto_shutdown: AutoShutdown = AutoShutdown.NEVER
    max_children: int | None = None
    backoff: BackOff | None = None
    decider: Decider | None = None
    fruitless_limit: int | None = None
    count_preemption: bool = True

    def __init__(
        self,
        id: str,  # noqa: A002 # OTP's word for it
        strategy: Strategy | str = Strategy.ONE_FOR_ONE,
        intensity: Intensity | None = None,
        children: Iterable[ChildSpec | SupervisorSpec] = (),
        *,
        auto_shutdown: AutoShutdown | str = AutoShutdown.NEVER,
        max_children: int | None = None,
        backoff: BackOff | None = None,
        decider: Decider | None = None,
        fruitless_limit: int | None = None,
        count_preemption: bool = True,
    ) -> None:
        _check_id("id", id)
        given: dict[str, object] = {
            "id": id,
            "strategy": _word(Strategy, "strategy", strategy),
            "intensity": Intensity() if intensity is None else intensity,
            "children": _children(children),
            "auto_shutdown": _word(AutoShutdown, "auto_shutdown", auto_shutdown),
            "max_children": max_children,
            "backoff": backoff,
            "decider": decider,
            "fruitless_limit": fruitless_limit,
            "count_preemption": count_preemption,
        }
        for name, value in given.items():
            object.__setattr__(self, name, value)
        self._check()

    def _check(self) -> None:
        _check_type("intensity", self.intensity, Intensity)
        if self.backoff is not None:
            _check_type("backoff", self.backoff, BackOff)
        if self.decider is not None:
            _check_type("decider", self.decider, Decider)
        _check_flag("count_preemption", self.count_preemption)
        ids: set[str] = set()
        for child in self.children:
            if child.id in ids:
                raise SpecError("children", child.id, "ids must be unique among siblings")
            ids.add(child.id)
            if why := self.refuses(child):
                raise SpecError("significant", child.id, why)
        if self.strategy is Strategy.SIMPLE_ONE_FOR_ONE and len(self.children) != 1:
            raise SpecError("children", len(self.children), "a template needs exactly one child")
        if self.strategy is Strategy.DYNAMIC:
            if self.children:
                raise SpecError("children", len(self.children), "dynamic: add them when it runs")
            if self.auto_shutdown is not AutoShutdown.NEVER:
                raise SpecError("auto_shutdown", self.auto_shutdown, "dynamic knows only never")
        _check_limit("max_children", self.max_children, 0)
        _check_limit("fruitless_limit", self.fruitless_limit, 1)
        if self.max_children is not None and self.strategy is not Strategy.DYNAMIC:
            raise SpecError("max_children", self.max_children, "only strategy dynamic has it")

    def refuses(self, child: ChildSpec) -> str:
        """Return why *child* cannot be a child of this supervisor, empty where it can."""
        if child.significant and self.auto_shutdown is AutoShutdown.NEVER:
            return "a significant child needs an auto_shutdown other than never"
        return ""


def _args(given: object) -> tuple[Any, ...]:
    if not isinstance(given, list | tuple):
        raise SpecError("args", given, "must be a tuple or a list")
    return tuple(cast("list[Any]", given))


def _children(given: object) -> tuple[ChildSpec, ...]:
    if isinstance(given, str) or not isinstance(given, Iterable):
        raise SpecError("children", given, "must be a list of specs")
    children: list[ChildSpec] = []
    for child in cast("Iterable[object]", given):
        if isinstance(child, SupervisorSpec):
            children.append(ChildSpec(child.id, child))
        else:
            _check_type("children", child, ChildSpec)
            children.append(cast("ChildSpec", child))
    return tuple(children)


def _word(words: type[Word], name: str, value: object) -> Word:
    try:
        return words(str(value))
    except ValueError:
        raise SpecError(name, value, f"must be one of {', '.join(words)}") from None


def _shutdown(value: object) -> Shutdown:
    if value in (BRUTAL_KILL, BRUTAL_KILL.value):
        return BRUTAL_KILL
    if value == "infinity":
        return math.inf
    return _check_seconds("shutdown", value)


def _check_type(name: str, value: object, wanted: type[object]) -> None:
    if not isinstance(value, wanted):
        raise SpecError(name, value, f"must be of type {wanted.__name__}")


def _check_flag(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise SpecError(name, value, "must be True or False")


def _check_id(name: str, value: object) -> None:
    if not isinstance(value, str) or not value or "/" in value:
        raise SpecError(name, value, "must be a name that is not empty and has no slash")


def _check_seconds(name: str, value: object) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not value >= 0:
        raise SpecError(name, value, "must be seconds, 0 or more")
    return value


def _check_limit(name: str, value: object, least: int) -> None:
    if value is None:
        return
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise SpecError(name, value, f"must be a whole number, {least} or more, or None")
