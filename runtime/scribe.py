"""The driver's handle on the scribe, the process that drains what workers write.

Guarantees: what workers write is read, however often the scribe is killed: the next one reads on
where it stopped. Nothing here makes the driver wait for a terminal, an observer or a noisy worker;
`emit` and `log` may be used on any thread, the hub's included. The others talk to a process: not
there. A forked child of the driver has no scribe, and cannot end its parent's.

Left to others: the process (`scribe_keeper`; started by what is handed in), and the ends that are
read (`worker_output`).
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import threading
import time
from typing import TYPE_CHECKING, Any, Final, Literal, Self

from phalanx.supervision import SpecError

from . import ledger
from .console import render_event
from .events import LoggedEvent, StreamUnavailable, fields
from .intake import read_records
from .logs import LEVELS, LogChannel, driver_logger, timestamp
from .scribe_keeper import ScribeKeeper
from .stream import address_of, open_stream
from .worker_output import WorkerOutput, log_pair

if TYPE_CHECKING:
    from .labels import WorkerLabels
    from .scribe_keeper import Launch

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
            self._resources.callback(ledger.close, events)
            self._channel = LogChannel(ledger.disown(sender), where="driver", patience=0.0)
            self._resources.callback(ledger.close, ledger.own(self._channel))
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
            mine = ledger.own(os.dup(fd))
        except OSError:
            mine = ledger.own(os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC))
        self._resources.callback(ledger.close, mine)
        return mine

    def _open_stream(self, name: str) -> dict[str, int]:
        """Listen for observers here, not in the process: that may die and come again."""
        try:
            listener = ledger.own(open_stream(name))
        except OSError as error:
            self.emit(StreamUnavailable(problem=str(error), at=time.monotonic()))
            return {}
        self._resources.callback(ledger.close, listener)
        self.address = address_of(listener.fileno())
        return {"stream": listener.fileno()}
