"""What users hold of a tree: start it, ask it, change it, watch it, stop it.

Guarantees: `Supervisor(spec)` returns when every child of the tree has been started, or raises
`StartFailed` when nothing of it runs any more. Every request has OTP's result, a refusal as an
exception. `stop` returns when every child has ended, and may be called again. A program that
forgets it stops the tree at its exit.

Left to others: the supervisors themselves (`actor`), what they do (`decide`).
"""

from __future__ import annotations

import atexit
import threading
import time
from functools import partial
from typing import TYPE_CHECKING, Any, Self, cast

import pykka

from phalanx.supervision.core.messages import (
    Children,
    ChildrenRequested,
    ChildRow,
    ChildSpecRequested,
    CountRequested,
    Counts,
    DeleteChildRequested,
    Done,
    Found,
    Refusal,
    Refused,
    Request,
    RestartChildRequested,
    StartChildRequested,
    StopRequested,
    TerminateChildRequested,
)
from phalanx.supervision.core.policy import KILLED, SHUTDOWN, ExitReason
from phalanx.supervision.core.snapshot import SupervisorSnapshot, render
from phalanx.supervision.core.spec import ChildSpec, SupervisorSpec
from phalanx.supervision.errors import (
    ChildRefused,
    SpecError,
    StartFailed,
    SupervisorDown,
    WouldDeadlock,
)

from .actor import SupervisorActor, run
from .monitors import Lifeline
from .services import Clock, Subscriber, Tree

if TYPE_CHECKING:
    from types import TracebackType

    from phalanx.supervision.core.messages import Answer

    from .monitors import Cancel, Watcher
    from .services import Timers

_GLANCE = 0.5  # seconds that Ctrl-C may have to wait for, once in a thousand times


