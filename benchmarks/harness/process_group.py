"""`Family`: every process of one contestant, its time, its memory, and its end.

Guarantees: each process of a contestant is found, also when it left its parent or its session: this
process is a subreaper, and its environment holds a mark. `end` leaves none of them.

Not found: a process that has overwritten its environment and whose parent was never seen.
Values of a process that is just ending may be missing.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from phalanx.runtime import procfs

if TYPE_CHECKING:
    from collections.abc import Iterable

MARK = "PHALANX_BENCH_MARK"
_WATCH = Path(__file__).with_name("orphan_watch.py")
_SET_SUBREAPER = 36
_KIB = 1024
_NAMED = re.compile(rb"^/dev/shm/(\S+)$", re.MULTILINE)
_MAPPING = re.compile(rb"^[0-9a-f]+-[0-9a-f]+ \S+ \S+ (\S+) (\d+) *(.*)$")


def adopt_orphans() -> None:
    """Have what contestants abandon become children of this process, where it is found."""
    ctypes.CDLL(None).prctl(_SET_SUBREAPER, 1)


class Family:
    """The descendants of *root*, and the processes that carry *mark*.

    Attributes:
        root: The contestant's own process.
        mark: In the environment of everything it starts.
    """

    def __init__(self, root: int, mark: str) -> None:
        self.root = root
        self.mark = mark
        # With the moment of its start: the number of one that has ended is given to another.
        self._known: set[tuple[int, int]] = set()

    def pids(self) -> list[int]:
        """Return its living processes, the root first."""
        tasks = {pid: task for pid, task in procfs.read_all().items() if not task.is_dead}
        found = {pid for pid, task in tasks.items() if task.key in self._known}
        tag = f"{MARK}={self.mark}".encode()
        found |= {
            pid for pid in tasks if pid != os.getpid() and tag in _read(f"/proc/{pid}/environ")
        }
        found |= procfs.descendants(tasks, found).keys()
        self._known |= {tasks[pid].key for pid in found}
        return sorted(found, key=lambda pid: (pid != self.root, pid))

    def cpu_ns(self, pids: Iterable[int]) -> dict[int, int]:
        """Return the nanoseconds each of *pids* has run; threads that ended are not in it."""
        return {pid: _cpu_ns(pid) for pid in pids}

    def pss(self, pids: Iterable[int]) -> int:
        """Return the bytes of memory they hold: what is shared counts in parts."""
        return sum(_field(_read(f"/proc/{pid}/smaps_rollup"), b"Pss") for pid in pids)

    def shared(self, pids: Iterable[int]) -> int:
        """Return the bytes of shared memory that exist through them, each once."""
        held: dict[tuple[int, int], int] = {}
        mapped: dict[tuple[bytes, int], int] = {}
        for pid in pids:
            held.update(_shared_files(pid))
            for key, size in _shared_mappings(pid).items():
                mapped[key] = mapped.get(key, 0) + size
        inodes = {inode for _, inode in held}
        alone = (size for (_, inode), size in mapped.items() if inode not in inodes)
        return sum(held.values()) + sum(alone)

    def shm_names(self, pids: Iterable[int]) -> set[str]:
        """Return the names in ``/dev/shm`` that they have open or mapped."""
        return {name.decode() for pid in pids for name in _NAMED.findall(_all_files(pid))}

    def signal(self, number: int) -> None:
        """Send it to all."""
        for pid in self.pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def end(self, seconds: float = 10.0) -> list[int]:
        """Kill all and collect what is ours to collect; return what is still there."""
        deadline = time.monotonic() + seconds
        while (left := self.pids()) and time.monotonic() < deadline:
            self.signal(signal.SIGKILL)
            _collect(left)
            time.sleep(0.01)  # there is no exit event for processes that are not children
        _collect(pid for pid, _ in self._known)  # those that have ended since
        return left


class Watch:
    """The process that kills all that carry *mark* once this one has ended, however it does."""

    def __init__(self, mark: str) -> None:
        self._popen = subprocess.Popen(
            [sys.executable, "-S", "-E", str(_WATCH), f"{MARK}={mark}"],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            start_new_session=True,  # no Ctrl-C ends it
        )

    def end(self, seconds: float = 20.0) -> None:
        """End it; it has no process left to kill."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._popen.communicate(timeout=seconds)
        self._popen.kill()
        self._popen.wait()


def _collect(pids: Iterable[int]) -> None:
    """Collect the exit status of those of *pids* that were adopted and have ended."""
    for pid in pids:
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)


def command(pid: int) -> str:
    """Return the command line of *pid*, shortened; its short name where it has none."""
    line = _read(f"/proc/{pid}/cmdline").replace(b"\0", b" ") or _read(f"/proc/{pid}/comm")
    return line.decode(errors="replace")[:80].strip()


def _cpu_ns(pid: int) -> int:
    total = 0
    with contextlib.suppress(OSError):
        for task in os.listdir(f"/proc/{pid}/task"):  # noqa: PTH208  # only names are needed
            spent = _read(f"/proc/{pid}/task/{task}/schedstat").split()
            total += int(spent[0]) if spent else 0
    return total


def _shared_files(pid: int) -> dict[tuple[int, int], int]:
    """Return the bytes allocated to each shared-memory file that *pid* holds open."""
    found: dict[tuple[int, int], int] = {}
    try:
        names = os.listdir(f"/proc/{pid}/fd")  # noqa: PTH208  # only names are needed
    except OSError:
        return found
    for name in names:
        path = f"/proc/{pid}/fd/{name}"
        with contextlib.suppress(OSError):
            if os.readlink(path).startswith(("/memfd:", "/dev/shm/")):  # noqa: PTH115,S108
                about = os.stat(path)  # noqa: PTH116  # follows the link also where it is deleted
                found[about.st_dev, about.st_ino] = about.st_blocks * 512
    return found


def _all_files(pid: int) -> bytes:
    """Return the paths that *pid* has open or mapped, one on each line."""
    found = [line.partition(b"/") for line in _read(f"/proc/{pid}/maps").splitlines()]
    paths = [slash + rest for _, slash, rest in found]
    with contextlib.suppress(OSError):
        for name in os.listdir(f"/proc/{pid}/fd"):  # noqa: PTH208  # only names are needed
            with contextlib.suppress(OSError):
                paths.append(os.readlink(f"/proc/{pid}/fd/{name}").encode())  # noqa: PTH115
    return b"\n".join(paths)


def _shared_mappings(pid: int) -> dict[tuple[bytes, int], int]:
    """Return this process's part of each mapping of shared memory."""
    found: dict[tuple[bytes, int], int] = {}
    current: tuple[bytes, int] | None = None
    for line in _read(f"/proc/{pid}/smaps").splitlines():
        if line.startswith(b"Pss:") and current is not None:
            found[current] = found.get(current, 0) + _field(line, b"Pss")
        elif match := _MAPPING.match(line):
            device, inode, path = match.groups()
            is_shared = path.startswith((b"/memfd:", b"/dev/shm/", b"/dev/zero (deleted)"))
            current = (device, int(inode)) if is_shared else None
    return found


def _field(text: bytes, name: bytes) -> int:
    match = re.search(rb"^" + name + rb":\s+(\d+) kB", text, re.MULTILINE)
    return int(match.group(1)) * _KIB if match else 0


def _read(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError:
        return b""
