"""One start of one child, from the call of its start function to its end.

Guarantees: exactly one outcome of the start is posted, and at most one exit, always after the
outcome. What a start brings after it was abandoned is killed as soon as it is there. Nothing that a
handle, a watcher or a predicate raises gets out of here: it is announced.

Left to others: what the posted events lead to.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from phalanx.supervision.core.child import IGNORE, ChildHandle
from phalanx.supervision.core.messages import (
    Event,
    Exited,
    NotStarted,
    Progressed,
    Started,
    StartIgnored,
)
from phalanx.supervision.core.notices import CallbackFailed, HandleFailed, Notice
from phalanx.supervision.core.policy import SHUTDOWN, ExitReason
from phalanx.supervision.errors import error_text

from .monitors import Lifeline

if TYPE_CHECKING:
    from collections.abc import Callable

    from phalanx.supervision.core.child import StartFunction
    from phalanx.supervision.core.decider import Cause, Decider, Directive
    from phalanx.supervision.core.snapshot import SupervisorSnapshot
    from phalanx.supervision.core.spec import ChildSpec

    from .services import Tree


class BadStart(TypeError):  # names what happened, as the others do
    """A start function returned something that is neither a handle nor `IGNORE`."""


class Incarnation:
    """The context given to a start function, and the record of what it started.

    Attributes:
        path: The ids from the top supervisor down.
        incarnation: How often this child has been started, from 1.
        deadline: When the start counts as failed.
        handle: What it started; None before the start is done.
        lifeline: Ends with it.
    """

    def __init__(
        self,
        path: str,
        incarnation: int,
        deadline: float,
        *,
        key: str,
        serial: int,
        spec: ChildSpec,
        decider: Decider | None,
        post: Callable[[Event], object],
        tree: Tree,
    ) -> None:
        self.path = path
        self.incarnation = incarnation
        self.deadline = deadline
        self.key = key
        self.serial = serial
        self.spec = spec
        self.handle: ChildHandle | None = None
        self.lifeline = Lifeline(path, self.terminate, failed=tree.watcher_failed)
        self._decider = decider
        self._post = post
        self._tree = tree
        self._lock = threading.Lock()
        self._is_settled = False  # the outcome of the start is known
        self._is_up = False  # and the supervisor has been sent that it succeeded
        self._is_useful = False
        self._abandoned: ExitReason | None = None
        self._end: tuple[ExitReason, Directive | None] | None = None

    # --- what a start function may call ---------------------------------------------------

    def exited(self, reason: ExitReason, directive: Directive | None = None) -> None:
        """Tell the supervisor that this incarnation has ended; later calls do nothing."""
        with self._lock:
            if self._end is not None:
                return
            self._end = (reason, directive)
            is_due = self._is_up and self._abandoned is None
        if is_due:
            self._post(Exited(self.key, self.serial, reason, directive))
        self.lifeline.end(reason)

    def progressed(self) -> None:
        """Tell the supervisor that this incarnation has been of use; later calls do nothing."""
        if self._is_useful:
            return
        with self._lock:
            is_due = self._is_up and not self._is_useful
            self._is_useful = True
        if is_due:
            self._post(Progressed(self.key, self.serial))

    def snapshot(self) -> SupervisorSnapshot:
        """Return the whole tree that this child is part of, as it is now."""
        look = self._tree.look
        assert look is not None, "nothing is started before there is a supervisor"
        return look()

    def emit_by(self, emit: Callable[[Notice], object]) -> None:
        """Have *emit* log the tree's notices from now on, unless the tree has a logger."""
        self._tree.emit_by(emit)

    def directive(self, cause: Cause) -> Directive | None:
        """Return what the supervisor's decider says about *cause*."""
        if self._decider is None:
            return None
        return self._decider.directive(cause, self.spec.id, failed=self._decider_failed)

    def _decider_failed(self, error: BaseException) -> None:
        now = self._tree.clock()
        self._tree.announce(CallbackFailed(self.path, "decider", error_text(error), now))

    # --- what the supervisor does ---------------------------------------------------------

    @property
    def has_ended(self) -> bool:
        """Whether it is known to have ended, its exit being handled or not."""
        return self._end is not None

    def launch(self, start: StartFunction) -> None:
        """Call *start* and post the outcome."""
        try:
            handle = self._checked(start(self, *self.spec.args))
        except BaseException as error:  # noqa: BLE001 # SystemExit in a start fails this start only
            self.settle_failed(error)
        else:
            self.settle(handle)

    def _checked(self, returned: Any) -> ChildHandle | None:
        if returned is IGNORE:
            return None
        if isinstance(returned, ChildHandle):
            return returned
        raise BadStart(f"{self.path}: start returned {returned!r}, not a handle or IGNORE")

    def settle(self, handle: ChildHandle | None) -> None:
        """Post that the start succeeded, with *handle*, or None where there is nothing to run."""
        with self._lock:
            if self._is_settled:
                return
            self._is_settled = True
            self.handle = handle
            abandoned = self._abandoned
        if abandoned is not None:
            self._drop(handle, abandoned)
        elif handle is None:
            self._post(StartIgnored(self.key, self.serial))
        else:
            self._post(Started(self.key, self.serial))
            # Only now may other threads post what a supervisor expects of a child that runs.
            with self._lock:
                self._is_up = True
                is_useful, end = self._is_useful, self._end
            if is_useful:
                self._post(Progressed(self.key, self.serial))
            if end is not None:
                reason, directive = end
                self._post(Exited(self.key, self.serial, reason, directive))

    def settle_failed(self, error: BaseException) -> None:
        """Post that the start failed."""
        with self._lock:
            if self._is_settled:
                return
            self._is_settled = True
            abandoned = self._abandoned
        if abandoned is None:
            self._post(NotStarted(self.key, self.serial, error))

    def abandon(self, reason: ExitReason = SHUTDOWN) -> None:
        """Post nothing from now on; end whatever is there or still comes."""
        with self._lock:
            self._abandoned = reason
            handle = self.handle
        if handle is not None:
            self._drop(handle, reason)

    def terminate(self, reason: ExitReason) -> None:
        """Ask the child to end."""
        if (handle := self.handle) is not None:
            self._told(lambda: handle.terminate(reason))

    def kill(self) -> None:
        """End the child by force."""
        if self.handle is not None:
            self._told(self.handle.kill)

    def _drop(self, handle: ChildHandle | None, reason: ExitReason) -> None:
        if handle is None or self.has_ended:
            return
        if self.spec.killable and not self.spec.is_supervisor:
            self._told(handle.kill)
        else:
            self._told(lambda: handle.terminate(reason))

    def _told(self, tell: Callable[[], None]) -> None:
        """Call a handle, which is the user's code; where it fails, the limits of a stop go on."""
        try:
            tell()
        except BaseException as error:  # noqa: BLE001 # one bad handle must not cost its siblings their supervisor
            now = self._tree.clock()
            self._tree.announce(HandleFailed(self.path, error_text(error), now))
