"""Crash reports on their way into a folder.

Guarantees: each report is written once, in the order of the deaths, by a thread of its own: nobody
waits for the disk. One that cannot be written, because the disk is full or not there, is told of
once, and is kept and written with the next one that can be, or at the end; no more than the latest
few hundred are kept so.

Left to others: the files (`runtime.report_folder`), what is in a report.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from phalanx.runtime import ReportNotWritten

from .callbacks import Callbacks

if TYPE_CHECKING:
    from collections.abc import Callable

    from phalanx.runtime import CrashReport, ReportFolder

_KEPT = 256  # reports that wait for room on a disk
_PATIENCE = 5.0  # seconds for the disk at the end


class Filing:
    """Writes the reports of one group.

    Args:
        folder: Where to; None for nowhere.
        publish: Told of each report that was written, and of each that could not be.
        complain: Told of what else went wrong.
    """

    def __init__(
        self,
        folder: ReportFolder | None,
        publish: Callable[[Any], None],
        complain: Callable[[BaseException], None],
    ) -> None:
        self._folder = folder
        self._publish = publish
        self._thread = Callbacks(complain)
        self._unwritten: list[CrashReport] = []  # the thread's own

    def file(self, report: CrashReport) -> None:
        """Have *report* written soon."""
        if self._folder is not None:
            self._thread.run(self._write, report)

    def close(self) -> None:
        """Write what is left, as far as there is room; waits for a few seconds at most."""
        if self._folder is not None:
            self._thread.run(self._catch_up)
        self._thread.close(_PATIENCE)

    def _write(self, report: CrashReport) -> None:
        assert self._folder is not None
        self._catch_up()
        told = self._folder.write(report)
        if isinstance(told, ReportNotWritten):
            self._unwritten = [*self._unwritten[1 - _KEPT :], report]
        self._publish(told)

    def _catch_up(self) -> None:
        """Write the reports for which there was no room, while there is."""
        assert self._folder is not None
        while self._unwritten:
            told = self._folder.write(self._unwritten[0])
            if isinstance(told, ReportNotWritten):
                return  # that was said when it was tried first
            del self._unwritten[0]
            self._publish(told)
