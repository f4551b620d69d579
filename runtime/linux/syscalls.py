"""Linux system calls for which Python has no function.

Each returns a plain value or raises `OSError`; one that the running kernel lacks returns None or
False. Imports the standard library only: the guardian uses it.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import signal
import struct
import time

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_PR_GET_CHILD_SUBREAPER = 37

# struct pidfd_info in linux/pidfd.h as it was first, 64 bytes; the exit code is its last field.
_INFO = struct.Struct("=QQ11Ii")
_INFO_EXIT = 1 << 3
_PIDFD_GET_INFO = 0xC0000000 | (_INFO.size << 16) | (0xFF << 8) | 11

_libc = ctypes.CDLL(None, use_errno=True)
_libc.prctl.argtypes = [ctypes.c_int] + [ctypes.c_ulong] * 4

_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3

_TFD_TIMER_ABSTIME = 1
# struct itimerspec: no interval, then seconds and nanoseconds.
_TIMER = struct.Struct("@qqqq")


def _checked(result: int) -> int:
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return result


def _prctl(option: int, value: int = 0) -> None:
    _checked(_libc.prctl(option, value, 0, 0, 0))


def die_with_parent() -> None:
    """Have this process killed when its parent (strictly: its parent's thread) ends.

    Compare ``os.getppid()`` afterwards: a parent that ended just before is not noticed.
    """
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def is_subreaper() -> bool:
    """Whether orphaned descendants become children of this process."""
    answer = ctypes.c_int()
    _prctl(_PR_GET_CHILD_SUBREAPER, ctypes.addressof(answer))
    return bool(answer.value)


def set_subreaper(*, on: bool) -> None:
    """Choose whether orphaned descendants become children of this process."""
    _prctl(_PR_SET_CHILD_SUBREAPER, int(on))


def exit_status_of(pidfd: int) -> int | None:
    """Return the wait status of an ended process, also one that other code has collected.

    None if the kernel does not keep it: it does since Linux 6.15.
    """
    request = bytearray(_INFO.pack(_INFO_EXIT, *[0] * 13))
    try:
        fcntl.ioctl(pidfd, _PIDFD_GET_INFO, request)
    except OSError as error:
        if error.errno in (errno.ENOTTY, errno.EINVAL, errno.ESRCH, errno.EBADF):
            return None
        raise
    mask, *_, status = _INFO.unpack(request)
    return status if mask & _INFO_EXIT else None


def overwrite(address: int, text: bytes) -> None:
    """Write *text* over this process's own memory at *address*."""
    ctypes.memmove(address, text, len(text))


def flush_c_streams() -> None:
    """Write what C's standard streams of this process still hold."""
    _libc.fflush(None)


def keep_freed_memory(block: int, most: int) -> None:
    """Have C's allocator keep *most* bytes that were freed in blocks of up to *block* bytes.

    By default it gives such blocks back to the kernel, which clears their pages for the next one.
    Without effect where the C library has no such setting.
    """
    with contextlib.suppress(AttributeError):
        _libc.mallopt(_M_MMAP_THRESHOLD, block)
        _libc.mallopt(_M_TRIM_THRESHOLD, most)


def return_freed_memory() -> None:
    """Give what C's allocator keeps back to the kernel."""
    with contextlib.suppress(AttributeError):
        _libc.malloc_trim(0)


def boot_time() -> float:
    """Return seconds on the clock that goes on while the machine is suspended."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def create_boot_timer() -> int:
    """Return the descriptor of a timer on that clock: readable from its time on."""
    return _checked(_libc.timerfd_create(time.CLOCK_BOOTTIME, os.O_NONBLOCK | os.O_CLOEXEC))


def set_boot_timer(fd: int, at: float) -> None:
    """Have the timer *fd* be readable from *at* on, and not before; soon if that has passed."""
    nanoseconds = max(1, int(at * 1e9))  # 0 would switch it off
    spec = _TIMER.pack(0, 0, *divmod(nanoseconds, 10**9))
    _checked(_libc.timerfd_settime(fd, _TFD_TIMER_ABSTIME, spec, None))
