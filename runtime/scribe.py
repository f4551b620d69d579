"""The driver's handle on the scribe, the process that drains what workers write.

Guarantees: a worker's pipes and log channel outlive the scribe, since the driver keeps duplicates
of every end it reads: a scribe that is killed is replaced, and the next one reads on where it
stopped. Nothing here makes the driver wait for a terminal, an observer or a noisy worker; `emit`
and `log` may be used on any thread, the hub's included. The others talk to a process: not there.
A forked child of the driver has no scribe, and cannot end its parent's.

Left to others: starting the process (handed in), and killing it and removing the stream's directory
when the driver dies (the launcher and its guardian).
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import select
import shutil
import signal
import socket
import threading
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol, Self

from phalanx.supervision import RuntimeFault, SpecError

from . import ledger
from .events import LoggedEvent, ScribeReplaced, ScribeUnavailable, StreamUnavailable
from .last_words import create_last_words, read_last_words
from .logs import LEVELS, LogChannel, driver_logger
from .stream import make_stream_directory, new_stream_directory
from .tails import Tail

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from .labels import WorkerLabels

ENTRY: Final = "phalanx.runtime.scribe_main:main"
_PIPE_BYTES: Final = 1 << 18  # room for a burst while the scribe is busy, or being replaced
_PATIENCE: Final = 5.0  # seconds to take a message; a scribe that does not is replaced
_QUIET: Final = 60.0  # seconds after which earlier deaths are forgiven
_LONGEST_WAIT: Final = 30.0  # seconds between attempts to replace it


class ScribeProcess(Protocol):
    """What is needed of the process; the launcher's `Process` is one."""

    @property
    def pid(self) -> int: ...  # noqa: D102 -- the names are those of Process

    def send_signal(self, sig: int, /) -> bool: ...  # noqa: D102 -- as above
    def wait(self, deadline: float, /) -> bool: ...  # noqa: D102 -- as above
    def close(self) -> None: ...  # noqa: D102 -- as above


class Launch(Protocol):
    """Starts ``entry(payload, fds)`` in a process of its own, which dies with the driver.

    Returns once the process exists. Calls *on_exit* once, on any thread, after it has ended.
    """

    def __call__(  # noqa: D102 -- described above
        self,
        *,
        entry: str,
        payload: bytes,
        fds: Mapping[str, int],
        on_exit: Callable[[ScribeProcess], None],
    ) -> ScribeProcess: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class LastOutput:
    """What one incarnation left behind, for its crash report."""

    stdout: str
    stderr: str
    logs: tuple[str, ...]
    last_words: str


class WorkerOutput:
    """Where one incarnation of a worker writes, and how the driver reads its last words.

    Attributes:
        stdout: The child's end, for its descriptor 1.
        stderr: The same for 2.
        log: The child's end of the log channel, for `LogChannel`.
        faults: A memfd, for `install_last_words`.
    """

    def __init__(self, scribe: Scribe, key: int, labels: WorkerLabels, tail_bytes: int) -> None:
        """Called by `Scribe.open_worker`."""
        self.labels = labels
        self.key = key
        self._scribe = scribe
        with contextlib.ExitStack() as made:  # none is left open where one cannot be made
            out_r, self.stdout = _pipe(made)
            err_r, self.stderr = _pipe(made)
            log_r, self.log = _channel(made)
            self.faults = ledger.own(create_last_words())
            made.callback(ledger.close, self.faults)
            self._tail = ledger.own(Tail.create(tail_bytes))
            made.pop_all()
        self.ends = (self._tail.fd, out_r, err_r, log_r)  # what the scribe is given
        self._child_ends = [self.stdout, self.stderr, self.log]
        self._closed = False

    def child_fds(self) -> dict[str, int]:
        """Return what a worker is started with beside its stdout and stderr, by name."""
        return {"log": self.log, "faults": self.faults}

    def close_child_ends(self) -> None:
        """Close the writing ends here, once the child has them: else there is no end of file."""
        while self._child_ends:
            ledger.close(self._child_ends.pop())

    def label(
        self,
        labels: WorkerLabels | None = None,
        *,
        pid: int | None = None,
        epoch: int | None = None,
    ) -> None:
        """Have its lines carry these labels, or this pid and epoch, from now on."""
        labels = self.labels if labels is None else labels
        self.labels = replace(
            labels,
            pid=labels.pid if pid is None else pid,
            epoch=labels.epoch if epoch is None else epoch,
        )
        self._scribe.relabel(self)

    def drain(self, deadline: float) -> bool:
        """Wait until what it has written so far is in the tail; False at *deadline* (monotonic)."""
        return self._scribe.drain(self, deadline)

    def tail(self, log_lines: int = 50) -> LastOutput:
        """Return its last words, as far as they have been read. Asks nobody, and never waits."""
        return LastOutput(
            stdout=self._tail.text("stdout"),
            stderr=self._tail.text("stderr"),
            logs=self._tail.log_lines(log_lines),
            last_words=read_last_words(self.faults),
        )

    def close(self) -> None:
        """Let go of it: the scribe reads what is there, and its tail is gone."""
        if self._closed or self._scribe.is_inherited:
            return
        self._closed = True
        self._scribe.forget(self)
        self.close_child_ends()
        _, *ends = self.ends
        for fd in (*ends, self.faults):
            ledger.close(fd)
        ledger.close(self._tail)


