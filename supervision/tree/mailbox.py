"""Pykka actors that own processes: only their own `stop` ends them.

- `pykka.ActorRegistry.stop_all` does not end a `ProtectedActor`, nor does a SystemExit in another
  actor, for which Pykka stops every actor of the program. Its processes would outlive it without an
  owner, and callers would get no answer. OTP's supervisors trap exits for the same reason.
- An exception on its thread, while it handles a message or between two, goes to `failed`, once.
"""

from __future__ import annotations

import queue
from typing import TYPE_CHECKING, Any

import pykka
from pykka import messages

if TYPE_CHECKING:
    from collections.abc import Callable


class ProtectedActor(pykka.ThreadingActor):
    """The base of supervisors and group actors."""

    on_message: Callable[[Any], None]  # acts on a message
    failed: Callable[[BaseException], None]  # ends it, because of what was raised; must not raise

    use_daemon_thread = True  # a program that does not end the actor can still exit

    _has_stopped = False

    @staticmethod
    def _create_actor_inbox() -> queue.SimpleQueue[Any]:
        # Pykka's own queue is written in Python: a finalizer that interrupts one `tell` and tells
        # the same actor something would deadlock on its lock.
        return queue.SimpleQueue()

    def stop(self) -> None:
        """End, after the messages that are in the mailbox already."""
        self._has_stopped = True
        super().stop()

    def on_receive(self, message: Any) -> None:
        """Act on one message; an exception is a failure."""
        try:
            self.on_message(message)
        except BaseException as error:  # noqa: BLE001  # SystemExit too: Pykka would stop all actors
            self.failed(error)

    def _handle_receive(self, message: Any) -> Any:
        stop = isinstance(message, messages._ActorStop)  # noqa: SLF001  # it has no public name  # pyright: ignore[reportPrivateUsage]  # as above
        if stop and not self._has_stopped:
            return None
        return super()._handle_receive(message)

    def _actor_loop_running(self) -> None:
        run_mailbox(self, self._raised)

    def _raised(self, error: BaseException, was_answered: bool) -> None:
        # Only a proxy's call can have been answered: `on_receive` does not raise.
        if not (was_answered and isinstance(error, Exception)):
            self.failed(error)


def start_actor(actor: pykka.ThreadingActor) -> None:
    """Start *actor*: what `pykka.Actor.start`, a class method, does after it has made one."""
    pykka.ActorRegistry.register(actor.actor_ref)
    try:
        actor._start_actor_loop()  # noqa: SLF001  # as above  # pyright: ignore[reportPrivateUsage]  # as above
    except BaseException:
        pykka.ActorRegistry.unregister(actor.actor_ref)
        raise


def run_mailbox(actor: pykka.ThreadingActor, failed: Callable[[BaseException, bool], None]) -> None:
    """Handle the messages of *actor* until it has stopped; in place of Pykka's own loop.

    Pykka's loop stops every actor of the program for one SystemExit, ends silently if an exception
    is raised in it while it waits, and drops one with which a message was answered. *failed* is
    called with each exception, and whether a caller was answered with it.
    """
    while not actor.actor_stopped.is_set():
        was_answered = False
        try:
            envelope = actor.actor_inbox.get()
            try:
                answer = actor._handle_receive(envelope.message)  # noqa: SLF001  # as Pykka's own  # pyright: ignore[reportPrivateUsage]  # as above
            except BaseException:
                if envelope.reply_to is not None:
                    envelope.reply_to.set_exception()
                    was_answered = True
                raise
            if envelope.reply_to is not None:
                envelope.reply_to.set(answer)
        except BaseException as error:  # noqa: BLE001  # another thread may have raised it here
            failed(error, was_answered)
