"""Ends executors without `close`: at SIGTERM, at the end of the program, in a forked child.

- On SIGTERM with Python's default action, accepted calls get a grace period, every tree is stopped,
  and the program ends by SIGTERM as it would have (128 + 15 as PID 1, which default actions spare).
  A handler of the user's is kept.
- A program that ends without `close` leaves nothing behind and does not hang.
- A forked child does not affect its parent's executors.

The signal handler only starts a thread: it interrupts the main thread anywhere, with any lock held.
"""

from __future__ import annotations

import _thread
import atexit
import contextlib
import os
import signal
import sys
import threading
import time
from typing import TYPE_CHECKING

from phalanx.runtime import OwnedLock
from phalanx.supervision import SIGNAL_PERIOD, SpecError

from .interrupts import interrupts

if TYPE_CHECKING:
    from types import FrameType

    from phalanx.actors.group.handle import Group


class _OpenExecutors:
    """The executors of this process that are not closed.

    Attributes:
        terminates: Whether the program is about to end by SIGTERM.
    """

    def __init__(self) -> None:
        self._lock = OwnedLock()
        self._pid = os.getpid()
        self._all: dict[int, Group] = {}
        self._named: dict[str, Group] = {}
        self._forking = threading.local()
        self.terminates = False

    def stay_until_the_end(self, *, builds: bool = False) -> None:
        """Return at once, except while SIGTERM is being carried out: then the program ends here.

        A caller that went on with `ExecutorClosed` would print a traceback, and its exit status
        could come before the signal's. One that *builds* an executor stays on any thread: a
        supervisor would have it in place of one that has just been ended.
        """
        is_main = threading.current_thread() is threading.main_thread()
        if self.terminates and (builds or is_main):
            while True:
                time.sleep(60.0)

    def claim(self, name: str, one: Group, *, replace: bool) -> Group | None:
        """Give *one*, which is about to be built, its *name*; return the group to end first.

        Raises:
            SpecError: another has that name, and is not to be replaced.
        """
        with self._lock.asked():
            before = self._named.get(name)
            if before is not None and not before.is_ending:
                if not replace:
                    remedy = "an executor of this process has it: close that, or give replace=True"
                    raise SpecError("name", name, remedy)
                if id(before) not in self._all:
                    raise SpecError("name", name, "another thread is building an executor of it")
            self._named[name] = one
            return before

    def add(self, one: Group) -> None:
        """Note that *one* lives."""
        with self._lock.asked():
            self._all[id(one)] = one
            is_main = threading.current_thread() is threading.main_thread()
            if is_main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
                signal.signal(signal.SIGTERM, _on_sigterm)

    def remove(self, one: Group, *, instead: Group | None = None) -> None:
        """Note that *one* has ended, or could not be built; then *instead* keeps the name."""
        with self._lock.asked():
            self._named = {name: each for name, each in self._named.items() if each is not one}
            if instead is not None and not instead.is_ending:
                self._named[instead.spec.name] = instead
            self._all.pop(id(one), None)

    def release_signals(self) -> None:
        """Have the program's signals be handled as before, where no executor lives any more.

        Does nothing off the main thread: no other may set a handler.
        """
        if threading.current_thread() is not threading.main_thread() or self._lock.is_mine():
            return
        with self._lock.asked():
            if not (self._all or self.terminates):
                _release_signals()

    def end_all(self, *, drains: bool) -> None:
        """End every one, all at the same time. Ctrl-C meanwhile kills them."""
        with self._lock.asked():
            if self._pid != os.getpid():
                return
            everyone = list(self._all.values())
        mine, threads = everyone[:1], list[threading.Thread]()
        for one in everyone[1:]:
            thread = threading.Thread(target=one.close, kwargs={"drains": drains}, daemon=True)
            try:
                thread.start()
                threads.append(thread)
            except RuntimeError:  # none to be had; by an exit handler never, since Python 3.12
                if not drains:
                    one.request_close()
                mine.append(one)
        try:
            for one in mine:
                one.close(drains=drains)
            for thread in threads:  # each has a limit
                while thread.is_alive():
                    thread.join(SIGNAL_PERIOD)
        except KeyboardInterrupt:
            for one in everyone:
                one.kill()
            for thread in threads:
                thread.join()
            raise

    def before_fork(self) -> None:
        """Block SIGTERM while the user forks.

        The interpreter drops signals in a child that its parent's handler was to be called for.
        `multiprocessing`, which ends children by SIGTERM, would wait for ever for such a child.
        """
        self._forking.mask = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])

    def after_fork(self) -> None:
        """Let it through again."""
        signal.pthread_sigmask(signal.SIG_SETMASK, self._forking.mask)

    def begin_anew(self) -> None:
        """Have none, and no signal handler, in a child that the user has forked."""
        self._lock = OwnedLock()  # a thread that was not copied may have it
        self._pid = os.getpid()
        self._all = {}
        self._named = {}
        self.terminates = False
        interrupts.begin_anew()
        _release_signals()
        self.after_fork()


def _release_signals() -> None:
    if signal.getsignal(signal.SIGTERM) is _on_sigterm:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    interrupts.uninstall()


open_executors = _OpenExecutors()
os.register_at_fork(
    before=open_executors.before_fork,
    after_in_parent=open_executors.after_fork,
    after_in_child=open_executors.begin_anew,
)


def _on_sigterm(_number: int, _frame: FrameType | None) -> None:
    if open_executors.terminates:  # one is enough
        return  # not by SIG_IGN: programs that are started until the end would inherit that
    open_executors.terminates = True
    # No `threading.Thread`: its start takes locks that the interrupted code may have.
    try:
        _thread.start_new_thread(_terminate, ())
    except RuntimeError:  # none to be had: it takes another SIGTERM
        open_executors.terminates = False


def _terminate() -> None:
    try:
        open_executors.end_all(drains=True)
    finally:
        _end_by_sigterm()


def _end_by_sigterm() -> None:
    import ctypes  # noqa: PLC0415  # only on the way out

    # Only the main thread may set a handler by `signal.signal`, and it may be busy for long.
    ctypes.CDLL(None).signal(int(signal.SIGTERM), None)  # SIG_DFL
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(1)
    os._exit(128 + signal.SIGTERM)  # PID 1 of a container: the kernel spares it


@atexit.register
def _at_exit() -> None:
    try:
        open_executors.end_all(drains=False)
    finally:
        if open_executors.terminates:  # the program has ended before the grace period was over
            for stream in (sys.stdout, sys.stderr):
                with contextlib.suppress(AttributeError, OSError, ValueError):
                    stream.flush()
            _end_by_sigterm()
