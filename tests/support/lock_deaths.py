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
from collections.abc import Callable
from functools import partial
from typing import Any

from phalanx.runtime import SharedLock, create_lock_file
from phalanx.supervision import LockTimeout

_SLEEP = [sys.executable, "-S", "-c", "import sys; sys.stdin.read()"]
_execute = partial(os.execv, _SLEEP[0], _SLEEP)
_libc = ctypes.CDLL(None)


def hold_and(then: Callable[[], Any]) -> Callable[[SharedLock], Any]:
    def way(lock: SharedLock) -> None:
        lock.acquire()
        then()

    return way


def hold_in_thread_and(
    then: Callable[[], Any], *, daemon: bool = True, end: Callable[[], Any] = lambda: None
) -> Callable[[SharedLock], Any]:
    def way(lock: SharedLock) -> None:
        held = threading.Event()

        def run() -> None:
            lock.acquire()
            held.set()
            then()

        threading.Thread(target=run, daemon=daemon).start()
        held.wait()
        end()

    return way


def fail() -> None:
    sys.stderr = open(os.devnull, "w")  # noqa: SIM115  # the traceback is expected
    raise ValueError("expected")


def run_forever() -> None:
    while True:
        pass


WAYS: dict[str, Callable[[SharedLock], Any]] = {
    "end in good order": hold_and(lambda: None),
    "sys.exit(0)": hold_and(partial(sys.exit, 0)),
    "sys.exit(3)": hold_and(partial(sys.exit, 3)),
    "an exception": hold_and(fail),
    "an exception at exit": hold_and(partial(atexit.register, fail)),
    "taken at exit": lambda lock: atexit.register(lock.acquire),
    "os._exit": hold_and(partial(os._exit, 0)),
    "exit of the C library": hold_and(partial(_libc.exit, 0)),
    "SIGTERM": hold_and(lambda: os.kill(os.getpid(), signal.SIGTERM)),
    "abort": hold_and(os.abort),
    "a daemon thread that sleeps": hold_in_thread_and(partial(time.sleep, 600)),
    "a daemon thread that runs": hold_in_thread_and(run_forever),
    "a daemon thread in C": hold_in_thread_and(_libc.pause),
    "a thread that the end waits for": hold_in_thread_and(lambda: None, daemon=False),
    "exec": hold_and(_execute),
    "exec while a thread holds it": hold_in_thread_and(partial(time.sleep, 600), end=_execute),
    "exec in the thread that holds it": hold_in_thread_and(_execute, end=partial(time.sleep, 600)),
    "exec in another thread": hold_and(threading.Thread(target=_execute).start),
}


def main() -> None:
    """Go every way; only a child comes back early, to end as it chose."""
    results: dict[str, str] = {}
    file = create_lock_file()
    for name, way in WAYS.items():
        lock = SharedLock(file, name, 0, 1, None)  # what is lost in one way is missed in no other
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
    main()
