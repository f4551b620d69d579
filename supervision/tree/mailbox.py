"""An actor that ends by its own word alone.

Guarantees: what Pykka tells all actors of a program when one of them raises SystemExit, or when
somebody calls `pykka.ActorRegistry.stop_all`, does not end it. Whatever is raised on its thread,
while it hears a message or between two of them, comes to `failed`, once, and to nobody else.

Left to others: what it does with its messages, and what a failure means.

Why: it owns processes, which outlive its thread. Stopped from outside it would leave them without
anybody who hears of their deaths, and callers without an answer. OTP's supervisors trap exits for
the same reason, and heed none that comes from a stranger.
"""

from __future__ import annotations

import queue
from typing import TYPE_CHECKING, Any

import pykka
from pykka import messages

if TYPE_CHECKING:
    from collections.abc import Callable


class SteadfastActor(pykka.ThreadingActor):
    """See the module's docstring. Its subclasses say what `hear` and `failed` do."""

    # A program that forgets to end it must still end.
    use_daemon_thread = True

    _has_stopped = False

    @staticmethod
    def _create_actor_inbox() -> queue.SimpleQueue[Any]:
        # Pykka's own is written in Python: a finalizer that runs in the middle of one `tell` and
        # tells the same actor something would wait for ever for a lock which its thread has.
        return queue.SimpleQueue()

    def hear(self, message: Any, /) -> None:
        """Act on *message*."""
        raise NotImplementedError

    def failed(self, error: BaseException, /) -> None:
        """End, for *error* was raised on the actor's thread; must not raise."""
        raise NotImplementedError

    def stop(self) -> None:
        """End, after what is in the mailbox already."""
        self._has_stopped = True
        super().stop()

    def on_receive(self, message: Any) -> None:
        """Act on one message; whatever goes wrong here is a failure, never silent."""
        try:
            self.hear(message)
        except BaseException as error:  # noqa: BLE001  # SystemExit too: Pykka would stop all actors
            self.failed(error)

    def _handle_receive(self, message: Any) -> Any:
        stop = isinstance(message, messages._ActorStop)  # noqa: SLF001  # it has no public name  # pyright: ignore[reportPrivateUsage]  # as above
        if stop and not self._has_stopped:
            return None
        return super()._handle_receive(message)

    def _actor_loop_running(self) -> None:
        hear_mailbox(self, self._raised)

    def _raised(self, error: BaseException, was_answered: bool) -> None:
        # What was answered is of a stranger's proxy: `on_receive` does not raise.
        if not (was_answered and isinstance(error, Exception)):
            self.failed(error)


def hear_mailbox(
    actor: pykka.ThreadingActor, failed: Callable[[BaseException, bool], None]
) -> None:
    """Have *actor* hear its messages until it has stopped; in place of Pykka's own loop.

    That one stops every actor of the program for one SystemExit, ends without a word where it is
    struck while it waits, and tells nobody else of an exception that was answered.

    Args:
        failed: Told whatever was raised on the actor's thread, and whether somebody who had asked
            was answered with it.
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
        except BaseException as error:  # noqa: BLE001  # another thread may have had it raised here
            failed(error, was_answered)
