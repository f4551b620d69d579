"""One start of one child, from the call of its start function to its end.

- Exactly one outcome of the start is posted, and at most one exit, always after the outcome.
- A handle that a start function returns after the start was abandoned is killed at once.
- Exceptions of handles, watchers and predicates are announced, never passed on.
"""

from __future__ import annotations

import threading
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from phalanx.supervision.core import messages as msg
from phalanx.supervision.core.restart_rules import SHUTDOWN, ExitKind, ExitReason
from phalanx.supervision.core.spec import IGNORE, ChildHandle
from phalanx.supervision.errors import error_text

from .adapters import exit_reason
from .monitors import Lifeline

if TYPE_CHECKING:
    from collections.abc import Callable

    from phalanx.supervision.core.decider import Cause, Directive
    from phalanx.supervision.core.notices import Notice
    from phalanx.supervision.core.snapshot import SupervisorSnapshot
    from phalanx.supervision.core.spec import StartFunction

    from .actor import SupervisorActor


class StartContext:
    """The first argument of a start function, and the supervisor's record of the start.

    A start function uses *path*, *incarnation* and *deadline*, and calls `exited`, `progressed`,
    `snapshot`, `emit_by` and `directive`, from any thread; the rest is its supervisor's.

    Attributes:
        path: The ids from the top supervisor down, joined by ``/``.
        incarnation: How often this child has been started, from 1.
        deadline: When the start counts as failed, on the monotonic clock; may be infinite.
        handle: The return value of the start function; None before.
        nested: The supervisor that the child is, from the beginning of its start; None for others.
        begun: Set when a start function that waits for it may return: its child has begun, or
            the start is abandoned.
        lifeline: Ends with the child.
    """

    def __init__(self, above: SupervisorActor, start: msg.StartChild, deadline: float) -> None:
        self.path = f"{above.machine.path}/{start.child}"
        self.incarnation, self.deadline = start.incarnation, deadline
        self.key, self.serial, self.spec = start.child, start.serial, start.spec
        self.handle: ChildHandle | None = None
        self.nested: SupervisorActor | None = None
        self.begun = threading.Event()
        self.lifeline = Lifeline(self.path, self.terminate, above.services.callback_failed)
        self._decider = above.machine.spec.decider
        self._post, self._on_use = above.post, above.on_use
        self._services = above.services
        self._lock = threading.RLock()  # a finalizer may interrupt its holder
        self._is_settled = False  # the outcome of the start is known
        self._is_up = False  # and the supervisor has been sent that it succeeded
        self._was_useful = False
        self._abandoned: ExitReason | None = None
        self._end: tuple[ExitReason, Directive | None] | None = None

    def exited(self, reason: ExitReason, directive: Directive | None = None) -> None:
        """Report that this incarnation has ended; later calls do nothing.

        A *directive* overrules the supervisor's decider.
        """
        if not isinstance(cast("object", reason), ExitReason):
            reason = ExitReason(
                ExitKind.UNKNOWN, f"exited({error_text(reason)}): not an ExitReason"
            )
        with self._lock:
            if self._end is not None:
                return
            self._end = (reason, directive)
            is_due = self._is_up and self._abandoned is None
        if is_due:
            self._post_end(reason, directive)
        self.lifeline.end(reason)

    def progressed(self) -> None:
        """Report that this incarnation has been of use: it served a call."""
        if not self._was_useful:
            self._was_useful = True
            self._on_use()

    def snapshot(self) -> SupervisorSnapshot:
        """Return the whole tree that this child is part of, as it is now."""
        assert self._services.look is not None, "nothing starts before there is a supervisor"
        return self._services.look()

    def hold(self, acquire: Callable[[], Any], release: Callable[[Any], object]) -> None:
        """Hold what *acquire* returns for the whole tree, until *release* when that has ended.

        A resource that is costly to make again then outlives a restart of its users. It is
        acquired once, however many starts ask for it.
        """
        self._services.hold(acquire, release)

    def emit_by(self, emit: Callable[[Notice], object]) -> None:
        """Have *emit* log the tree's notices from now on, unless the tree has a logger."""
        self._services.emit_by(emit)

    def directive(self, cause: Cause) -> Directive | None:
        """Return the directive of the supervisor's decider for *cause*; None without one."""
        if self._decider is None:
            return None
        failed = partial(self._services.callback_failed, self.path, "decider")
        return self._decider.directive(cause, self.spec.id, failed=failed)

    @property
    def has_ended(self) -> bool:
        """Whether the child is known to have ended; its exit may not be handled yet."""
        return self._end is not None

    def launch(self, start: StartFunction) -> None:
        """Call *start* and post the outcome."""
        try:
            returned = start(self, *self.spec.args)
            if returned is not IGNORE and not isinstance(returned, ChildHandle):
                text = f"{self.path}: start returned {returned!r}, not a handle or IGNORE"
                raise TypeError(text)  # noqa: TRY301 # it is the outcome of the start, as what it raises
        except BaseException as error:  # noqa: BLE001 # SystemExit in a start fails this start only
            self.settle(None, error)
        else:
            self.settle(None if returned is IGNORE else returned)

    def settle(self, handle: Any, error: BaseException | None = None) -> None:
        """Post the outcome of the start: its *handle*, None if there is nothing to run, *error*."""
        with self._lock:
            if self._is_settled:
                return
            self._is_settled, self.handle = True, handle
            abandoned = self._abandoned
        if abandoned is not None:
            self._drop(abandoned)
        elif handle is None:
            self._post(msg.NotStarted(self.key, self.serial, error))
        else:
            self._post(msg.Started(self.key, self.serial))
            # From here on other threads may post what a supervisor expects of a child that runs.
            with self._lock:
                self._is_up = True
                end = self._end
            if end is not None:
                self._post_end(*end)
        if handle is None:
            self.lifeline.end(exit_reason(error))

    def _post_end(self, reason: ExitReason, directive: Directive | None) -> None:
        self._post(msg.Exited(self.key, self.serial, reason, directive, self._was_useful))

    @property
    def is_abandoned(self) -> bool:
        """Whether the supervisor has given the start up."""
        return self._abandoned is not None

    def abandon(self, reason: ExitReason = SHUTDOWN) -> None:
        """Post nothing from now on; end the child, also one that starts later."""
        with self._lock:
            self._abandoned, is_there = reason, self.handle is not None
        self.begun.set()
        if is_there:
            self._drop(reason)

    def terminate(self, reason: ExitReason) -> None:
        """Ask the child to end."""
        self._call("terminate", reason)

    def kill(self) -> None:
        """End the child by force."""
        self._call("kill")

    def _drop(self, reason: ExitReason) -> None:
        if self.has_ended:
            return
        if self.spec.killable and not self.spec.is_supervisor:
            self.kill()
        else:
            self.terminate(reason)

    def _call(self, method: str, *args: ExitReason) -> None:
        """Call a *method* of the handle, which is user code; if it raises, the limits hold."""
        try:
            if self.handle is not None:
                getattr(self.handle, method)(*args)
        except BaseException as error:  # noqa: BLE001 # a bad handle must not end the supervisor
            self._services.callback_failed(self.path, "handle", error)