class SupervisorView:
    """One supervisor of a tree, by path; it stays valid when that is restarted.

    Every request waits for its answer: *timeout* seconds, None for as long as the supervisor is
    in the middle of something. One that times out may still be carried out.
    """

    def __init__(self, top: SupervisorActor, path: tuple[str, ...]) -> None:
        self._top = top
        self._path = path

    # --- requests -------------------------------------------------------------------------

    def start_child(
        self,
        child: ChildSpec | SupervisorSpec | None = None,
        *args: Any,
        timeout: float | None = None,
    ) -> str | None:
        """Add and start a child; return its key, or None where it was ignored and not kept.

        For simple_one_for_one leave *child* out (None) and give *args* for the template.

        Raises:
            ChildRefused: There is one of that id, or there are too many.
            StartFailed: Its start function raised; nothing is kept.
        """
        spec = ChildSpec(child.id, child) if isinstance(child, SupervisorSpec) else child
        done = self._done(StartChildRequested(_future(), spec, args), timeout)
        return done.child or None

    def terminate_child(self, key: str, *, timeout: float | None = None) -> None:
        """Stop a child; it is kept and not restarted, unless it is temporary or an instance."""
        self._done(TerminateChildRequested(_future(), key), timeout)

    def restart_child(self, key: str, *, timeout: float | None = None) -> bool:
        """Start a child that does not run; return whether it does now (False: ignored)."""
        return self._done(RestartChildRequested(_future(), key), timeout).running

    def delete_child(self, key: str, *, timeout: float | None = None) -> None:
        """Forget a child that does not run."""
        self._done(DeleteChildRequested(_future(), key), timeout)

    def which_children(self, *, timeout: float | None = None) -> tuple[ChildRow, ...]:
        """Return a row per child, newest first."""
        answer = self._answer(ChildrenRequested(_future()), timeout)
        assert isinstance(answer, Children), answer
        return answer.rows

    def count_children(self, *, timeout: float | None = None) -> Counts:
        """Return how many children there are, and how many of them live."""
        answer = self._answer(CountRequested(_future()), timeout)
        assert isinstance(answer, Counts), answer
        return answer

    def get_childspec(self, key: str, *, timeout: float | None = None) -> ChildSpec:
        """Return the spec of a child, defaults filled in."""
        answer = self._answer(ChildSpecRequested(_future(), key), timeout)
        assert isinstance(answer, Found), answer
        return answer.spec

    # --- without asking -------------------------------------------------------------------

    def child(self, path: str) -> Any:
        """Return what runs as the child of this key or path: the ``ref`` of its handle, or that.

        Raises:
            ChildRefused: There is none, or it does not run now.
            SupervisorDown: The tree has ended; it says why.
        """
        *above, key = path.split("/")
        incarnation = self._actor(above).incarnation(key)
        handle = None if incarnation is None or incarnation.has_ended else incarnation.handle
        if handle is None:
            raise self._gone() or ChildRefused("not_running", path)
        return getattr(handle, "ref", handle)

    def supervisor(self, path: str) -> SupervisorView:
        """Return the supervisor at *path* below this one, whether it runs now or not."""
        return SupervisorView(self._top, (*self._path, *path.split("/")))

    def lifeline(self, path: str) -> Lifeline:
        """Return the lifeline of the child that runs at *path* now, for links and monitors."""
        *above, key = path.split("/")
        incarnation = self._actor(above).incarnation(key)
        if incarnation is None:
            raise self._gone() or ChildRefused("not_running", path)
        return incarnation.lifeline

    def monitor(self, path: str, watcher: Watcher) -> Cancel:
        """Call *watcher* once when the child that runs at *path* now has ended."""
        return self.lifeline(path).monitor(watcher)

    def snapshot(self) -> SupervisorSnapshot:
        """Return the tree from here down, as a value."""
        return _snapshot(self._actor([]))

    def render(self) -> str:
        """Return the tree from here down, as text."""
        return render(self.snapshot())

    # --- the way there --------------------------------------------------------------------

    def submit(self, request: Request) -> pykka.Future[Answer]:
        """Send *request*, whose caller must be a Pykka future; return that future."""
        if not self._actor([]).post(request):
            request.caller.set(Refused(Refusal.NOPROC))
        return cast("pykka.Future[Answer]", request.caller)  # opaque to the core

    def _actor(self, below: list[str]) -> SupervisorActor:
        actor = self._top
        for key in (*self._path, *below):
            nested = actor.nested(key)
            if nested is None:
                raise self._gone() or SupervisorDown(
                    f"{actor.machine.path}/{key}: no supervisor runs there"
                )
            actor = nested
        return actor

    def _answer(self, request: Request, timeout: float | None) -> Answer:
        self._check_thread()
        try:
            answer = self.submit(request).get(timeout=timeout)
        except pykka.Timeout:
            raise TimeoutError(f"no answer from the supervisor after {timeout:g} s") from None
        if isinstance(answer, Refused):
            gone = self._gone() if answer.why is Refusal.NOPROC else None
            raise gone or _refusal(answer)
        return answer

    def _gone(self) -> SupervisorDown | None:
        """Return the error that says that the tree has ended, and why, if it has."""
        top = self._top
        if top.ended is None:
            return None
        return SupervisorDown(f"the tree {top.machine.path} has ended: {top.ended}")

    def _check_thread(self) -> None:
        actor = self._actor([])
        if actor.needs_this_thread():
            raise WouldDeadlock(
                f"{actor.machine.path} cannot wait for itself: this thread is its own, or that "
                "of a supervisor below it; use another one"
            )

    def _done(self, request: Request, timeout: float | None) -> Done:
        answer = self._answer(request, timeout)
        assert isinstance(answer, Done), answer
        return answer


