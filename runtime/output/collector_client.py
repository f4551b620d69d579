"""Client of the output collector, and the descriptors that workers write to.

- Output is read however often the process is killed: its successor continues where it stopped.
- `emit` and `log` never wait, and may be used on any thread. The others send to the process: not on
  the event loop's thread.
- The driver has a duplicate of every end that is read: output outlives the collector. The
  tail of a worker outlives the worker, and is read without another process.
- In a forked child of the driver there is no collector, and the parent's is not touched.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import json
import os
import select
import socket
import threading
import time
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Final, Literal, Self, cast

from phalanx.runtime.event import LoggedEvent, fields
from phalanx.runtime.linux import descriptors
from phalanx.runtime.observe.console_text import render, render_json
from phalanx.runtime.observe.diagnostics import read_crash_output
from phalanx.runtime.observe.event_stream import address_of, open_stream
from phalanx.runtime.observe.events import StreamUnavailable, WorkerLabels
from phalanx.runtime.observe.log_channel import LEVELS, LogChannel, channel_logger, timestamp
from phalanx.runtime.process.child_main import LaunchSpec
from phalanx.runtime.process.helper import Helper
from phalanx.supervision import RuntimeFault, SpecError

from .logging_console import LoggingConsole, log_record
from .reader import read_records
from .tail_buffer import Tail

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence

    from phalanx.runtime.process.child_process import Process
    from phalanx.runtime.process.launcher import Launcher

_START: Final = 60.0  # seconds for the new interpreter
_CLOSE: Final = 5.0  # seconds without a deadline
_PIPE_BYTES: Final = 1 << 18  # room for a burst while the collector is busy, or being replaced
_LOG_LINES: Final = 50  # of a crash report
_TAIL_BYTES: Final = 65536  # of stdout, stderr and log that are kept of each incarnation, each
_FORMS: Final = ("text", "json", "logging")


def choose_console(
    console: Literal["auto", "text", "json", "logging"] | None, level: str | None
) -> tuple[Literal["text", "json", "logging"] | None, str]:
    """Return form and level of the console for these arguments of `Runtime`.

    Raises:
        SpecError: an argument or a variable is not one of the choices.
    """
    if console == "auto":
        form = _from_environment("PHALANX_CONSOLE", "text", (*_FORMS, "none"))
        console = None if form == "none" else cast("Literal['text', 'json', 'logging']", form)
    elif console is not None and console not in _FORMS:
        raise SpecError("console", console, "give 'auto', 'text', 'json', 'logging' or None")
    if level is None:
        level = _from_environment("PHALANX_LOG_LEVEL", "warning", LEVELS)
    elif level not in LEVELS:
        raise SpecError("level", level, f"give one of {', '.join(LEVELS)}")
    return console, level


def _from_environment(variable: str, default: str, choices: Collection[str]) -> str:
    value = os.environ.get(variable) or default
    if value not in choices:
        raise SpecError(variable, value, f"set it to one of {', '.join(choices)}, or unset it")
    return value


class OutputCollector:
    """The collector of one runtime. Use it as a context manager, or close it.

    Attributes:
        address: Where observers find the stream; None if there is none.
    """

    def __init__(
        self,
        launcher: Launcher,
        *,
        console: Literal["text", "json", "logging"] | None = "text",
        level: str = "info",
        stream: bool = True,
        name: str = "",
        out: int = 1,
        err: int = 2,
        on_status_request: Callable[[], None] | None = None,
    ) -> None:
        """Start the process.

        Args:
            launcher: Starts it.
            console: As of `Runtime`, resolved by `choose_console`.
            level: The same. The stream has the records of all levels.
            stream: Whether observers can attach.
            name: The driver's name for observers.
            out: The driver's descriptor for what workers write to their stdout.
            err: The same for stderr, records and events.
            on_status_request: Called on the event loop's thread when an observer wants a snapshot.

        Raises:
            PhalanxError, OSError: The process could not be started.
        """
        shown = "json" if console == "logging" else console
        self._launcher = launcher
        self._options = json.dumps({"console": shown, "level": level}).encode()
        self._keys = itertools.count(1)
        self._log: Any = None
        self._console, self._level, self._err = console, LEVELS[level], err
        self._lock = threading.Lock()
        self._is_closed = False
        self._outputs: dict[int, WorkerOutput] = {}
        self._drains: dict[int, int] = {}  # eventfd -> key of the output
        self.address: str | None = None
        with contextlib.ExitStack() as made:
            self._events, sender = _log_pair()
            descriptors.own(self._events, made)
            self._channel = descriptors.own(
                LogChannel(sender, where="driver", room_timeout=0.0), made
            )
            if console == "logging":
                logs = LoggingConsole()
                made.callback(logs.close)
                out = err = logs.fd
            self._fds = {
                "events": self._events,
                "out": descriptors.own(_duplicate(out), made),
                "err": descriptors.own(_duplicate(err), made),
            }
            if stream:
                try:  # in the driver: the process may be replaced
                    listener = descriptors.own(open_stream(name), made)
                except OSError as error:
                    self.emit(StreamUnavailable(problem=str(error), at=time.monotonic()))
                else:
                    self.address = address_of(listener.fileno())
                    self._fds["stream"] = listener.fileno()
            ask = on_status_request
            self._helper = Helper(
                launcher.loop,
                "output collector",
                self._spawn,
                on_message=None if ask is None else lambda _data, _fds: ask(),
                replay=self._replay,
                emit=self.emit,
            )
            self._helper.start()
            self._resources = made.pop_all()

    @property
    def is_inherited(self) -> bool:
        """Whether this is a forked child of the driver, where nothing of it can be used."""
        return self._helper.is_inherited

    @property
    def pid(self) -> int | None:
        """The process, or None while there is none."""
        return self._helper.pid

    @property
    def log(self) -> Any:
        """A structlog logger for the driver's own records, apart from the user's configuration."""
        if self._log is None:
            self._log = channel_logger(self._channel, level="debug")
        return self._log

    def emit(self, event: LoggedEvent) -> None:
        """Log and publish *event*. Never waits; if there is no room it is dropped and counted.

        Once the process has ended the driver shows the event itself.
        """
        is_sent = self._channel.emit(event)
        if self._is_closed:
            self._show_left()
            if not is_sent:
                self._show({"timestamp": timestamp(), **fields(event)})

    def open_worker(self, labels: WorkerLabels) -> WorkerOutput:
        """Return new ends for one incarnation to write to; its output is read from now on."""
        if self._helper.closed:
            raise RuntimeFault(f"the output collector is closed; no output for {labels.child}")
        output = WorkerOutput(self, next(self._keys), labels)
        with descriptors.closed_on_error(output):
            self._outputs[output.key] = output
            self._helper.send(*_open_message(output))
        return output

    def send(self, kind: str, key: int, fds: Sequence[int] = (), **more: object) -> None:
        """Send the process a message about the output *key*."""
        if not self.is_inherited:
            self._helper.send(_message(kind, key, **more), fds)

    def remove(self, output: WorkerOutput) -> None:
        """Read *output* to its end, and nothing of it afterwards."""
        with self._helper.lock:  # the caller closes its descriptors next
            known = self._outputs.pop(output.key, None)
        if known is not None:
            self.send("forget", output.key)

    def drain(self, output: WorkerOutput, deadline: float) -> bool:
        """Wait until what was written so far has been read; False at *deadline* (monotonic).

        If the process exits meanwhile, its successor goes on.
        """
        if self._helper.closed:
            return False
        done = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        try:
            self._drains[done] = output.key
            self.send("drain", output.key, [done])
            poll = select.poll()
            poll.register(done, select.POLLIN)
            is_read = bool(poll.poll(max(0.0, deadline - time.monotonic()) * 1000))
            if not is_read and self._helper.is_stopped:  # ranks that write would wait for it
                self._helper.kill("it was stopped while output was to be read, and was killed")
            return is_read
        finally:
            with self._helper.lock:
                del self._drains[done]
            os.close(done)

    def close(self, deadline: float | None = None) -> None:
        """Show what has been written, then end the process; by force at *deadline* (monotonic).

        Outputs that are still open are closed.

        Raises:
            RuntimeFault: the process could not be ended; call it again.
        """
        if self.is_inherited or self._is_closed:
            return
        deadline = time.monotonic() + _CLOSE if deadline is None else deadline
        seconds = max(0.0, min(1.0, (deadline - time.monotonic()) / 2))
        self.send("close", 0, seconds=seconds)
        self._helper.close(deadline, ask=True)
        for output in list(self._outputs.values()):
            output.close()
        self._is_closed = True
        self._channel.close()  # what comes now is shown by its sender
        self._show_left()  # what was sent after the process had read for the last time
        with self._lock:
            self._events = -1
        self._resources.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- the process -------------------------------------------------------------------------

    def _spawn(self, control: socket.socket, on_exit: Callable[[Process], None]) -> Process:
        # By exec, not forked: without a zygote's memory, and while the zygote still imports.
        spec = LaunchSpec(
            entry="phalanx.runtime.output.collector_main:main",
            payload=self._options,
            fds={"control": control.fileno(), **self._fds},
            label="collector",
            title="phalanx: output collector",
            method="exec",
        )
        return self._launcher.launch(spec, on_exit=on_exit, deadline=time.monotonic() + _START)[0]

    def _replay(self) -> Iterator[tuple[bytes, list[int]]]:
        for output in list(self._outputs.values()):
            yield _open_message(output)
        for done, key in list(self._drains.items()):
            yield _message("drain", key), [done]

    # --- events after the end ------------------------------------------------------------------

    def _show_left(self) -> None:
        with self._lock:
            records = [] if self._events < 0 else read_records(self._events)[0]
        for record in records:
            self._show(json.loads(record))

    def _show(self, record: dict[str, Any]) -> None:
        record.pop("at", None)
        record["kind"] = "event"
        if self._console is None or LEVELS.get(record.get("level", "info"), 0) < self._level:
            return
        if self._console == "logging":
            log_record(record)
            return
        data = render(record) if self._console == "text" else render_json(record)
        with contextlib.suppress(OSError):
            os.write(self._err, data)


def _duplicate(fd: int) -> int:
    """Return a duplicate of the driver's *fd*, or /dev/null if that is closed."""
    try:
        return os.dup(fd)
    except OSError:
        return os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)


