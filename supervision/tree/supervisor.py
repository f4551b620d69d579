"""The user's handle of a tree: start it, query it, change it, watch it, close it.

- `Supervisor(spec)` returns when every child of the tree has started, or raises `StartFailed` when
  nothing of it runs.
- Every request has OTP's result; a refusal is an exception.
- `close` returns when every child has ended, and may be called again. A program that does not call
  it closes the tree at its exit.
"""

from __future__ import annotations

import atexit
import threading
import time
import warnings
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Self

import pykka

from phalanx.supervision.core import messages as msg
from phalanx.supervision.core.machine import SupervisorMachine
from phalanx.supervision.core.restart_rules import KILLED, SHUTDOWN, ExitReason
from phalanx.supervision.core.snapshot import SupervisorSnapshot, render
from phalanx.supervision.core.spec import ChildSpec, SupervisorSpec
from phalanx.supervision.errors import (
    ChildRefused,
    PhalanxError,
    SpecError,
    StartFailed,
    SupervisorDown,
    WouldDeadlock,
    error_line,
)
from phalanx.supervision.validate import check_kind

from .actor import SupervisorActor
from .monitors import Lifeline
from .services import Clock, Subscriber, TreeServices, wait_event, wait_periods

if TYPE_CHECKING:
    from collections.abc import Callable

    from .monitors import Cancel, Watcher
    from .services import Timers
    from .start import StartContext

_RENAMED = {
    "reason": "exit_reason", "snapshot": "status", "stop": "close", "wait_ended": "wait_closed"
}  # fmt: skip
_RECHECK = 0.2  # seconds


