"""Every way for a process to end with a shared lock. Run as a program, by the tests.

Each way is gone in a child that takes the lock first; then the lock is asked for. Prints one line
of JSON: for each way ``told``, or what went wrong.
"""

from __future__ import annotations

import atexit
import ctypes
import json
import os
import signal
import sys
import threading
import time
from typing import TYPE_CHECKING, NoReturn

from phalanx.runtime import LockTable, SharedLock, descriptors
from phalanx.supervision import LockTimeout

if TYPE_CHECKING:
    from collections.abc import Callable

_SLEEP = [sys.executable, "-S", "-c", "import sys; sys.stdin.read()"]


def end_in_good_order(lock: SharedLock) -> None:
    lock.acquire()


def sys_exit_0(lock: SharedLock) -> NoReturn:
    lock.acquire()
    sys.exit(0)


def sys_exit_3(lock: SharedLock) -> NoReturn:
    lock.acquire()
    sys.exit(3)


def an_exception(lock: SharedLock) -> NoReturn:
    lock.acquire()
    sys.stderr = open(os.devnull, "w")  # noqa: SIM115  # the traceback is expected
    raise ValueError("of the main thread")


def an_exception_at_exit(lock: SharedLock) -> None:
    def fail() -> None:
        raise ValueError("at exit")

    lock.acquire()
    sys.stderr = open(os.devnull, "w")  # noqa: SIM115  # the traceback is expected
    atexit.register(fail)


def taken_at_exit(lock: SharedLock) -> None:
    atexit.register(lock.acquire)


def os_exit(lock: SharedLock) -> NoReturn:
    lock.acquire()
    os._exit(0)


def exit_of_the_c_library(lock: SharedLock) -> None:
    lock.acquire()
    ctypes.CDLL(None).exit(0)


def sigterm(lock: SharedLock) -> None:
    lock.acquire()
    os.kill(os.getpid(), signal.SIGTERM)


def abort(lock: SharedLock) -> None:
    lock.acquire()
    os.abort()


def a_daemon_thread_that_sleeps(lock: SharedLock) -> None:
    hold_in_thread(lock, lambda: time.sleep(600))


def a_daemon_thread_that_runs(lock: SharedLock) -> None:
    def run() -> None:
        while True:
            pass

    hold_in_thread(lock, run)


def a_daemon_thread_in_c(lock: SharedLock) -> None:
    hold_in_thread(lock, lambda: ctypes.CDLL(None).pause())


def a_thread_waited_for_at_the_end(lock: SharedLock) -> None:
    hold_in_thread(lock, lambda: None, daemon=False)


def exec_in_the_main_thread(lock: SharedLock) -> NoReturn:
    lock.acquire()
    os.execv(_SLEEP[0], _SLEEP)


def exec_while_a_thread_holds_it(lock: SharedLock) -> NoReturn:
    hold_in_thread(lock, lambda: time.sleep(600))
    os.execv(_SLEEP[0], _SLEEP)


def exec_in_a_thread_while_the_main_thread_holds_it(lock: SharedLock) -> None:
    lock.acquire()
    threading.Thread(target=os.execv, args=(_SLEEP[0], _SLEEP)).start()


def hold_in_thread(lock: SharedLock, then: Callable[[], object], *, daemon: bool = True) -> None:
    held = threading.Event()

    def run() -> None:
        lock.acquire()
        held.set()
        then()

    threading.Thread(target=run, daemon=daemon).start()
    held.wait()


WAYS = {
    function.__name__: function
    for function in (
        end_in_good_order,
        sys_exit_0,
        sys_exit_3,
        an_exception,
        an_exception_at_exit,
        taken_at_exit,
        os_exit,
        exit_of_the_c_library,
        sigterm,
        abort,
        a_daemon_thread_that_sleeps,
        a_daemon_thread_that_runs,
        a_daemon_thread_in_c,
        a_thread_waited_for_at_the_end,
        exec_in_the_main_thread,
        exec_while_a_thread_holds_it,
        exec_in_a_thread_while_the_main_thread_holds_it,
    )
}


def main(table: LockTable) -> None:
    """Go every way; only a child comes back early, to end as it chose."""
    results: dict[str, str] = {}
    for name, way in WAYS.items():
        lock = SharedLock(table, name, 0, 1, None)  # what is lost in one way is missed in no other
        read, write = os.pipe()
        pid = os.fork()
        if not pid:
            os.close(write)
            os.dup2(read, 0)  # what is executed in its place reads it until we let go
            os.close(read)
            way(lock)
            return
        os.close(read)
        results[name] = _next(lock, pid)
        os.close(write)
        os.waitpid(pid, 0)
    print(json.dumps(results))


def _next(lock: SharedLock, pid: int) -> str:
    deadline = time.monotonic() + 20
    while lock.holder() is None and time.monotonic() < deadline:
        time.sleep(0.001)  # it has not got that far
    try:
        died = lock.acquire(timeout=3.0)
    except LockTimeout as error:
        return str(error)
    lock.release()
    return "told" if died is not None and died.pid == pid else f"not told of {pid}: {died}"


if __name__ == "__main__":
    fd = LockTable.create()
    the_table = LockTable(fd)
    descriptors.close(fd)
    main(the_table)