def _message(kind: str, key: int, **more: object) -> bytes:
    return json.dumps({"do": kind, "key": key, **more}).encode()


def _open_message(output: WorkerOutput) -> tuple[bytes, list[int]]:
    return _message("open", output.key, labels=asdict(output.labels)), list(output.ends)


@dataclass(frozen=True, slots=True, kw_only=True)
class LastOutput:
    """The last output of one incarnation, for its crash report; as in `CrashReport`."""

    stdout: str
    stderr: str
    logs: tuple[str, ...]
    last_words: str


class WorkerOutput:
    """The ends of one incarnation of a worker.

    Attributes:
        stdout: The child's end, for its descriptor 1.
        stderr: The same for 2.
        log: The child's end of the log channel, for `LogChannel`.
        faults: A memfd, for `install_crash_output`.
        ends: The collector's descriptors: the tail, and its ends of stdout, stderr and log.
    """

    def __init__(self, collector: OutputCollector, key: int, labels: WorkerLabels) -> None:
        """Open every end; `OutputCollector.open_worker` has them read."""
        self.labels = labels
        self.key = key
        self._collector = collector
        with contextlib.ExitStack() as made:  # none is left open where one cannot be made
            out_r, self.stdout = _pipe(made)
            err_r, self.stderr = _pipe(made)
            log_r, self.log = (descriptors.own(end, made) for end in _log_pair())
            self.faults = descriptors.own(os.memfd_create("phalanx-crash-output"), made)
            self._tail = descriptors.own(Tail.create(_TAIL_BYTES), made)
            made.pop_all()
        self.ends = (self._tail.fd, out_r, err_r, log_r)
        self._child_ends = [self.stdout, self.stderr, self.log]
        self._closed = False

    def child_fds(self) -> dict[str, int]:
        """Return what a worker is started with beside its stdout and stderr, by name."""
        return {"log": self.log, "faults": self.faults}

    def close_child_ends(self) -> None:
        """Close the writing ends here, once the child has them: else there is no end of file."""
        while self._child_ends:
            descriptors.close(self._child_ends.pop())

    def label(self, labels: WorkerLabels | None = None, *, pid: int | None = None) -> None:
        """Have its lines carry these labels, or this pid, from now on."""
        labels = self.labels if labels is None else labels
        self.labels = labels if pid is None else replace(labels, pid=pid)
        self._collector.send("label", self.key, labels=asdict(self.labels))

    def drain(self, deadline: float) -> bool:
        """Wait until what it has written so far is in the tail; False at *deadline* (monotonic)."""
        return self._collector.drain(self, deadline)

    def tail(self, words_end: int | None = None) -> LastOutput:
        """Return its last output, as far as it has been read. Never waits.

        Its last words end after *words_end* bytes; None for all.
        """
        return LastOutput(
            stdout=self._tail.text("stdout"),
            stderr=self._tail.text("stderr"),
            logs=tuple(self._tail.text("log").splitlines()[-_LOG_LINES:]),
            last_words=read_crash_output(self.faults, end=words_end),
        )

    def close(self) -> None:
        """Have the collector read what is there, and free the tail."""
        if self._closed or self._collector.is_inherited:
            return
        self._closed = True
        self._collector.remove(self)
        self.close_child_ends()
        for entry in (*self.ends[1:], self.faults, self._tail):
            descriptors.close(entry)


def _pipe(made: contextlib.ExitStack) -> tuple[int, int]:
    reader, writer = (descriptors.own(end, made) for end in os.pipe2(os.O_CLOEXEC))
    os.set_blocking(reader, False)  # the writer's end is another open file and stays as it is
    with contextlib.suppress(OSError):  # past the user's limit for pipes; 64 KiB then
        fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
    return reader, writer


def _log_pair() -> tuple[int, int]:
    """Return both ends of a log channel, ours first."""
    reader, writer = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    return reader.detach(), writer.detach()
