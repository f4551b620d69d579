"""Ctrl-C between calls and while waiting, never in the middle of a message.

Guarantees: with Python's own SIGINT handler in place, a KeyboardInterrupt that would strike inside
an `uninterrupted` function is raised as soon as that function is left; so no message is half sent
and no answer is read and lost. Everywhere else, waiting included, it strikes at once. A handler of
the user's is left alone: one that raises may tear a call apart.

How: handlers run on the main thread, between two steps of whatever it does, and are given the
interrupted frame. Ours looks whether an uninterrupted function is on the stack. The hot path pays
nothing for it but a look at one attribute.

Prior art: ``_ki.py`` in trio, which marks frames in the same way.
"""

from __future__ import annotations

import signal
import threading
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import CodeType, FrameType

_F = TypeVar("_F", bound="Callable[..., Any]")
_shielded: set[CodeType] = set()


def uninterrupted(function: _F) -> _F:
    """Mark *function*: it does not wait, and must not be torn apart."""
    _shielded.add(function.__code__)
    return function


class _Interrupts:
    """The SIGINT that struck where it could not be raised.

    Attributes:
        pending: Whether there is one.
    """

    def __init__(self) -> None:
        self.pending = False
        self._installed = False

    def install(self) -> None:
        """Take Python's handler's place; does nothing off the main thread, or if it is another."""
        if threading.current_thread() is not threading.main_thread():
            return
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, self._on_sigint)
            self._installed = True

    def uninstall(self) -> None:
        """Give Python's handler its place back."""
        if self._installed and threading.current_thread() is threading.main_thread():
            if signal.getsignal(signal.SIGINT) == self._on_sigint:
                signal.signal(signal.SIGINT, signal.default_int_handler)
            self._installed = False

    def strike(self) -> None:
        """Raise what is pending, if this is the main thread."""
        if threading.current_thread() is threading.main_thread():
            self.pending = False
            raise KeyboardInterrupt

    def _on_sigint(self, number: int, frame: FrameType | None) -> None:
        at = frame
        while at is not None:
            if at.f_code in _shielded:
                self.pending = True
                return
            at = at.f_back
        signal.default_int_handler(number, frame)


interrupts = _Interrupts()
