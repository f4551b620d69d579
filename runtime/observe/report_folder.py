"""Report store: a directory of crash reports as files.

- A file is complete or absent, readable by its owner alone, and named so that names sort by time,
  also if the wall clock is set back.
- At most *keep* reports are kept, the newest; no other file is ever removed.
- A disk that is full or read-only is an event, not an exception. Reading skips torn, foreign or
  unreadable files, and says so.
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
from typing import TYPE_CHECKING, Final

from phalanx.supervision import SpecError, check_count

from .crash_report import CrashReport
from .events import ReportNotWritten, ReportWritten

if TYPE_CHECKING:
    from collections.abc import Iterator

REPORT_VARIABLE: Final = "PHALANX_REPORT_DIR"
_OURS: Final = re.compile(r"\d{4}-\d\d-\d\dT[\w.-]+\.json")
_TORN: Final = ".phalanx-report-"  # while it is being written
_ABANDONED: Final = 3600.0  # seconds after which its writer is taken for dead
_LONGEST: Final = 64 << 20  # bytes; ours have less than one MiB
_NAME: Final = 80  # characters of a group's name in that of a file
_STAMP: Final = "%Y-%m-%dT%H_%M_%S.%f"  # what a name begins with
_DIGITS: Final = 26  # characters of that


@dataclass(frozen=True, slots=True)
class ReportFile:
    """A file in a folder of reports."""

    path: Path
    report: CrashReport | None
    problem: str = ""


@dataclass(frozen=True, slots=True)
class ReportFolder:
    """A folder of crash reports.

    Attributes:
        path: The folder; created with mode 0700 if it is missing.
        keep: How many reports are kept; a write removes the oldest.
    """

    path: Path
    keep: int = 1000

    def __post_init__(self) -> None:
        check_count("keep", self.keep)
        try:
            object.__setattr__(self, "path", Path(self.path).expanduser().absolute())
        except (TypeError, RuntimeError) as error:
            raise SpecError("path", self.path, f"give a folder: {error}") from None

    @classmethod
    def at(cls, path: str | os.PathLike[str]) -> ReportFolder:
        """Return the folder at *path*, to be read.

        Raises:
            SpecError: there is no folder.
        """
        folder = cls(Path(path))
        if not os.path.isdir(folder.path):  # noqa: PTH112  # raises nothing where it may not look
            raise SpecError("directory", str(folder.path), "is not a folder")
        return folder

    @classmethod
    def of(cls, field: str, given: object) -> ReportFolder:
        """Return the folder *given* as the argument *field*, created and checked for writing.

        Raises:
            SpecError: it is not a folder, or not writable.
        """
        if not isinstance(given, ReportFolder | str | Path) or given == "":
            raise SpecError(field, given, "give a folder, or a ReportFolder")
        try:
            folder = given if isinstance(given, ReportFolder) else cls(Path(given))
        except SpecError as error:  # of no such user
            raise SpecError(field, given, f"give another folder: {error}") from None
        try:
            folder.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            tempfile.TemporaryFile(prefix=_TORN, dir=folder.path).close()
        except (OSError, ValueError) as error:
            raise SpecError(field, str(folder.path), f"cannot be written to: {error}") from None
        return folder

    @classmethod
    def from_environment(cls) -> ReportFolder | None:
        """Return the folder that ``PHALANX_REPORT_DIR`` names, or None; as `of`."""
        named = os.environ.get(REPORT_VARIABLE, "")
        return cls.of(REPORT_VARIABLE, named) if named else None

    def write(self, report: CrashReport, replaced: str = "") -> ReportWritten | ReportNotWritten:
        """Write *report* to a new file, or over *replaced*; an `OSError` is returned as an event.

        Args:
            replaced: The path of an earlier report on the same death.
        """
        try:
            path = self._write(report, replaced)
        except OSError as error:
            at = time.monotonic()
            return ReportNotWritten(directory=str(self.path), problem=str(error), at=at)
        with contextlib.suppress(OSError):  # a network disk may be gone by now
            self._prune()
        return ReportWritten(path=str(path), at=time.monotonic())

    def read(self) -> Iterator[ReportFile]:
        """Yield its files, the newest first.

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

    def _write(self, report: CrashReport, replaced: str) -> Path:
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(prefix=_TORN, dir=self.path)  # 0600 by nature
        try:
            with os.fdopen(descriptor, "w", encoding="ascii") as file:
                file.write(report.to_json())
                file.flush()
                os.fsync(file.fileno())  # raises on a full disk
            path = Path(replaced) if replaced else self.path / self._name_of(report)
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
            # The clock was set back: named by it, this report would sort as the oldest.
            with contextlib.suppress(ValueError):
                last = dt.datetime.strptime(newest[:_DIGITS], _STAMP).replace(tzinfo=dt.UTC)
                at = (last + dt.timedelta(microseconds=1)).isoformat(timespec="microseconds")
        who = f"{report.group[:_NAME]}-{report.rank}-{report.incarnation}-{report.pid}"
        return f"{_plain(at)}-{_plain(who)}.json"

    def _prune(self) -> None:
        """Remove the oldest reports past the limit, and abandoned temporary files."""
        entries = list(os.scandir(self.path))
        names = sorted((e.name for e in entries if _OURS.fullmatch(e.name)), reverse=True)
        for name in names[self.keep :]:
            with contextlib.suppress(FileNotFoundError):  # removed by another driver
                (self.path / name).unlink()
        for entry in entries:
            if entry.name.startswith(_TORN):
                with contextlib.suppress(FileNotFoundError):
                    if time.time() - entry.stat().st_mtime > _ABANDONED:
                        Path(entry.path).unlink()


def read_report(path: Path) -> ReportFile:
    """Return the report in *path*, or why it has none."""
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
    """Return *text* as a part of a portable file name."""
    return "".join(c if c.isascii() and (c.isalnum() or c in "-.") else "_" for c in text)
