"""One supervisor as a value: its children, its restarts, what it is in the middle of.

Guarantees: frozen; an old state stays what it was. One record per child. A supervisor that is in
the middle of something has a *task*, which waits for at most one outcome (or, for instances, for
the exits of all); whatever else arrives meanwhile lies in *mailbox*, in order, as messages do in
front of an OTP supervisor that sits in a start function.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Any, TypeAlias

from .answers import Shown
from .fifo import Fifo
from .trie import Trie

if TYPE_CHECKING:
    from .events import Event
    from .exits import ExitReason
    from .spec import ChildSpec, SupervisorSpec
    from .window import RestartWindow


class Status(StrEnum):
    """Where a child stands."""

    UNDEFINED = "undefined"
    STARTING = "starting"
    RUNNING = "running"
    RESTARTING = "restarting"
    STOPPING = "stopping"
    KILLED = "killed"  # and not gone yet


_HAS_PROCESS = frozenset({Status.RUNNING, Status.STOPPING, Status.KILLED})


@dataclass(frozen=True, slots=True)
class Child:
    """One child.

    Attributes:
        key: Its id, or the id and number of an instance.
        spec: How it is started and stopped.
        position: Its place in the start order, which restarts never change.
        status: Where it stands.
        serial: The serial of its latest start that succeeded; 0 before the first.
        incarnation: How often it has been started, attempts that failed included.
        is_gone: It has ended, and its exit lies in the mailbox.
        since: When it was last started, or told to end.
        attempt: Restarts in a row without a healthy time, for the back-off.
        ticket: Which retry it waits for; 0 for one without delay.
        has_progressed: This incarnation has been of use.
        fruitless: Restarts in a row that were of no use.
        last_exit: Why it last ended, None where it never did.
    """

    key: str
    spec: ChildSpec
    position: int
    status: Status = Status.UNDEFINED
    serial: int = 0
    incarnation: int = 0
    is_gone: bool = False
    since: float = 0.0
    attempt: int = 0
    ticket: int = 0
    has_progressed: bool = False
    fruitless: int = 0
    last_exit: ExitReason | None = None

    @property
    def has_process(self) -> bool:
        """Whether there is something to stop or wait for."""
        return self.status in _HAS_PROCESS

    @property
    def shown(self) -> Shown:
        """The state as requests show it."""
        if self.status is Status.RESTARTING:
            return Shown.RESTARTING
        return Shown.RUNNING if self.has_process else Shown.UNDEFINED


# --- what to go on with when starts or stops are done ------------------------------------


@dataclass(frozen=True, slots=True)
class Boot:
    """The initial start."""


@dataclass(frozen=True, slots=True)
class Mend:
    """A restart, in which *cause* is started again, alone or with others."""

    cause: str


@dataclass(frozen=True, slots=True)
class Add:
    """A request to add the child being started."""

    caller: Any


@dataclass(frozen=True, slots=True)
class Revive:
    """A request to start a child that did not run."""

    caller: Any


@dataclass(frozen=True, slots=True)
class Relaunch:
    """Start *keys* again."""

    cause: str
    keys: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Postpone:
    """Restart *cause*, and whoever belongs to it, when its back-off is over."""

    cause: str


@dataclass(frozen=True, slots=True)
class AnswerStopped:
    """A request to stop the child being stopped."""

    caller: Any


@dataclass(frozen=True, slots=True)
class Leave:
    """The end of the supervisor.

    Attributes:
        reason: With which it ends.
        failed: The child that could not be started, where that is why; then *error* says more.
    """

    reason: ExitReason
    failed: str = ""
    error: BaseException | None = None


AfterLaunch: TypeAlias = Boot | Mend | Add | Revive
AfterHalt: TypeAlias = Relaunch | Postpone | AnswerStopped | Leave


@dataclass(frozen=True, slots=True)
class Launch:
    """Starting *keys*, one after the other.

    Attributes:
        keys: In start order.
        then: What it is for.
        index: The one whose turn it is.
        serial: What is waited for; 0 where nothing is.
        error: Why the one whose turn it is did not start.
    """

    keys: tuple[str, ...]
    then: AfterLaunch
    index: int = 0
    serial: int = 0
    error: BaseException | None = None


@dataclass(frozen=True, slots=True)
class Halt:
    """Stopping *keys*, one after the other."""

    keys: tuple[str, ...]
    then: AfterHalt
    index: int = 0
    serial: int = 0


@dataclass(frozen=True, slots=True)
class HaltAll:
    """Stopping all instances at once: *waiting* exits are still to come."""

    then: Leave
    waiting: int


Task: TypeAlias = Launch | Halt | HaltAll


_NO_MAIL: Fifo[Event] = Fifo()


@dataclass(frozen=True, slots=True)
class SupervisorState:
    """One supervisor.

    Attributes:
        spec: What it was built from.
        path: Where it stands in the tree.
        window: The restarts that count.
        children: By key.
        task: What it is in the middle of.
        mailbox: What came meanwhile.
        positions: Places given in the start order so far.
        serials: Serials, tickets and alarms given so far.
        instances: Instances numbered so far.
        alarm: The alarm that is set; 0 for none.
        is_ready: The initial start is over.
        ended: Why it has ended; None while it lives.
    """

    spec: SupervisorSpec
    path: str
    window: RestartWindow
    children: Trie[str, Child]
    task: Task | None = None
    mailbox: Fifo[Event] = _NO_MAIL
    positions: int = 0
    serials: int = 0
    instances: int = 0
    alarm: int = 0
    is_ready: bool = False
    ended: ExitReason | None = None

    def with_child(self, child: Child) -> SupervisorState:
        """Return the state with *child*'s record new or changed."""
        return replace(self, children=self.children.set(child.key, child))

    def without_child(self, key: str) -> SupervisorState:
        """Return the state that knows nothing of *key*."""
        return replace(self, children=self.children.without(key))

    def in_start_order(self) -> list[Child]:
        """Return all children, the first to start first. Costs as much as there are children."""
        return sorted(self.children.values(), key=_position)


def _position(child: Child) -> int:
    return child.position


def initial_state(spec: SupervisorSpec, path: str = "", instances: int = 0) -> SupervisorState:
    """Return a supervisor that has not begun: deliver `Booted` to it.

    *instances* is how many were numbered before it, so that a key never names two of them.
    """
    children: Trie[str, Child] = Trie()
    if not spec.strategy.has_instances:
        for position, child in enumerate(spec.children, 1):
            children = children.set(child.id, Child(child.id, child, position))
    return SupervisorState(
        spec,
        path or spec.id,
        spec.intensity.window(),
        children,
        positions=len(children),
        instances=instances,
    )