class Supervisor(SupervisorView):
    """A running tree of supervisors and children.

    Attributes:
        spec: What it was built from.
        exits: Its own lifeline: monitor it to hear of its end.
    """

    def __init__(
        self,
        spec: SupervisorSpec,
        *,
        clock: Clock = time.monotonic,
        timers: Timers | None = None,
        subscriber: Subscriber | None = None,
        log: Any = None,
    ) -> None:
        """Start the tree and wait until it has started.

        Args:
            spec: The tree.
            clock: The clock of restart windows and back-off, in seconds; it never goes back.
            timers: What calls back at a time; None for a thread of its own.
            subscriber: Called with every notice from the first on (`subscribe`).
            log: A structlog logger; None for structlog's own.

        Raises:
            StartFailed: A child did not start; what had started is stopped again.
        """
        self.spec = spec
        self._tree = Tree(clock=clock, timers=timers, log=log)
        self.exits = Lifeline(spec.id, self._asked_to_stop, failed=self._tree.watcher_failed)
        if subscriber is not None:
            self._tree.subscribe(subscriber)
        self._started = threading.Event()
        self._start_error: BaseException | None = None
        self._ended = threading.Event()
        actor = SupervisorActor(
            spec, spec.id, self._tree, on_start=self._on_start, on_exit=self._on_exit
        )
        super().__init__(actor, ())
        self._tree.look = self.snapshot
        try:
            atexit.register(self.stop)
            run(actor, self._tree)
            error = self._await_start()
        except BaseException as error:
            # Ctrl-C: a start that hangs would make an orderly stop wait for its deadline. Or there
            # was no thread to run on, and so nobody to hear of a stop.
            self.kill()
            if isinstance(error, Exception):
                raise StartFailed(f"{spec.id}: the supervisor did not start: {error}") from error
            raise
        if error is not None:
            self._join()
            raise StartFailed(f"{spec.id}: a child did not start: {error}") from error

    @classmethod
    def start(cls, spec: SupervisorSpec, **options: Any) -> Self:
        """Return a started tree; the same as calling the class."""
        return cls(spec, **options)

    @property
    def reason(self) -> ExitReason | None:
        """Why the tree has ended; None while it runs."""
        return self.exits.reason

    def subscribe(self, subscriber: Subscriber) -> Cancel:
        """Call *subscriber* with every notice of the tree; it must not block."""
        return self._tree.subscribe(subscriber)

    def stop(self, reason: ExitReason = SHUTDOWN, timeout: float | None = None) -> None:
        """Stop every child, in reverse start order, then the supervisor.

        Raises:
            TimeoutError: It is still stopping after *timeout* seconds; it goes on.
        """
        self._check_thread()
        self._asked_to_stop(reason)
        if not self._ended.wait(timeout):
            raise TimeoutError(f"{self.spec.id}: still stopping after {timeout} s")
        self._join()

    def kill(self) -> None:
        """End the supervisor at once; its children are killed, or asked where they cannot be."""
        self._top.kill()
        self._join()

    def wait_ended(self, timeout: float | None = None) -> ExitReason | None:
        """Wait until the tree has ended; return the reason, None where it still runs."""
        self._ended.wait(timeout)
        return self.reason

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()

    def _asked_to_stop(self, reason: ExitReason) -> None:
        self._top.post(StopRequested(reason))

    def _await_start(self) -> BaseException | None:
        """Return once it has started, or has failed to, and with what."""
        # Python does not see a signal that comes as the wait begins until the wait is over.
        while not self._started.wait(_GLANCE):
            pass
        return self._start_error

    def _on_start(self, error: BaseException | None) -> None:
        self._start_error = error
        self._started.set()
        if error is not None:
            self._let_go()

    def _on_exit(self, reason: ExitReason) -> None:
        self.exits.end(reason)
        if reason.kind is KILLED.kind and not self._top.machine.is_ready:
            self._on_start(SupervisorDown(f"{self.spec.id}: killed while it started"))
        self._let_go()

    def _let_go(self) -> None:
        # A program that runs for weeks must not hold every tree that ended by itself.
        atexit.unregister(self.stop)
        self._ended.set()

    def _join(self) -> None:
        self._ended.wait()
        thread = self._top.thread
        if thread is not None and thread is not threading.current_thread():
            thread.join()


def _future() -> pykka.Future[Answer]:
    return pykka.ThreadingFuture()


def _refusal(refused: Refused) -> Exception:
    match refused.why:
        case Refusal.NOPROC:
            return SupervisorDown("the supervisor has ended")
        case Refusal.START_FAILED:
            failed = StartFailed(f"{refused.child}: did not start: {refused.error}")
            failed.__cause__ = refused.error
            return failed
        case Refusal.BAD_COMBINATION:
            return SpecError(
                "significant", refused.child, "a significant child needs an auto_shutdown "
                "other than never"
            )  # fmt: skip
        case Refusal.INVALID_SPEC:
            return SpecError(
                "child", refused.child, "simple_one_for_one takes arguments for its template, "
                "every other strategy a ChildSpec"
            )  # fmt: skip
        case why:
            return ChildRefused(why, refused.child)


def _snapshot(actor: SupervisorActor) -> SupervisorSnapshot:
    # Those above before those below, then back: no recursion, which a deep tree would end.
    found = [(actor.machine.path, actor)]
    for path, above in found:
        found += [(f"{path}/{key}", below) for key, below in above.supervisors().items()]
    taken: dict[str, SupervisorSnapshot] = {}
    for path, one in reversed(found):
        taken[path] = one.snapshot(partial(_taken, taken, path))
    return taken[actor.machine.path]


def _taken(taken: dict[str, SupervisorSnapshot], path: str, key: str) -> SupervisorSnapshot | None:
    return taken.get(f"{path}/{key}")