class SupervisorView:
    """One supervisor of a tree, by path; the view stays valid when the supervisor is restarted.

    Every request waits for its answer: *timeout* seconds, None for as long as the supervisor is
    in the middle of something. A request that times out may still be carried out.
    """

    def __init__(self, top: SupervisorActor, path: tuple[str, ...]) -> None:
        self._top, self._path = top, path

    def start_child(
        self,
        child: ChildSpec | SupervisorSpec | None = None,
        *args: Any,
        timeout: float | None = None,
    ) -> str | None:
        """Add and start a child; return its key, or None if it was ignored and not kept.

        For simple_one_for_one omit *child* (None) and give *args* for the template.

        Raises:
            ChildRefused: There is one of that id, or there are too many.
            StartFailed: Its start function raised; nothing is kept.
        """
        spec = ChildSpec(child.id, child) if isinstance(child, SupervisorSpec) else child
        done: msg.Done = self._ask(lambda machine: machine.start_child(spec, args), timeout)
        return done.child or None

    def terminate_child(self, key: str, *, timeout: float | None = None) -> None:
        """Stop a child; it is kept and not restarted, unless it is temporary or an instance."""
        self._ask(lambda machine: machine.terminate_child(key), timeout)

    def restart_child(self, key: str, *, timeout: float | None = None) -> bool:
        """Start a child that does not run; return whether it runs now (False: ignored)."""
        done: msg.Done = self._ask(lambda machine: machine.restart_child(key), timeout)
        return done.running

    def delete_child(self, key: str, *, timeout: float | None = None) -> None:
        """Remove a child that does not run."""
        self._ask(lambda machine: machine.delete_child(key), timeout)

    def which_children(self, *, timeout: float | None = None) -> tuple[msg.ChildRow, ...]:
        """Return a row per child, newest first."""
        rows: tuple[msg.ChildRow, ...] = self._ask(SupervisorMachine.child_rows, timeout)
        return rows

    def count_children(self, *, timeout: float | None = None) -> msg.Counts:
        """Return how many children there are, and how many of them live."""
        counts: msg.Counts = self._ask(SupervisorMachine.counts, timeout)
        return counts

    def get_childspec(self, key: str, *, timeout: float | None = None) -> ChildSpec:
        """Return the spec of a child, defaults filled in."""
        spec: ChildSpec = self._ask(lambda machine: machine.child_spec(key), timeout)
        return spec

    def child(self, path: str) -> Any:
        """Return the ``ref`` of the handle of the child of this key or path, or the handle.

        Raises:
            ChildRefused: There is none, or it does not run now.
            SupervisorDown: The tree has ended; the message says why.
        """
        start = self._start_of(path)
        if start.has_ended:
            raise self._gone() or ChildRefused("not_running", path)
        return getattr(start.handle, "ref", start.handle)

    def wait_child(
        self, path: str, timeout: float | None = None, *, other_than: object = None
    ) -> Any:
        """Return `child` of *path*, after its start or restart if one is under way.

        Not *other_than*, which is ending: it waits for the one that follows.

        Raises:
            ChildRefused: There is none, or nothing is going to start it.
            SupervisorDown: The tree has ended; the message says why.
            TimeoutError: It does not run after *timeout* seconds.
        """
        self._check_process()  # before the locks: a thread that was not copied may have them
        changed = threading.Event()
        cancel = self._top.services.subscribe(lambda _notice: changed.set())
        try:
            for left in wait_periods(timeout):
                changed.clear()
                # Before the look: it may start in between.
                will_run = self._top.will_run(*self._path, *path.split("/"))
                try:
                    found = self.child(path)
                    if found is not other_than:
                        return found
                except ChildRefused:
                    if not will_run:
                        raise
                self._check_thread()
                # Not every change is announced, such as a start that is ignored.
                changed.wait(min(left, _RECHECK))
            with suppress(ChildRefused):  # a last look
                if (found := self.child(path)) is not other_than:
                    return found
            raise TimeoutError(f"{path} does not run after {timeout:g} s")
        finally:
            cancel()

    def supervisor(self, path: str) -> SupervisorView:
        """Return the supervisor at *path* below this one, whether it runs now or not."""
        return SupervisorView(self._top, (*self._path, *path.split("/")))

    def lifeline(self, path: str) -> Lifeline:
        """Return the lifeline of the child that runs at *path* now, for links and monitors."""
        return self._start_of(path).lifeline

    def monitor(self, path: str, watcher: Watcher) -> Cancel:
        """Call *watcher* once when the child that runs at *path* now has ended."""
        return self.lifeline(path).monitor(watcher)

    def status(self) -> SupervisorSnapshot:
        """Return the tree from here down, as a value."""
        # Those above before those below, then back: no recursion, which a deep tree would end.
        top = self._actor()
        found = [(top.machine.path, top)]
        for path, above in found:
            found += [(f"{path}/{key}", below) for key, below in above.supervisors().items()]
        taken: dict[str, SupervisorSnapshot] = {}
        for path, one in reversed(found):
            taken[path] = one.snapshot(taken)
        return taken[top.machine.path]

    def render(self) -> str:
        """Return the tree from here down, as text."""
        return render(self.status())

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:  # names that still work
            if name not in _RENAMED:
                raise AttributeError(f"a supervisor has no attribute {name!r}")
            text = f"phalanx: Supervisor.{name} is deprecated: write {_RENAMED[name]}"
            warnings.warn(text, DeprecationWarning, stacklevel=2)
            return getattr(self, _RENAMED[name])

    def _actor(self, *below: str) -> SupervisorActor:
        self._check_process()
        actor = self._top
        for key in (*self._path, *below):
            nested = actor.supervisors().get(key)
            if nested is None:
                raise self._gone() or SupervisorDown(f"{actor.machine.path}/{key} does not run")
            actor = nested
        return actor

    def _start_of(self, path: str) -> StartContext:
        *above, key = path.split("/")
        try:
            start = self._actor(*above).start_of(key)
        except SupervisorDown as error:
            raise self._gone() or ChildRefused("not_found", path) from error
        if start is None or start.handle is None:
            raise self._gone() or ChildRefused("not_running", path)
        return start

    def _ask(self, ask: Callable[[SupervisorMachine], object], timeout: float | None) -> Any:
        self._check_thread()
        future: pykka.Future[Any] = pykka.ThreadingFuture()
        is_read = self._actor().post(msg.Request(future, ask))
        answer = _answer(future, timeout) if is_read else SupervisorDown()
        if isinstance(answer, SupervisorDown):
            answer = self._gone() or answer
        if isinstance(answer, PhalanxError):
            raise answer
        return answer

    def _gone(self) -> SupervisorDown | None:
        """Return the error that says that the tree has ended, and why, if it has."""
        top = self._top
        if top.is_elsewhere:
            return SupervisorDown(f"the tree {top.machine.path} is in the process that forked this")
        if top.ended is None:
            return None
        return SupervisorDown(f"the tree {top.machine.path} has ended: {top.ended}")

    def _check_process(self) -> None:
        if self._top.is_elsewhere:
            raise self._gone() or SupervisorDown()

    def _check_thread(self) -> None:
        self._check_process()
        path = "/".join((self._top.machine.path, *self._path))
        if self._top.services.is_inside(path):
            raise WouldDeadlock(f"{path} cannot wait for itself or one below: use another thread")


