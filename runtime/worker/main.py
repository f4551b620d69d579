"""Entry point of a worker process, from its first line to its exit status.

The driver receives READY, or the exception of the start.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from phalanx.runtime.linux import descriptors
from phalanx.runtime.memory.mapping import WorkerExchange
from phalanx.runtime.observe.diagnostics import install_crash_output
from phalanx.runtime.wire.packet_decoder import Frame, receive, send
from phalanx.runtime.wire.packet_encoder import Payload
from phalanx.runtime.wire.packet_header import Kind
from phalanx.runtime.wire.progress_page import ProgressPage, register_worker
from phalanx.runtime.wire.remote_exception import RemoteFailure
from phalanx.supervision import RuntimeFault

from .call_loop import CallLoop
from .control import Boot, Link
from .replies import ReplyQueue
from .termination import FatalExit, Terminated, Termination, die_of

if TYPE_CHECKING:
    from collections.abc import Mapping

_OOM_SCORE = 300  # thousandths of all memory that a worker counts as larger than it is; arbitrary
_MOST_OOM_SCORE = 1000


def main(payload: bytes, fds: Mapping[str, int]) -> int:
    """Run one worker; return its exit code."""
    if "stdin" in fds:
        os.dup2(fds["stdin"], 0)
        os.close(fds["stdin"])
    control = socket.socket(fileno=fds["control"])
    data = descriptors.own(socket.socket(fileno=fds["data"]))  # no fork of this process answers
    page = ProgressPage(fds["page"])
    boot: Boot = pickle.loads(payload)
    link = Link(control, boot.rank, boot.incarnation, boot.epoch, fds)
    register_worker()
    _yield_memory()
    install_crash_output(fds["faults"])
    termination = Termination()
    try:
        try:
            _limit_threads()
            hosted = boot.host(boot.blob, link)
            _limit_threads()  # a spare has been given the environment of its rank meanwhile
            link.serve(termination)
            hosted.start()
        except Terminated:
            raise
        except BaseException as error:  # noqa: BLE001  # sys.exit in a start is a failed start
            link.tell(Kind.START_FAILED, RemoteFailure.of(error))
            return _start_exit_code(error)
        _greet(data, link)
        exchange = WorkerExchange.inherit(fds)
        fatal_exit = FatalExit(link, hosted)
        replies = ReplyQueue(data, exchange, link, fatal_exit)
        call_loop = CallLoop(
            data,
            link,
            page=page,
            hosted=hosted,
            replies=replies,
            exchange=exchange,
            fatal_exit=fatal_exit,
        )
        return call_loop.run()
    except Terminated as end:
        die_of(end.number)
        return 128 + end.number
    finally:
        if not link.original[0]:
            os._exit(1)  # a forked copy, which would go on as the worker


def _greet(data: socket.socket, link: Link) -> None:
    """Prove both directions of the call socket, then say READY.

    The driver put a greeting into the socket before this process existed; the answer lies there
    before the driver hears READY on the other one, so it need not wait.
    """
    greeting = receive(data)
    if not isinstance(greeting, Frame) or greeting.kind != Kind.HELLO:
        raise RuntimeFault("the call socket did not carry the driver's greeting")
    answer = Payload.of(None).packet(
        Kind.HELLO, epoch=link.epoch, call_id=0, incarnation=link.incarnation
    )
    send(data, answer, None)
    link.tell(Kind.READY)


def _start_exit_code(error: BaseException) -> int:
    if isinstance(error, SystemExit) and isinstance(error.code, int):
        return error.code & 0xFF
    return 1


def _yield_memory() -> None:
    """Have the kernel kill this process before the driver when memory runs out.

    A worker can be restarted, the driver cannot. What a worker starts inherits it.
    """
    path = Path("/proc/self/oom_score_adj")
    with contextlib.suppress(OSError, ValueError):
        path.write_text(str(min(_MOST_OOM_SCORE, int(path.read_text()) + _OOM_SCORE)))


def _limit_threads() -> None:
    """Apply ``OMP_NUM_THREADS``: a preloaded torch read it before this worker's own was set."""
    torch = sys.modules.get("torch")
    wanted = os.environ.get("OMP_NUM_THREADS", "")
    if torch is not None and wanted.isdigit() and int(wanted) > 0:
        torch.set_num_threads(int(wanted))
