"""Start functions for children inside this process: Pykka actors, and callables on threads.

- An actor's start returns when its ``on_start`` has run, and raises its exception. Its end is
  reported once, with a reason.
- An exception that leaves a method reaches the caller first; then the supervisor's decider is
  called. SystemExit ends the actor that raised it and no other (Pykka alone stops all of them).
- Threads are daemons: a program that does not stop its tree can exit.
- An actor has made progress once it has handled a message, a thread once it has returned or called
  `StopSignal.progressed`.

Nothing can kill a thread: a child that does not end on request is reported lost after its shutdown
time and its ``kill_within``.
"""

from __future__ import annotations

import functools
import threading
from typing import TYPE_CHECKING, Any

import pykka

from phalanx.supervision.core.decider import Directive
from phalanx.supervision.core.restart_rules import NORMAL, SHUTDOWN, ExitKind, ExitReason
from phalanx.supervision.errors import SpecError, error_line, error_text
from phalanx.supervision.validate import check_callable

from .mailbox import run_mailbox, start_actor

if TYPE_CHECKING:
    from collections.abc import Callable

    from .start import StartContext


def exit_reason(error: BaseException | None, *, asked: ExitReason | None = None) -> ExitReason:
    """Return the reason of an end with *error*, or by returning; *asked* to end if given."""
    if error is None or (isinstance(error, SystemExit) and error.code in (None, 0)):
        if asked is None:
            return NORMAL
        return asked if error is None else SHUTDOWN
    code = error.code if isinstance(error, SystemExit) else None
    return ExitReason(ExitKind.CRASH, error_line(error), code if isinstance(code, int) else None)


class _InThisProcess:
    """A start function that gives *what* it starts these arguments, then those of the spec."""

    killable = False

    def __init__(self, what: Any, /, *args: Any, **kwargs: Any) -> None:
        self.what, self.args, self.kwargs = what, args, kwargs

    def __repr__(self) -> str:
        name = getattr(self.what, "__qualname__", repr(self.what))
        return f"{type(self).__name__}({name})"


class pykka_child(_InThisProcess):  # noqa: N801 # reads as a function where it is used
    """A start function for a Pykka actor: ``ChildSpec("metrics", pykka_child(Metrics, port))``."""

    def __init__(self, actor: Any, /, *args: Any, **kwargs: Any) -> None:
        kind: Any = actor
        if not (isinstance(actor, type) and issubclass(kind, pykka.ThreadingActor)):
            raise SpecError("pykka_child", actor, "give a class derived from pykka.ThreadingActor")
        super().__init__(actor, *args, **kwargs)

    def __call__(self, ctx: StartContext, *args: Any) -> ActorChild:
        """Start the actor and wait until its ``on_start`` has run."""
        actor = _supervised(self.what)(*self.args, *args, **self.kwargs)
        child = actor.phalanx_child = ActorChild(actor.actor_ref, ctx)
        start_actor(actor)
        ctx.begun.wait()  # within the limits of the supervisor, which gives it up
        if child.start_error is not None:
            raise child.start_error
        return child


class _Thread:
    def kill(self) -> None:
        """Do nothing: nothing can kill a thread."""


class ActorChild(_Thread):
    """The handle of a Pykka actor; *ref* is its `pykka.ActorRef`."""

    def __init__(self, ref: pykka.ActorRef[Any], ctx: StartContext) -> None:
        self.ref, self.ctx = ref, ctx
        self.start_error: BaseException | None = None
        self.error: BaseException | None = None
        self.directive: Directive | None = None
        self._asked: ExitReason | None = None

    def terminate(self, reason: ExitReason) -> None:
        """Put a stop at the end of its mailbox."""
        self._asked = reason
        self.ref.stop(block=False)

    def ended(self) -> None:
        """Report the end to the supervisor, unless it is that of a failed start."""
        self.ctx.begun.set()
        if self.start_error is None:
            self.ctx.exited(exit_reason(self.error, asked=self._asked), self.directive)


class _Supervised(pykka.ThreadingActor):
    """Mixed in before the user's class: reports the actor's end and calls the decider."""

    use_daemon_thread = True
    phalanx_child: ActorChild

    def _actor_loop(self) -> None:
        try:
            super()._actor_loop()
        finally:
            self.phalanx_child.ended()

    def _actor_loop_setup(self) -> None:
        try:
            self.on_start()
        except BaseException as error:  # noqa: BLE001 # whatever it is, it is the outcome of the start
            self.phalanx_child.start_error = error
            self._end()
        self.phalanx_child.ctx.begun.set()

    def _actor_loop_running(self) -> None:
        run_mailbox(self, self._failed)

    def _handle_receive(self, message: Any) -> Any:
        answer = super()._handle_receive(message)
        if not self.actor_stopped.is_set():
            self.phalanx_child.ctx.progressed()
        return answer

    def _failed(self, error: BaseException, was_answered: bool) -> None:
        child = self.phalanx_child
        directive = child.ctx.directive(error)
        pykka_goes_on = was_answered and isinstance(error, Exception)
        if directive is Directive.RESUME or (directive is None and pykka_goes_on):
            return
        child.error, child.directive = error, directive
        self._end()
        try:
            self.on_failure(type(error), error, error.__traceback__)
        except BaseException as second:  # noqa: BLE001 # the first error is the reason; this one is a note of it
            error.add_note(f"on_failure raised too: {error_text(second)}")

    def _end(self) -> None:
        pykka.ActorRegistry.unregister(self.actor_ref)
        self.actor_stopped.set()


@functools.cache
def _supervised(actor: type[pykka.ThreadingActor]) -> type[Any]:
    names = {"__module__": actor.__module__, "__qualname__": actor.__qualname__}
    return type(actor.__name__, (_Supervised, actor), names)


class StopSignal(_Thread, threading.Event):
    """Set when the child is to end; *reason* says why. The handle of the child.

    Its method *progressed* reports that the child has been of use (``fruitless_limit``).
    """

    reason: ExitReason = SHUTDOWN

    def __init__(self, progressed: Callable[[], None]) -> None:
        super().__init__()
        self.progressed = progressed

    def terminate(self, reason: ExitReason) -> None:
        """Set it."""
        self.reason = reason
        self.set()


class thread_child(_InThisProcess):  # noqa: N801 # reads as a function where it is used
    """A start function for a callable on a thread: it gets a `StopSignal`, then *args*.

    It should return soon after the signal is set. Returning is a normal end, raising a crash.
    """

    def __init__(self, function: Any, /, *args: Any, **kwargs: Any) -> None:
        check_callable("thread_child", function)
        super().__init__(function, *args, **kwargs)

    def __call__(self, ctx: StartContext, *args: Any) -> StopSignal:
        """Start the thread."""
        signal = StopSignal(ctx.progressed)
        arguments = (signal, ctx, (*self.args, *args))
        threading.Thread(target=self._run, args=arguments, name=ctx.path, daemon=True).start()
        return signal

    def _run(self, signal: StopSignal, ctx: StartContext, args: tuple[Any, ...]) -> None:
        error: BaseException | None = None
        directive: Directive | None = None
        try:
            self.what(signal, *args, **self.kwargs)
        except BaseException as caught:  # noqa: BLE001 # whatever ends the thread is its exit reason
            error, directive = caught, ctx.directive(caught)
        else:
            ctx.progressed()
        if directive is Directive.RESUME:
            directive = None  # nothing is left that could go on
        ctx.exited(exit_reason(error, asked=signal.reason if signal.is_set() else None), directive)
