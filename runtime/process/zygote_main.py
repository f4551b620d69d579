"""The zygote process: imports the preloaded modules, and forks workers.

- Each worker is a child of the driver, so that exit status and parent-death signal go there: the
  process between the two ends at once, and the driver is a subreaper meanwhile. (The
  workers of ``multiprocessing``'s forkserver are the server's children: no parent-death signal
  reaches them.)
- A worker's pidfd is opened before it can be collected.
- Nothing is forked while there is a second thread or a device open here.
- It exits when the driver exits or closes its socket, also while it imports; once it has imported,
  it kills the whole tree if the driver dies.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib
import json
import os
import select
import signal
import socket
import struct
import sys
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from phalanx.runtime.linux import descriptor_limit, process_title, process_tree, procfs
from phalanx.runtime.linux.descriptors import receive_with_fds, send_with_fds

from . import interpreter_exit
from .child_main import LOST, ChildStart, await_go, live

if TYPE_CHECKING:
    from collections.abc import Sequence

REQUEST = struct.Struct("=Q")
ZYGOTE = b"0.zygote;"  # after the tag of the tree, in the environment of every zygote
DESCRIPTORS = 250  # the kernel passes 253 in one message
_BATCH = 32  # workers forked from one process between
_GRACE = 30.0


class _Order(NamedTuple):
    """One worker to fork: file of its start, pipe that says go, output, and its descriptors."""

    number: int
    fds: list[int]


# What every worker runs. `import phalanx` alone imports no layer, and what is imported here is not
# imported again at each restart.
_ALWAYS = (
    "phalanx.actors",
    "phalanx.actors.worker_side.user_object",
    "phalanx.runtime.worker.call_loop",
    "structlog",
)


def main() -> None:
    """Run; the arguments are the socket, the driver's pidfd, the tree's tag, the preload."""
    control, driver = int(sys.argv[1]), int(sys.argv[2])
    tag, preload = sys.argv[3].encode(), json.loads(sys.argv[4])
    del sys.argv[1:]
    sock = socket.socket(fileno=control)
    for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT"):
        signal.signal(getattr(signal, name), signal.SIG_IGN)  # the driver handles Ctrl-C
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    _die_with(sock, driver)
    descriptor_limit.raise_limit()  # requests come with some fifteen each, many at a time
    process_title.show_title("phalanx: zygote")
    _import(sock, [*_ALWAYS, *preload])
    start, (go, stdout, stderr, *own) = _serve(sock, driver, tag)
    # Here in the worker itself, with the zygote's frames gone.
    for fd, standard in ((stdout, 1), (stderr, 2)):
        os.dup2(fd, standard)
        os.close(fd)
    # Armed before the process between has ended, the parent-death signal would be its death's.
    await_go(go)
    # Not before: a driver that has missed the message of our fork knows us by the zygote's session.
    os.setsid()
    # As in a fresh process. Python's `random` does this by itself.
    if numpy_random := sys.modules.get("numpy.random"):
        numpy_random.seed()
    numbers = getattr(sys.modules.get("torch"), "default_generator", None)
    if numbers is not None:
        numbers.seed()
    interpreter_exit.leave(live(start, own) or 0)


def _die_with(sock: socket.socket, driver: int) -> None:
    """Have the kernel kill this process when the driver's end of *sock* closes.

    An import may take minutes or hang in native code, so nothing of Python's can watch meanwhile.
    A parent-death signal would do the same at the end of the thread that started this process,
    which may end long before the driver. Whatever else the driver sends would kill as well: it
    sends nothing before it has heard that the import is done.
    """
    fcntl.fcntl(sock, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(sock, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(sock, fcntl.F_SETFL, fcntl.fcntl(sock, fcntl.F_GETFL) | os.O_ASYNC)
    poller = select.poll()
    poller.register(sock, select.POLLIN)
    poller.register(driver, select.POLLIN)
    if poller.poll(0):  # it was closed before, and no signal comes
        os._exit(LOST)


def _import(sock: socket.socket, preload: Sequence[str]) -> None:
    for name in preload:
        try:
            importlib.import_module(name)
        except BaseException:  # noqa: BLE001  # a module may even exit; the driver shall know
            text = traceback.format_exc()[-10_000:]  # as JSON up to twelve bytes each
            _tell(sock, {"kind": "import_failed", "module": name, "traceback": text})
            sys.exit(1)
    # Some libraries (OpenBLAS) start threads and end them in their own fork handlers.
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    interpreter_exit.freeze()
    fcntl.fcntl(sock, fcntl.F_SETFL, fcntl.fcntl(sock, fcntl.F_GETFL) & ~os.O_ASYNC)
    _tell(sock, {"kind": "ready", "unfit": _unfit()})


def _serve(sock: socket.socket, driver: int, tag: bytes) -> tuple[ChildStart, list[int]]:
    """Fork workers until the driver closes; return only in a worker, with its descriptors."""
    # Without the listing's own: its number is closed by now, and soon a worker's.
    listed = procfs.numbers_in("/proc/self/fd")
    inherited = {fd for fd in listed if Path(f"/proc/self/fd/{fd}").is_symlink()} | {0, 1, 2}
    inherited -= {sock.fileno(), driver}
    poller = select.poll()
    poller.register(sock, select.POLLIN)
    poller.register(driver, select.POLLIN)
    while True:
        ready = [fd for fd, _ in poller.poll()]
        orders = [] if driver in ready else _receive(sock)
        if not orders:
            # The driver's sockets close a moment before its pidfd is readable, and a clean
            # close kills this process without a message. So this is not a clean close either way.
            _end_tree(tag)
            sys.exit(0)
        unfit = _unfit()
        if unfit:
            _tell(sock, {"kind": "unfit", "unfit": unfit})
        else:
            newborn = _fork_all(sock, orders)
            if newborn is not None:
                sock.close()
                for fd in {*procfs.numbers_in("/proc/self/fd")} - {*inherited, *newborn.fds}:
                    with contextlib.suppress(OSError):  # the listing's own is closed already
                        os.close(fd)
                file, *fds = newborn.fds
                return ChildStart.from_file(file), fds
        for order in orders:
            for fd in order.fds:
                os.close(fd)


def _end_tree(tag: bytes) -> None:
    # The driver's other zygotes do the same now, unless they are stopped: two that stop each other
    # would never continue.
    zygotes, _ = process_tree.find(process_tree.TreeTarget(tag + ZYGOTE))
    mine = os.getsid(0)
    others = [p for p, task in zygotes.items() if task.session != mine and task.state != "T"]
    process_tree.kill(process_tree.TreeTarget(tag, spare=others), time.monotonic() + _GRACE)


def _receive(sock: socket.socket) -> list[_Order]:
    """Return the pending orders; none if the driver has closed its end."""
    orders: list[_Order] = []
    flags = 0
    while len(orders) < _BATCH:
        try:
            data, fds = receive_with_fds(sock, REQUEST.size, DESCRIPTORS, flags)
        except BlockingIOError:
            break
        if not data:
            return []
        orders.append(_Order(REQUEST.unpack(data)[0], fds))
        flags = socket.MSG_DONTWAIT
    return orders


def _fork_all(sock: socket.socket, orders: list[_Order]) -> _Order | None:
    """Fork one worker for each order; return its order in a worker, None in the zygote."""
    numbers = [order.number for order in orders]
    try:
        between = os.fork()
    except OSError as error:
        _tell(sock, {"kind": "refused", "ids": numbers, "problem": f"fork: {error.strerror}"})
        return None
    if between == 0:
        return _fork_each(sock, orders)
    os.waitpid(between, 0)
    # Their parent is the driver from here on.
    _tell(sock, {"kind": "reparented", "ids": numbers})
    return None


def _fork_each(sock: socket.socket, orders: list[_Order]) -> _Order:
    """In the process between: fork, tell, and end without a trace; return only in a worker."""
    try:
        for order in orders:
            try:
                pid = os.fork()
            except OSError as error:
                problem = f"fork: {error.strerror}"
                _tell(sock, {"kind": "refused", "ids": [order.number], "problem": problem})
                continue
            if pid == 0:
                return order
            # The pid is still its own: this process is its parent and does not wait.
            pidfd = os.pidfd_open(pid)
            _tell(sock, {"kind": "forked", "ids": [order.number], "pid": pid}, [pidfd])
            os.close(pidfd)
    except OSError:
        os._exit(1)  # the driver is gone
    os._exit(0)


def _unfit() -> str:
    """Return why nothing may be forked from this process; empty where it may."""
    threads = len(procfs.numbers_in("/proc/self/task"))
    if threads > 1:
        return f"the preload left {threads - 1} thread(s) running"
    for fd in procfs.numbers_in("/proc/self/fd"):
        try:
            target = str(Path(f"/proc/self/fd/{fd}").readlink())
        except OSError:  # the listing's own
            continue
        if target.startswith("/dev/nvidia"):
            return f"the preload opened {target}"
    cuda = sys.modules.get("torch.cuda")
    if cuda is not None and cuda.is_initialized():
        return "the preload initialised CUDA"
    return ""


def _tell(sock: socket.socket, message: dict[str, object], fds: Sequence[int] = ()) -> None:
    with contextlib.suppress(OSError):  # the driver is gone, and `_serve` is about to see it
        send_with_fds(sock, json.dumps(message).encode(), fds)
