"""What a supervisor needs of a child, whatever it is: a process, an actor, a thread, a group.

The contract, for whoever writes a child:

- ``start(ctx, *args)`` returns when the child has finished its initialisation: a `ChildHandle`,
  or `IGNORE` where there is nothing to run. Raising is a failed start. It runs on a thread of its
  own and should be done by ``ctx.deadline``; past it the start counts as failed, and a handle that
  is returned later is killed at once.
- ``ctx.exited(reason)`` is called once, from any thread, when what was started has ended, by
  itself or because it was told to. Nothing else ends it in the eyes of its supervisor.
- ``handle.terminate(reason)`` asks and ``handle.kill()`` forces; neither may block.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from enum import Enum
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeAlias, runtime_checkable

import pykka

if TYPE_CHECKING:
    from .decider import Cause, Directive
    from .notices import Notice
    from .policy import ExitReason
    from .snapshot import SupervisorSnapshot


class Ignore(Enum):
    """The type of `IGNORE`."""

    IGNORE = "ignore"


IGNORE: Final = Ignore.IGNORE
"""What a start function returns where there is nothing to run; not a failure."""


class StartContext(Protocol):
    """What a start function is given.

    Attributes:
        path: The ids from the top supervisor down, joined by ``/``.
        incarnation: How often this child has been started, from 1.
        deadline: When the start counts as failed, on the monotonic clock; may be infinite.
    """

    @property
    def path(self) -> str: ...  # noqa: D102 # described above
    @property
    def incarnation(self) -> int: ...  # noqa: D102 # described above
    @property
    def deadline(self) -> float: ...  # noqa: D102 # described above

    def exited(self, reason: ExitReason, directive: Directive | None = None) -> None:
        """Tell the supervisor that this incarnation has ended; later calls do nothing.

        A *directive* overrules the supervisor's decider.
        """
        ...

    def progressed(self) -> None:
        """Tell the supervisor that this incarnation has been of use: it served a call."""
        ...

    def snapshot(self) -> SupervisorSnapshot:
        """Return the whole tree that this child is part of, as it is now."""
        ...

    def emit_by(self, emit: Callable[[Notice], object]) -> None:
        """Have *emit* log the tree's notices from now on, unless the tree has a logger."""
        ...

    def directive(self, cause: Cause) -> Directive | None:
        """Return what the supervisor's decider says about *cause*, None where it says nothing."""
        ...


@runtime_checkable
class ChildHandle(Protocol):
    """One running incarnation of a child. It may also have ``ref``, which users of it are given."""

    def terminate(self, reason: ExitReason) -> None:
        """Ask the child to end; returns at once."""
        ...

    def kill(self) -> None:
        """End the child now, if anything can; returns at once."""
        ...


StartFunction: TypeAlias = Callable[..., Any]


def is_killable(start: object) -> bool:
    """Return whether what *start* starts can be ended by force.

    A start function says so by an attribute ``killable``. Threads and actors of this process
    cannot be killed; without a word, a start function is taken to start something that can.
    """
    said: object = getattr(start, "killable", None)
    return actor_class(start) is None if said is None else bool(said)


def actor_class(start: object) -> type[pykka.ThreadingActor] | None:
    """Return the Pykka class of which *start* is the ``start`` method, or None."""
    if not inspect.ismethod(start) or start.__func__ is not pykka.Actor.start.__func__:  # type: ignore[attr-defined] # a class method has it
        return None
    owner: object = start.__self__
    return owner if isinstance(owner, type) and issubclass(owner, pykka.ThreadingActor) else None


def is_bare_actor(start: object) -> bool:
    """Return whether *start* is a Pykka class, which makes an actor but does not start it."""
    return isinstance(start, type) and issubclass(start, pykka.Actor)
