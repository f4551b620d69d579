"""Client of the output collector: starts it, replaces it and drains it.

The driver's handle on the scribe, the process that drains what workers write.

Guarantees: what workers write is read, however often the scribe is killed: the next one reads on
where it stopped. Nothing here makes the driver wait for a terminal, an observer or a noisy worker;
`emit` and `log` may be used on any thread, the hub's included. The others talk to a process: not
there. A forked child of the driver has no scribe, and cannot end its parent's.

Left to others: the process (`scribe_keeper`; started by what is handed in), and the ends that are
read (`worker_output`).

The scribe's process as the driver keeps it: started, talked to, replaced, ended.

Guarantees: whatever is added is read by this scribe and by every one that comes after it, until it
is removed; a scribe that dies, or takes no message, is replaced, more slowly the more often that
happens. Nothing but `tell` waits for it, and that for a bounded time. In a forked child of the
driver there is none, and the parent's is not touched.

Left to others: what is read (`worker_output`), and starting a process (handed in).
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import select
import signal
import socket
import threading
import time
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol, Self

from phalanx.runtime.event import LoggedEvent, fields
from phalanx.runtime.linux import descriptors
from phalanx.runtime.linux.descriptors import send_with_fds
from phalanx.runtime.observe.events import ScribeReplaced, ScribeUnavailable, StreamUnavailable
from phalanx.runtime.observe.log_channel import LEVELS, LogChannel, driver_logger, timestamp
from phalanx.runtime.observe.render import render_event
from phalanx.runtime.observe.stream import address_of, open_stream
from phalanx.supervision import RuntimeFault, SpecError

from .reader import read_records
from .worker_output import WorkerOutput, log_pair

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from phalanx.runtime.observe.labels import WorkerLabels


ENTRY: Final = "phalanx.runtime.output.collector_main:main"
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


class Reading(Protocol):
    """What a scribe reads: the ends of one incarnation, and what its lines are labelled with."""

    labels: WorkerLabels

    @property
    def key(self) -> int: ...  # noqa: D102 -- unique in the life of a keeper

    @property
    def ends(self) -> tuple[int, ...]: ...  # noqa: D102 -- the tail, stdout, stderr and the log

    def close(self) -> None: ...  # noqa: D102 -- lets go of them


class ScribeKeeper:
    """One scribe after the other. Thread-safe.

    Args:
        launch: Starts the process.
        payload: What each of them is told at its birth.
        fds: What each of them is given beside its control socket, by name.
        emit: Told of replacements; may be called on any thread.
    """

    def __init__(
        self,
        launch: Launch,
        payload: bytes,
        fds: Mapping[str, int],
        emit: Callable[[LoggedEvent], None],
    ) -> None:
        self._pid = os.getpid()
        self._launch = launch
        self._payload = payload
        self._fds = dict(fds)
        self._emit = emit
        self._changed = threading.Condition()
        self._given_up = False
        self._readings: dict[int, Reading] = {}
        self._link: socket.socket | None = None
        self._process: ScribeProcess | None = None
        self._closed = False
        self._deaths: list[float] = []
        self._starting = threading.Lock()  # one start at a time: a scribe may die within its own
        self._replacer: threading.Thread | None = None

    @property
    def is_inherited(self) -> bool:
        """Whether this is a forked child of the driver, where nothing of it can be used."""
        return self._pid != os.getpid()

    @property
    def pid(self) -> int | None:
        """The process, or None while there is none."""
        process = self._process
        return None if process is None else process.pid

    def start(self) -> None:
        """Start the first; whatever is raised, nothing is left of it."""
        try:
            with self._starting:
                self._start()
        except BaseException:
            self._closed = True
            raise

    def add(self, reading: Reading) -> None:
        """Have it read from now on."""
        with self._changed:
            if self._closed:
                raise RuntimeFault(f"the scribe is closed; no output for {reading.labels.child}")
            self._readings[reading.key] = reading
            self._tell_open(reading)

    def relabel(self, reading: Reading) -> None:
        """Have its lines carry its labels as they are now."""
        with self._changed:
            labels = reading.labels.as_dict()
            self._tell({"do": "label", "key": reading.key, "labels": labels})

    def remove(self, reading: Reading) -> None:
        """Have it read to its end, and no more of it."""
        with self._changed:
            if self._readings.pop(reading.key, None) is not None:
                self._tell({"do": "forget", "key": reading.key})

    def drain(self, reading: Reading, deadline: float) -> bool:
        """Wait until what was written so far has been read; False at *deadline* (monotonic).

        Goes on with the next scribe where this one dies.
        """
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
                    self._tell({"do": "drain", "key": reading.key}, [done])
                with watched:
                    if _wait_drained(done, watched, deadline):
                        return True
                with self._changed:  # it died, or the deadline passed
                    self._wait_replaced(link, deadline)
            return False
        finally:
            os.close(done)

    def close(self, deadline: float | None) -> bool:
        """Have everything shown, then end the scribe; False where that was done before.

        What is still read then is closed, too.

        Args:
            deadline: When it is ended by force, on the monotonic clock; None for some seconds.
        """
        with self._changed:
            if self._closed:
                return False
            self._closed = True
            self._changed.notify_all()
            replacer = self._replacer
        deadline = time.monotonic() + _PATIENCE if deadline is None else deadline
        if replacer is not None:
            replacer.join(max(0.0, deadline - time.monotonic()))  # it may be starting one
            self._given_up = True  # which is not used then
        seconds = max(0.0, min(1.0, (deadline - time.monotonic()) / 2))
        with self._changed:
            self._tell({"do": "close", "seconds": seconds})
            process, self._process = self._process, None
            readings = list(self._readings.values())
        if process is not None:
            if not process.wait(deadline):
                process.send_signal(signal.SIGKILL)
                process.wait(time.monotonic() + _PATIENCE)
            process.close()
        self._drop_link()
        for reading in readings:
            reading.close()
        return True

    def _wait_replaced(self, link: socket.socket, deadline: float) -> None:
        self._changed.wait_for(lambda: self._link is not link, deadline - time.monotonic())

    # --- one process ----------------------------------------------------------------------

    def _start(self) -> None:
        """Start a scribe and tell it of everything there is to read."""
        mine, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        descriptors.own(mine)
        descriptors.own(its)
        fds = {"control": its.fileno(), **self._fds}
        try:
            process = self._launch(
                entry=ENTRY, payload=self._payload, fds=fds, on_exit=self._on_exit
            )
        except BaseException:
            descriptors.close(mine)
            raise
        finally:
            descriptors.close(its)
        with self._changed:
            if self._given_up:
                process.send_signal(signal.SIGKILL)
                descriptors.close(mine)
                return
            self._process, self._link = process, mine
            for reading in self._readings.values():
                self._tell_open(reading)
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
                self._emit(ScribeUnavailable(problem=repr(error), wait=wait, at=time.monotonic()))
                continue
            replaced = ScribeReplaced(
                pid=self.pid or 0, times=len(self._deaths), at=time.monotonic()
            )
            self._emit(replaced)
            return

    def _drop_link(self) -> None:
        with self._changed:
            link, self._link = self._link, None
            self._changed.notify_all()
        if link is not None:
            descriptors.close(link)

    def _tell_open(self, reading: Reading) -> None:
        message = {"do": "open", "key": reading.key, "labels": reading.labels.as_dict()}
        self._tell(message, list(reading.ends))

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
                send_with_fds(link, data, fds or [], flags)
            except BlockingIOError:
                if poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
                    continue
                if self._process is not None:  # it hangs, and workers hang on it
                    self._process.send_signal(signal.SIGKILL)
            except OSError:  # it is dead, and its exit is on the way
                pass
            return


def _wait_drained(done: int, link: socket.socket, deadline: float) -> bool:
    poll = select.poll()
    poll.register(done, select.POLLIN)
    poll.register(link, 0)  # its end only; it never says anything
    ready = dict(poll.poll(max(0.0, deadline - time.monotonic()) * 1000))
    return done in ready


_ALL: Final = 100_000  # records; more than a socket buffer holds


class Scribe:
    """The scribe of one runtime. Use it as a context manager, or close it.

    Attributes:
        address: Where observers find the stream, or None where there is none.
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
        self._tail_bytes = tail_bytes
        self._keys = itertools.count(1)
        self._log: Any = None
        self._console, self._level, self._err = console, LEVELS[level], err
        self._lock = threading.Lock()
        self._is_closed = False
        self._resources = contextlib.ExitStack()
        self.address: str | None = None
        try:
            with contextlib.ExitStack() as made:
                events, sender = log_pair(made)
                made.pop_all()
            self._events = events
            self._resources.callback(descriptors.close, events)
            self._channel = LogChannel(descriptors.disown(sender), where="driver", patience=0.0)
            self._resources.callback(descriptors.close, descriptors.own(self._channel))
            fds = {"events": events, "out": self._duplicate(out), "err": self._duplicate(err)}
            if wish is not None:
                fds["wish"] = wish
            if stream:
                fds |= self._open_stream(name)
            options = {"console": console, "level": level}
            self._keeper = ScribeKeeper(launch, json.dumps(options).encode(), fds, self.emit)
            self._keeper.start()
        except BaseException:
            self._resources.close()
            raise

    @property
    def is_inherited(self) -> bool:
        """Whether this is a forked child of the driver, where nothing of it can be used."""
        return self._keeper.is_inherited

    @property
    def pid(self) -> int | None:
        """The process, or None while there is none."""
        return self._keeper.pid

    @property
    def log(self) -> Any:
        """A structlog logger for the driver's own records, apart from the user's configuration."""
        if self._log is None:
            self._log = driver_logger(self._channel, level="debug")
        return self._log

    def emit(self, event: LoggedEvent) -> None:
        """Log and publish *event*. Never waits; what finds no room is dropped and counted.

        Once the scribe has ended (of a tree that gives up, the last executor is gone by then) the
        event is shown by the driver itself.
        """
        is_sent = self._channel.emit(event)
        if self._is_closed:
            self._show_left()
            if not is_sent:
                self._show({"timestamp": timestamp(), **fields(event)})

    def open_worker(self, labels: WorkerLabels) -> WorkerOutput:
        """Return new ends for one incarnation to write to; its output is read from now on."""
        output = WorkerOutput(self._keeper, next(self._keys), labels, self._tail_bytes)
        try:
            self._keeper.add(output)
        except BaseException:
            output.close()
            raise
        return output

    def close(self, deadline: float | None = None) -> None:
        """Have everything written shown, then end the scribe; by force at *deadline*."""
        if not self.is_inherited and self._keeper.close(deadline):
            self._is_closed = True
            self._show_left()  # what was sent after the process had read for the last time
            with self._lock:
                self._events = -1
                self._resources.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _show_left(self) -> None:
        with self._lock:
            data = [] if self._events < 0 else read_records(self._events, _ALL)[0]
        for record in data:
            self._show(json.loads(record))

    def _show(self, record: dict[str, Any]) -> None:
        record.pop("at", None)
        if self._console is not None and LEVELS.get(record.get("level", "info"), 0) >= self._level:
            with contextlib.suppress(OSError):
                os.write(self._err, render_event(self._console, record))

    # --- what it works with ---------------------------------------------------------------

    def _duplicate(self, fd: int) -> int:
        """Return a duplicate of the driver's *fd*, or a place for nothing where it is closed."""
        try:
            mine = descriptors.own(os.dup(fd))
        except OSError:
            mine = descriptors.own(os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC))
        self._resources.callback(descriptors.close, mine)
        return mine

    def _open_stream(self, name: str) -> dict[str, int]:
        """Listen for observers here, not in the process: that may die and come again."""
        try:
            listener = descriptors.own(open_stream(name))
        except OSError as error:
            self.emit(StreamUnavailable(problem=str(error), at=time.monotonic()))
            return {}
        self._resources.callback(descriptors.close, listener)
        self.address = address_of(listener.fileno())
        return {"stream": listener.fileno()}
