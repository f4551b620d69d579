"""SIGINT handler: raises Ctrl-C between calls and during waits, never in the middle of a message.

- With Python's own SIGINT handler in place, a KeyboardInterrupt that would be raised inside an
  `uninterrupted` function, or while the main thread holds a lock of this library, is raised a
  moment after that: no message is half sent, no answer is read and lost, no lock stays held.
- Anywhere else, waiting included, it is raised at once.
- A handler of the user's is kept. If it raises in the middle of a call, the call goes to all of its
  ranks or to none, and no answer is lost.

Signal handlers run on the main thread, between two bytecodes, and get the interrupted frame. This
one checks whether an uninterrupted function is on the stack, and if so has the signal sent again
until it is not. The hot path pays nothing for it.

Prior art: ``_ki.py`` in trio, which marks frames in the same way.
"""

from __future__ import annotations

import _thread
import signal
import threading
import time
from typing import TYPE_CHECKING, Any, TypeVar

from phalanx.runtime import is_holding, procfs

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import CodeType, FrameType

_F = TypeVar("_F", bound="Callable[..., Any]")
_shielded: set[CodeType] = set()
_AGAIN = 0.001  # seconds after which a Ctrl-C that could not be raised is sent again
_MASK = 29  # place of the blocked signals in the fields of a task
_LONGEST = 0.1  # seconds; one that is not even noted is sent less and less often


def uninterrupted(function: _F) -> _F:
    """Mark *function*: it does not wait for long, and must not be torn apart."""
    _shielded.add(function.__code__)
    return function


class _Interrupts:
    """The SIGINT that could not be raised where it came."""

    def __init__(self) -> None:
        self.begin_anew()

    def begin_anew(self) -> None:
        """Forget it, as in a child that was forked: the thread that would send it is not there."""
        self._lock = threading.RLock()  # held for moments; a handler may interrupt a handler
        self._pending = False
        self._is_sent = False  # again, and not handled yet
        self._is_doubled = False  # it was sent again although it was: it may come once more
        self._is_deaf = False

    def install(self) -> None:
        """Take Python's handler's place; does nothing off the main thread, or if it is another."""
        is_main = threading.current_thread() is threading.main_thread()
        if is_main and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, self._on_sigint)

    def uninstall(self) -> None:
        """Give Python's handler its place back; does nothing off the main thread."""
        is_main = threading.current_thread() is threading.main_thread()
        if is_main and self._is_installed():
            signal.signal(signal.SIGINT, signal.default_int_handler)

    def _is_installed(self) -> bool:
        return signal.getsignal(signal.SIGINT) == self._on_sigint

    def _on_sigint(self, number: int, frame: FrameType | None) -> None:
        if self._is_deaf:
            return
        is_shielded = _is_shielded(frame)
        with self._lock:
            begins = is_shielded and not self._pending
            self._pending, self._is_sent = is_shielded, False
            if self._is_doubled and not is_shielded:
                self._is_doubled = False
                self._forget_second()
        if not is_shielded:
            signal.default_int_handler(number, frame)
        elif begins:
            # No `threading.Thread`: its start takes locks that the interrupted code may have.
            try:
                _thread.start_new_thread(self._send_again, ())
            except RuntimeError:  # none to be had: it takes another Ctrl-C
                self._pending = False

    def _forget_second(self) -> None:
        """Have a signal that has come since, which is the same one, be handled in vain."""
        if self._is_installed():
            self._is_deaf = True
            try:
                signal.signal(signal.SIGINT, self._on_sigint)  # first it handles what has come
            finally:  # the handler of another signal may raise
                self._is_deaf = False

    def _send_again(self) -> None:
        main, wait = threading.main_thread(), _AGAIN
        assert main.ident is not None
        while True:
            time.sleep(wait)
            with self._lock:
                if self._is_sent and _is_waited_for(main):
                    self._pending = False  # it comes when it is let through, or has come
                if not self._pending:
                    return
                # A signal does not wake a thread that was about to wait in the kernel: so it is
                # sent until it is handled, although it may be about to be.
                wait = min(2 * wait, _LONGEST) if self._is_sent else _AGAIN
                self._is_doubled |= self._is_sent
                signal.pthread_kill(main.ident, signal.SIGINT)
                self._pending = self._is_sent = self._is_installed()  # another handler gets it once


interrupts = _Interrupts()


def _is_waited_for(thread: threading.Thread) -> bool:
    """Whether *thread* blocks SIGINT, be it to wait for it: the mask has it not while it waits."""
    folder = f"/proc/self/task/{thread.native_id}"
    try:
        is_waiting = b"sigtimedwait" in (procfs.content(f"{folder}/wchan") or b"")
        mask = procfs.stat_fields(folder)[_MASK : _MASK + 1]
    except OSError:  # no descriptor is free to look with: it is sent once more
        return False
    return is_waiting or any(int(blocked) & 1 << signal.SIGINT - 1 for blocked in mask)


def _is_shielded(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code in _shielded:
            return True
        frame = frame.f_back
    return is_holding()
