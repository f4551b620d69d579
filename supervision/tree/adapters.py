"""Children inside this process: Pykka actors, and callables on threads of their own.

Guarantees: an actor's start returns when its ``on_start`` has run, and raises what that raised.
Its end is reported once, with a reason. An exception that leaves a method reaches the caller
first; then the supervisor's decider is asked. SystemExit ends the actor that raised it and no
other (Pykka by itself stops all of them). Their threads are daemons: a program that forgets to
stop its tree ends. An actor has been of use once it has handled a message, a thread once it has
returned or called `StopSignal.progressed`.

What cannot be had: nothing kills a thread. A child that does not end when it is asked is reported
lost after its shutdown time and its ``kill_within``.
"""

from __future__ import annotations

import functools
import threading
import time
from typing import TYPE_CHECKING, Any

import pykka

from phalanx.supervision.core.decider import Directive
from phalanx.supervision.core.policy import NORMAL, SHUTDOWN, ExitKind, ExitReason
from phalanx.supervision.errors import error_text

from .mailbox import hear_mailbox

if TYPE_CHECKING:
    from collections.abc import Callable

    from phalanx.supervision.core.child import StartContext


def exit_reason(error: BaseException | None, *, was_asked: bool = False) -> ExitReason:
    """Return why something ended that raised *error*, or returned."""
    if error is None or (isinstance(error, SystemExit) and error.code in (None, 0)):
        return SHUTDOWN if was_asked else NORMAL
    code = error.code if isinstance(error, SystemExit) else None
    return ExitReason(ExitKind.CRASH, _text(error), code if isinstance(code, int) else None)


def _text(error: BaseException) -> str:
    try:
        return f"{type(error).__name__}: {error}"
    except BaseException:  # noqa: BLE001 # a user's ``__str__`` must not cost the report of the exit
        return error_text(error)


# --- Pykka actors -------------------------------------------------------------------------


class pykka_child:  # noqa: N801 # reads as a function where it is used
    """A start function for a Pykka actor: ``ChildSpec("metrics", pykka_child(Metrics, port))``."""

    killable = False

    def __init__(self, actor: type[pykka.ThreadingActor], *args: Any, **kwargs: Any) -> None:
        self.actor = actor
        self.args = args
        self.kwargs = kwargs

    def __repr__(self) -> str:
        return f"pykka_child({self.actor.__qualname__})"

    def __call__(self, ctx: StartContext, *args: Any) -> ActorChild:
        """Start the actor and wait until its ``on_start`` has run."""
        actor = _watched(self.actor)(*self.args, *args, **self.kwargs)
        watch = Watch(ctx)
        actor.phalanx_watch = watch
        pykka.ActorRegistry.register(actor.actor_ref)
        actor._start_actor_loop()  # noqa: SLF001 # `Actor.start` would not let us in before the thread runs
        if not watch.begun.wait(_remaining(ctx.deadline)):
            actor.stop()
            raise TimeoutError(f"{ctx.path}: on_start did not return in time")
        if watch.start_error is not None:
            raise watch.start_error
        return ActorChild(actor.actor_ref, watch)


class ActorChild:
    """The handle of a Pykka actor; *ref* is its `pykka.ActorRef`."""

    def __init__(self, ref: pykka.ActorRef[Any], watch: Watch) -> None:
        self.ref = ref
        self._watch = watch

    def terminate(self, reason: ExitReason) -> None:
        """Put a stop at the end of its mailbox."""
        self._watch.asked = reason
        self.ref.stop(block=False)

    def kill(self) -> None:
        """Do nothing: nothing can kill a thread, and its spec says so."""


class Watch:
    """What is noted about one actor."""

    def __init__(self, ctx: StartContext) -> None:
        self.ctx = ctx
        self.begun = threading.Event()
        self.start_error: BaseException | None = None
        self.error: BaseException | None = None
        self.directive: Directive | None = None
        self.asked: ExitReason | None = None

    def reason(self) -> ExitReason:
        """Return why the actor ended."""
        if self.error is None and self.asked is not None:
            return self.asked
        return exit_reason(self.error, was_asked=self.asked is not None)