class Supervisor(SupervisorView):
    """A running tree of supervisors and children.

    Attributes:
        exits: Its own lifeline, for links and monitors.
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
            timers: Timers of that clock; None for a thread that provides them.
            subscriber: Called with every notice from the first on (`subscribe`).
            log: A structlog logger; None for structlog's own.

        Raises:
            StartFailed: A child did not start; what had started is stopped again.
        """
        check_kind("spec", spec, SupervisorSpec)
        if timers is None and clock is not time.monotonic:
            raise SpecError("timers", timers, "give timers of this clock")
        self.spec = spec
        self._services = TreeServices(clock=clock, timers=timers, log=log)
        if subscriber is not None:
            self._services.subscribe(subscriber)
        self._started = threading.Event()
        self._start_error: BaseException | None = None
        self._ended = threading.Event()
        actor = SupervisorActor(
            spec, spec.id, self._services, on_start=self._on_start, on_exit=self._on_exit
        )
        super().__init__(actor, ())
        self.exits = Lifeline(spec.id, actor.terminate, self._services.callback_failed)
        self._services.look = self.status
        try:
            atexit.register(self.close)
            self._services.run(actor)
            wait_event(self._started)
        except BaseException as error:
            # Ctrl-C: a start that hangs would make an orderly stop wait for its deadline. Or there
            # was no thread to run on, and so none to handle a request to stop.
            self.kill()
            if isinstance(error, Exception):
                raise StartFailed(f"{spec.id}: the supervisor did not start: {error}") from error
            raise
        if self._start_error is not None:
            self._join()
            text = f"{spec.id}: a child did not start: {error_line(self._start_error)}"
            raise StartFailed(text) from self._start_error

    @property
    def exit_reason(self) -> ExitReason | None:
        """The reason of the tree's end; None while it runs."""
        return self.exits.reason

    def subscribe(self, subscriber: Subscriber) -> Cancel:
        """Call *subscriber*, which must not block, with every notice; return what ends that."""
        return self._services.subscribe(subscriber)

    def close(self, reason: ExitReason = SHUTDOWN, timeout: float | None = None) -> None:
        """Stop every child, in reverse start order, then the supervisor.

        In a forked process this does nothing, as `kill` does.

        Raises:
            TimeoutError: It is still stopping after *timeout* seconds; it goes on.
        """
        check_kind("reason", reason, ExitReason)
        if self._top.is_elsewhere:
            return
        self._check_thread()
        self._top.terminate(reason)
        if not wait_event(self._ended, timeout):
            raise TimeoutError(f"{self.spec.id}: still stopping after {timeout} s")
        self._join()

    def kill(self) -> None:
        """End at once, kill its children, ask unkillable ones; nested supervisors stop in order."""
        if self._top.is_elsewhere:
            return
        self._top.kill()
        self._join()

    def wait_closed(self, timeout: float | None = None) -> ExitReason | None:
        """Wait until the tree has ended; return the reason, or None if it still runs.

        Raises:
            SupervisorDown: The tree is in the process that forked this one.
            WouldDeadlock: This is a thread that the end of the tree needs.
        """
        if not self._ended.is_set():
            self._check_thread()
        wait_event(self._ended, timeout)
        return self.exit_reason

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _on_start(self, _top: SupervisorActor | None, error: BaseException | None) -> None:
        self._start_error = error
        self._started.set()
        if error is not None:
            self._let_go()

    def _on_exit(self, reason: ExitReason) -> None:
        self.exits.end(reason)
        if reason.kind is KILLED.kind and not self._top.machine.is_ready:
            self._on_start(None, SupervisorDown(f"{self.spec.id}: killed while it started"))
        self._let_go()

    def _let_go(self) -> None:
        # A program that runs for weeks must not hold every tree that ended by itself.
        atexit.unregister(self.close)
        self._ended.set()

    def _join(self) -> None:
        wait_event(self._ended)
        thread = self._top.thread
        if thread is not None and thread is not threading.current_thread():
            thread.join()


def _answer(future: pykka.Future[Any], timeout: float | None) -> Any:
    for seconds in wait_periods(timeout):
        with suppress(pykka.Timeout):
            return future.get(timeout=seconds)
    raise TimeoutError(f"no answer from the supervisor after {timeout:g} s")
