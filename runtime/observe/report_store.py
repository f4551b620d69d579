"""The folder that crash reports are kept in, as files.

Guarantees: a file is there whole or not at all, for its owner alone, and is named so that names
sort by time, also where the wall clock is set back meanwhile; at most *keep* reports are left, the
newest; nothing that is no report of ours is ever removed. Whoever writes is busy with a death
already: a disk that is full or not writable is told in an event and never raised. Reading passes
over what is torn, foreign or unreadable, and says so.

Left to others: what a report says (`report`), and when one is written.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import os
import re
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, cast

from phalanx.supervision import SpecError

from .crash_report import CrashReport
from .events import ReportNotWritten, ReportWritten

if TYPE_CHECKING:
    from collections.abc import Iterator

VARIABLE: Final = "PHALANX_REPORT_DIR"
_OURS: Final = re.compile(r"\d{4}-\d\d-\d\dT[\w.-]+\.json")
_TORN: Final = ".phalanx-report-"  # while it is being written
_ABANDONED: Final = 3600.0  # seconds after which nobody is writing it any more
_LONGEST: Final = 64 << 20  # bytes; ours have less than one MiB
_NAME: Final = 80  # characters of a group's name in that of a file
_STAMP: Final = "%Y-%m-%dT%H_%M_%S.%f"  # what a name begins with
_DIGITS: Final = 26  # characters of that


@dataclass(frozen=True, slots=True)
class ReportFile:
    """A file in a folder of reports.

    Attributes:
        report: What is in it; None where it is no report.
        problem: Why it is none.
    """

    path: Path
    report: CrashReport | None
    problem: str = ""


@dataclass(frozen=True, slots=True)
class ReportFolder:
    """Where reports are kept.

    Attributes:
        path: The folder; made where it is missing, for its owner alone.
        keep: How many reports are left when one is written; the oldest are removed.
    """

    path: Path
    keep: int = 1000

    def __post_init__(self) -> None:
        keep = cast("object", self.keep)
        if isinstance(keep, bool) or not isinstance(keep, int) or keep < 1:
            raise SpecError("keep", keep, "give how many reports are kept, at least 1")
        try:
            object.__setattr__(self, "path", Path(self.path).expanduser().absolute())
        except (TypeError, RuntimeError) as error:
            raise SpecError("path", self.path, f"give a folder: {error}") from None

    @classmethod
    def at(cls, path: str | os.PathLike[str]) -> ReportFolder:
        """Return the folder at *path* as it is, to be read.

        Raises:
            SpecError: there is no folder.
        """
        folder = cls(Path(path))
        if not folder.path.is_dir():
            raise SpecError("directory", str(folder.path), "is no folder")
        return folder

    @classmethod
    def of(cls, field: str, given: object) -> ReportFolder:
        """Return the folder that was *given* as *field*, made and writable.

        Raises:
            SpecError: it is none, or nothing can be written there.
        """
        if isinstance(given, ReportFolder):
            folder = given
        elif isinstance(given, str | Path) and given != "":
            folder = cls(Path(given))
        else:
            raise SpecError(field, given, "give a folder, or a ReportFolder")
        folder._check_writable(field)
        return folder

    @classmethod
    def from_environment(cls) -> ReportFolder | None:
        """Return the folder that ``PHALANX_REPORT_DIR`` names, or None; as `of`."""
        named = os.environ.get(VARIABLE, "")
        return cls.of(VARIABLE, named) if named else None

    def write(self, report: CrashReport) -> ReportWritten | ReportNotWritten:
        """Put *report* into a file of its own, whole or not at all; never raises for the disk."""
        try:
            path = self._write(report)
        except OSError as error:
            return ReportNotWritten(
                directory=os.fspath(self.path), problem=str(error), at=time.monotonic()
            )
        with contextlib.suppress(OSError):  # it may be on the disk of another machine by now
            self._prune()
        return ReportWritten(path=str(path), at=time.monotonic())

    def read(self) -> Iterator[ReportFile]:
        """Yield what is there, the newest first.

        Raises:
            SpecError: the folder cannot be read.
        """
        try:
            names = sorted((e.name for e in os.scandir(self.path)), reverse=True)
        except OSError as error:
            raise SpecError("directory", str(self.path), f"cannot be read: {error}") from None
        for name in names:
            if name.endswith(".json") and not name.startswith("."):
                yield read_report(self.path / name)

    def _write(self, report: CrashReport) -> Path:
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(prefix=_TORN, dir=self.path)  # 0600 by nature
        try:
            with os.fdopen(descriptor, "w", encoding="ascii") as file:
                file.write(report.to_json())
                file.flush()
                os.fsync(file.fileno())  # a full disk speaks up here at the latest
            path = self.path / self._name_of(report)
            Path(temporary).replace(path)
        except BaseException:
            with contextlib.suppress(OSError):
                Path(temporary).unlink()
            raise
        return path

    def _name_of(self, report: CrashReport) -> str:
        at = report.at
        newest = max((e.name for e in os.scandir(self.path) if _OURS.fullmatch(e.name)), default="")
        if newest > _plain(dt.datetime.now(dt.UTC).isoformat()):
            # The clock was set back. Named by it, this one would be taken for the oldest.
            with contextlib.suppress(ValueError):
                last = dt.datetime.strptime(newest[:_DIGITS], _STAMP).replace(tzinfo=dt.UTC)
                at = (last + dt.timedelta(microseconds=1)).isoformat(timespec="microseconds")
        who = f"{report.group[:_NAME]}-{report.rank}-{report.incarnation}-{report.pid}"
        return f"{_plain(at)}-{_plain(who)}.json"

    def _prune(self) -> None:
        """Remove the oldest reports past the limit, and what a killed writer left half done."""
        entries = list(os.scandir(self.path))
        names = sorted((e.name for e in entries if _OURS.fullmatch(e.name)), reverse=True)
        for name in names[self.keep :]:
            with contextlib.suppress(FileNotFoundError):  # another driver was quicker
                (self.path / name).unlink()
        for entry in entries:
            if entry.name.startswith(_TORN):
                with contextlib.suppress(FileNotFoundError):
                    if time.time() - entry.stat().st_mtime > _ABANDONED:
                        Path(entry.path).unlink()

    def _check_writable(self, field: str) -> None:
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            with tempfile.TemporaryFile(prefix=_TORN, dir=self.path):
                pass
        except OSError as error:
            raise SpecError(field, str(self.path), f"cannot be written to: {error}") from None


def read_report(path: Path) -> ReportFile:
    """Return what *path* is: a report, or why it is none."""
    try:
        if not path.is_file():
            return ReportFile(path, None, "is no file" if path.exists() else "is not there")
        size = path.stat().st_size
        if size > _LONGEST:
            return ReportFile(path, None, f"has {size} bytes, too many for a crash report")
        return ReportFile(path, CrashReport.from_json(path.read_text("utf-8")))
    except OSError as error:
        return ReportFile(path, None, f"cannot be read: {error}")
    except ValueError as error:
        return ReportFile(path, None, str(error))


def _plain(text: str) -> str:
    """Return *text* as a part of a file's name on any disk: nothing in it means anything there."""
    return "".join(c if c.isascii() and (c.isalnum() or c in "-.") else "_" for c in text)