class _Watched(pykka.ThreadingActor):
    """Mixed in before the user's class: reports the actor's end and asks the decider."""

    use_daemon_thread = True
    phalanx_watch: Watch

    def _actor_loop(self) -> None:
        try:
            super()._actor_loop()
        finally:
            watch = self.phalanx_watch
            watch.begun.set()
            if watch.start_error is None:
                watch.ctx.exited(watch.reason(), watch.directive)

    def _actor_loop_setup(self) -> None:
        watch = self.phalanx_watch
        try:
            self.on_start()
        except BaseException as error:  # noqa: BLE001 # whatever it is, it is the outcome of the start
            watch.start_error = error
            self._ended()
        watch.begun.set()

    def _actor_loop_running(self) -> None:
        hear_mailbox(self, self._failed)

    def _handle_receive(self, message: Any) -> Any:
        answer = super()._handle_receive(message)
        if not self.actor_stopped.is_set():
            self.phalanx_watch.ctx.progressed()
        return answer

    def _failed(self, error: BaseException, was_answered: bool) -> None:
        watch = self.phalanx_watch
        directive = watch.ctx.directive(error)
        pykka_goes_on = was_answered and isinstance(error, Exception)
        if directive is Directive.RESUME or (directive is None and pykka_goes_on):
            return
        watch.error, watch.directive = error, directive
        self._ended()
        try:
            self.on_failure(type(error), error, error.__traceback__)
        except BaseException as second:  # noqa: BLE001 # the first error is the reason; this one is kept beside it
            error.add_note(f"on_failure raised too: {error_text(second)}")

    def _ended(self) -> None:
        pykka.ActorRegistry.unregister(self.actor_ref)
        self.actor_stopped.set()


@functools.cache
def _watched(actor: type[pykka.ThreadingActor]) -> type[Any]:
    names = {"__module__": actor.__module__, "__qualname__": actor.__qualname__}
    return type(actor.__name__, (_Watched, actor), names)


# --- callables ----------------------------------------------------------------------------


class thread_child:  # noqa: N801 # reads as a function where it is used
    """A start function for a callable on a thread: it gets a `StopSignal`, then *args*.

    It should return soon after the signal is set. Returning is a normal end, raising a crash.
    """

    killable = False

    def __init__(self, target: Callable[..., object], *args: Any, **kwargs: Any) -> None:
        self.target = target
        self.args = args
        self.kwargs = kwargs

    def __repr__(self) -> str:
        return f"thread_child({self.target!r})"

    def __call__(self, ctx: StartContext, *args: Any) -> ThreadChild:
        """Start the thread."""
        child = ThreadChild(ctx)
        arguments = (child, ctx, (*self.args, *args))
        threading.Thread(target=self._run, args=arguments, name=ctx.path, daemon=True).start()
        return child

    def _run(self, child: ThreadChild, ctx: StartContext, args: tuple[Any, ...]) -> None:
        error: BaseException | None = None
        directive: Directive | None = None
        try:
            self.target(child.ref, *args, **self.kwargs)
        except BaseException as caught:  # noqa: BLE001 # whatever ends the thread is its exit reason
            error, directive = caught, ctx.directive(caught)
        else:
            ctx.progressed()
        if directive is Directive.RESUME:
            directive = None  # there is nothing left that could go on
        ctx.exited(child.reason(error), directive)


class StopSignal(threading.Event):
    """Set when the child is to end; *reason* says why.

    Its method *progressed* says that the child has been of use (``fruitless_limit``).
    """

    reason: ExitReason = SHUTDOWN

    def __init__(self, progressed: Callable[[], None]) -> None:
        super().__init__()
        self.progressed = progressed


class ThreadChild:
    """The handle of a thread; *ref* is its stop signal."""

    def __init__(self, ctx: StartContext) -> None:
        self.ref = StopSignal(ctx.progressed)

    def terminate(self, reason: ExitReason) -> None:
        """Set the stop signal."""
        self.ref.reason = reason
        self.ref.set()

    def kill(self) -> None:
        """Do nothing: nothing can kill a thread, and its spec says so."""

    def reason(self, error: BaseException | None) -> ExitReason:
        """Return why the thread ended."""
        if error is None and self.ref.is_set():
            return self.ref.reason
        return exit_reason(error, was_asked=self.ref.is_set())


def _remaining(deadline: float) -> float:
    return min(max(0.0, deadline - time.monotonic()), threading.TIMEOUT_MAX)
