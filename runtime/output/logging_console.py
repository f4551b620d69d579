"""Console ``"logging"``: workers' output and events as records of the standard library's `logging`.

- Records arrive in the driver in the order in which the output collector reads them, in a thread
  that runs only the handlers: a handler that blocks delays no worker and no call.
  Records that it leaves unread are dropped and counted by the collector, as for a terminal.
- Loggers: ``phalanx`` for events, ``phalanx.worker`` for records that workers log,
  ``phalanx.worker.stdout`` and ``phalanx.worker.stderr`` for lines that they write (level info).
  Each record has the fields of the JSON console as its attribute ``phalanx``.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import threading
from functools import partial
from typing import Any

from phalanx.runtime.linux import descriptors
from phalanx.runtime.observe.console_text import describe
from phalanx.runtime.observe.log_channel import LEVELS

_LAST = 5.0  # seconds for the handlers, once everything is written
_NAMES = {"event": "phalanx", "log": "phalanx.worker"}


class LoggingConsole:
    """A pipe for the collector's JSON lines, and the thread that logs what comes through it.

    Attributes:
        fd: The end to be written to.
    """

    def __init__(self) -> None:
        reader, writer = os.pipe2(os.O_CLOEXEC)
        self.fd = descriptors.own(writer)
        log = partial(_log_lines, reader)
        self._thread = threading.Thread(target=log, name="phalanx-logging", daemon=True)
        try:
            self._thread.start()
        except RuntimeError:  # after a KeyboardInterrupt the thread may run
            os.close(reader)
            descriptors.close(self.fd)
            raise

    def close(self) -> None:
        """Log what was written; the collector's ends must be closed by now."""
        descriptors.close(self.fd)
        if self._thread is not threading.current_thread():  # else a handler closes the runtime
            self._thread.join(_LAST)


def log_record(record: dict[str, Any]) -> None:
    """Log one record of the JSON console."""
    kind = str(record.get("kind"))
    logger = logging.getLogger(_NAMES.get(kind, f"phalanx.worker.{kind}"))
    level = LEVELS.get(str(record.get("level", "info")), logging.INFO)
    with contextlib.suppress(Exception):  # what a filter of the program raises ends no output
        if logger.isEnabledFor(level):
            logger.log(level, "\n".join(describe(record)), extra={"phalanx": record})


def _log_lines(fd: int) -> None:
    with os.fdopen(fd, "rb") as lines:
        for line in lines:
            with contextlib.suppress(ValueError):  # a collector that was killed within a line
                log_record(json.loads(line))