class Scribe:
    """The scribe of one runtime. Use it as a context manager, or close it.

    Attributes:
        directory: Where observers find the stream, or None where there is none.
    """

    def __init__(
        self,
        launch: Launch,
        *,
        console: Literal["text", "json"] | None = "text",
        level: str = "info",
        stream: bool = True,
        tail_bytes: int = 65536,
        name: str = "",
        out: int = 1,
        err: int = 2,
        register_tempdir: Callable[[str], None] | None = None,
        wish: int | None = None,
    ) -> None:
        """Start the scribe.

        Args:
            launch: Starts its process.
            console: How lines and records are shown on *out* and *err*; None shows nothing.
            level: The least level of records that are shown. The stream has all of them.
            stream: Whether observers can attach.
            tail_bytes: How much of stdout, stderr and log is kept of each incarnation, each.
            name: What observers see this driver called.
            out: The driver's descriptor for what workers write to their stdout.
            err: The same for stderr, records and events.
            register_tempdir: Told the stream's directory before it is made, so that it is removed
                if the driver dies without closing.
            wish: The descriptor by which the driver is asked what it looks like (`Glances`).

        Raises:
            SpecError: An argument makes no sense.
            PhalanxError, OSError: The process could not be started.
        """
        if console not in ("text", "json", None):
            raise SpecError("console", console, "give 'text', 'json' or None")
        if level not in LEVELS:
            raise SpecError("level", level, f"give one of {', '.join(LEVELS)}")
        if tail_bytes < 1024:
            raise SpecError("tail_bytes", tail_bytes, "give at least 1024 bytes")
        self._pid = os.getpid()
        self._launch = launch
        self._tail_bytes = tail_bytes
        self._wish = wish
        self._changed = threading.Condition()
        self._outputs: dict[int, WorkerOutput] = {}
        self._next_key = 1
        self._link: socket.socket | None = None
        self._process: ScribeProcess | None = None
        self._closed = False
        self._deaths: list[float] = []
        self._starting = threading.Lock()  # one start at a time: a scribe may die within its own
        self._replacer: threading.Thread | None = None
        self._resources = contextlib.ExitStack()
        self.directory: str | None = None
        with contextlib.ExitStack() as made:
            self._events, sender = _channel(made)
            made.pop_all()
        self._resources.callback(ledger.close, self._events)
        self._channel = LogChannel(ledger.disown(sender), where="driver", patience=0.0)
        self._resources.callback(ledger.close, ledger.own(self._channel))
        self._log: Any = None
        try:
            self._out, self._err = self._duplicate(out), self._duplicate(err)
            if stream:
                self._make_directory(name, register_tempdir)
            self._options = json.dumps(
                {"console": console, "level": level, "directory": self.directory}
            ).encode()
            with self._starting:
                self._start()
        except BaseException:
            self._closed = True
            self._resources.close()
            raise

    @property
    def is_inherited(self) -> bool:
        """Whether this is a forked child of the driver, where nothing of it can be used."""
        return self._pid != os.getpid()

    @property
    def pid(self) -> int | None:
        """The process, or None while there is none."""
        process = self._process
        return None if process is None else process.pid

    @property
    def log(self) -> Any:
        """A structlog logger for the driver's own records, apart from the user's configuration."""
        if self._log is None:
            self._log = driver_logger(self._channel, level="debug")
        return self._log

    def emit(self, event: LoggedEvent) -> None:
        """Log and publish *event*. Never waits; what finds no room is dropped and counted."""
        self._channel.emit(event)

    def open_worker(self, labels: WorkerLabels) -> WorkerOutput:
        """Return new ends for one incarnation to write to; its output is read from now on."""
        with self._changed:
            if self._closed:
                raise RuntimeFault(f"the scribe is closed; no output for {labels.child}")
            output = WorkerOutput(self, self._next_key, labels, self._tail_bytes)
            self._outputs[output.key] = output
            self._next_key += 1
            self._tell_open(output)
        return output

    def relabel(self, output: WorkerOutput) -> None:
        """Called by `WorkerOutput.label`."""
        with self._changed:
            self._tell({"do": "label", "key": output.key, "labels": output.labels.as_dict()})

    def forget(self, output: WorkerOutput) -> None:
        """Called by `WorkerOutput.close`."""
        with self._changed:
            if self._outputs.pop(output.key, None) is not None:
                self._tell({"do": "forget", "key": output.key})

    def drain(self, output: WorkerOutput, deadline: float) -> bool:
        """Called by `WorkerOutput.drain`. Goes on with the next scribe where this one dies."""
        done = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        try:
            while time.monotonic() < deadline:
                with self._changed:
                    self._changed.wait_for(
                        lambda: self._link is not None or self._closed,
                        deadline - time.monotonic(),
                    )
                    if self._link is None:
                        return False
                    link = self._link
                    watched = link.dup()  # the replacer may close the other under our poll
                    self._tell({"do": "drain", "key": output.key}, [done])
                with watched:
                    if _wait_drained(done, watched, deadline):
                        return True
                with self._changed:  # it died, or the deadline passed
                    self._wait_replaced(link, deadline)
            return False
        finally:
            os.close(done)

    def close(self, deadline: float | None = None) -> None:
        """Have everything written shown, then end the scribe; by force at *deadline*."""
        if self.is_inherited:
            return
        with self._changed:
            if self._closed:
                return
            self._closed = True
            self._changed.notify_all()
            replacer = self._replacer
        deadline = time.monotonic() + _PATIENCE if deadline is None else deadline
        if replacer is not None:
            replacer.join()  # at most one attempt to start a process, which has a deadline
        seconds = max(0.0, min(1.0, (deadline - time.monotonic()) / 2))
        with self._changed:
            self._tell({"do": "close", "seconds": seconds})
            process, self._process = self._process, None
            outputs = list(self._outputs.values())
        if process is not None:
            if not process.wait(deadline):
                process.send_signal(signal.SIGKILL)
                process.wait(time.monotonic() + _PATIENCE)
            process.close()
        self._drop_link()
        for output in outputs:
            output.close()
        self._resources.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _wait_replaced(self, link: socket.socket, deadline: float) -> None:
        self._changed.wait_for(lambda: self._link is not link, deadline - time.monotonic())

    # --- its process ----------------------------------------------------------------------

    def _start(self) -> None:
        """Start a scribe and tell it of everything there is to read."""
        mine, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ledger.own(mine)
        ledger.own(its)
        fds = {"control": its.fileno(), "events": self._events, "out": self._out, "err": self._err}
        if self._wish is not None:
            fds["wish"] = self._wish
        try:
            process = self._launch(
                entry=ENTRY, payload=self._options, fds=fds, on_exit=self._on_exit
            )
        except BaseException:
            ledger.close(mine)
            raise
        finally:
            ledger.close(its)
        with self._changed:
            self._process, self._link = process, mine
            for output in self._outputs.values():
                self._tell_open(output)
            self._changed.notify_all()

    def _on_exit(self, process: ScribeProcess) -> None:
        """Have it replaced, on a thread of its own: a start waits, and this may be the hub's."""
        if self._closed or self.is_inherited:
            return
        thread = threading.Thread(
            target=self._replace, args=(process,), name="phalanx-scribe-replacer", daemon=True
        )
        self._replacer = thread
        thread.start()

    def _replace(self, dead: ScribeProcess) -> None:
        with self._starting:
            self._replace_alone(dead)

    def _replace_alone(self, dead: ScribeProcess) -> None:
        self._drop_link()
        with contextlib.suppress(OSError):
            dead.close()
        now = time.monotonic()
        self._deaths = [*(at for at in self._deaths if now - at < _QUIET), now]
        wait = 0.0 if len(self._deaths) < 3 else min(_LONGEST_WAIT, 0.1 * 2 ** len(self._deaths))
        while True:
            with self._changed:
                if self._changed.wait_for(lambda: self._closed, wait):
                    return
            try:
                self._start()
            except Exception as error:  # noqa: BLE001 -- workers stand still without a scribe
                wait = min(_LONGEST_WAIT, max(0.1, wait * 2))
                self.emit(ScribeUnavailable(problem=repr(error), wait=wait, at=time.monotonic()))
                continue
            replaced = ScribeReplaced(
                pid=self.pid or 0, times=len(self._deaths), at=time.monotonic()
            )
            self.emit(replaced)
            return

    def _drop_link(self) -> None:
        with self._changed:
            link, self._link = self._link, None
            self._changed.notify_all()
        if link is not None:
            ledger.close(link)

    def _tell_open(self, output: WorkerOutput) -> None:
        message = {"do": "open", "key": output.key, "labels": output.labels.as_dict()}
        self._tell(message, list(output.ends))

    def _tell(self, message: dict[str, Any], fds: list[int] | None = None) -> None:
        """Send *message*; with the lock held. One that finds no scribe is not needed.

        The scribe that comes next is told of every worker there is by then.
        """
        link = self._link
        if link is None or self.is_inherited:
            return
        data = json.dumps(message).encode()
        deadline = time.monotonic() + _PATIENCE
        poll = select.poll()
        poll.register(link, select.POLLOUT)
        flags = socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL
        while True:
            try:
                socket.send_fds(link, [data], fds or [], flags)
            except BlockingIOError:
                if poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
                    continue
                if self._process is not None:  # it hangs, and workers hang on it
                    self._process.send_signal(signal.SIGKILL)
            except OSError:  # it is dead, and its exit is on the way
                pass
            return

    # --- what it works with ---------------------------------------------------------------

    def _duplicate(self, fd: int) -> int:
        """Return a duplicate of the driver's *fd*, or a place for nothing where it is closed."""
        try:
            mine = ledger.own(os.dup(fd))
        except OSError:
            mine = ledger.own(os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC))
        self._resources.callback(ledger.close, mine)
        return mine

    def _make_directory(self, name: str, register: Callable[[str], None] | None) -> None:
        path = new_stream_directory()
        problem = "no writable directory has a path short enough for a socket"
        if path is not None:
            try:
                if register is not None:
                    register(str(path))
                make_stream_directory(path, name)
            except OSError as error:
                problem = str(error)
            else:
                self.directory = str(path)
                self._resources.callback(_remove, path)
                return
        self.emit(StreamUnavailable(problem=problem, at=time.monotonic()))


def _wait_drained(done: int, link: socket.socket, deadline: float) -> bool:
    poll = select.poll()
    poll.register(done, select.POLLIN)
    poll.register(link, 0)  # its end only; it never says anything
    ready = dict(poll.poll(max(0.0, deadline - time.monotonic()) * 1000))
    return done in ready


def _pipe(made: contextlib.ExitStack) -> tuple[int, int]:
    reader, writer = os.pipe2(os.O_CLOEXEC)
    for end in (reader, writer):
        made.callback(ledger.close, ledger.own(end))
    os.set_blocking(reader, False)  # the writer's end is another open file and stays as it is
    with contextlib.suppress(OSError):  # past the user's limit for pipes; 64 KiB then
        fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
    return reader, writer


def _channel(made: contextlib.ExitStack) -> tuple[int, int]:
    reader, writer = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ends = reader.detach(), writer.detach()
    for end in ends:
        made.callback(ledger.close, ledger.own(end))
    return ends


def _remove(path: Path) -> None:
    shutil.rmtree(path, ignore_errors=True)
