"""The wall clock of this process goes wrong: an hour ahead, then an hour behind, then right again.

Guarantees: whatever Python code asks Python for the time of day gets the wrong one: ``time.time``,
``time_ns``, ``clock_gettime`` of CLOCK_REALTIME, ``localtime``, ``gmtime``, ``ctime``, ``asctime``
and ``strftime`` without a time, ``datetime.now``, ``utcnow`` and ``today``, ``date.today``; also
where a module has taken one of these functions by name. Other clocks stay as they are, and so do
the machine's and those of other processes, but for what is forked meanwhile.

Left to others: native code, which asks the kernel, and the times the kernel gives to files: they
are right all the time. No process has a wall clock of its own, and we do not set the machine's.
"""

from __future__ import annotations

import ctypes
import datetime as dt
import gc
import sys
import threading
import time
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

HOUR = 3600.0
_NS = 10**9
_real: Mapping[str, Callable[..., Any]] = {
    name: getattr(time, name)
    for name in (
        *("time", "time_ns", "clock_gettime", "clock_gettime_ns"),
        *("localtime", "gmtime", "ctime", "asctime", "strftime"),
    )
}


class Jump:
    """One jump of the wall clock: ahead for half of *seconds*, behind for the other half."""

    def __init__(self, seconds: float) -> None:
        self._half = seconds / 2
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="chaos-clock", daemon=True)

    def start(self) -> None:
        """Have the clock jump ahead, and see to the rest."""
        put_wall_clock(HOUR)
        self._thread.start()

    def end(self) -> None:
        """Set it right, if it is not yet."""
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        if not self._ended.wait(self._half):
            put_wall_clock(-HOUR)
            self._ended.wait(self._half)
        put_wall_clock(0.0)


def put_wall_clock(ahead: float) -> None:
    """Have Python code see a time of day *ahead* of the real one, in seconds; 0.0 sets it right."""
    with _lock:
        _wrong.ahead_ns = int(ahead * _NS)
        if (ahead != 0.0) == _wrong.is_shown:
            return
        _wrong.is_shown = not _wrong.is_shown
        _replace(_wrong.functions if _wrong.is_shown else _real)
        _set_datetime(_wrong.methods if _wrong.is_shown else _real_methods)


class _WrongClock:
    """What is asked in place of the real functions; they say what those say, *ahead_ns* later."""

    def __init__(self) -> None:
        self.ahead_ns = 0
        self.is_shown = False
        self.functions: Mapping[str, Callable[..., Any]] = {
            name: getattr(self, f"_{name}") for name in _real
        }
        self.methods: Mapping[str, Any] = {"now": classmethod(_now), "utcnow": classmethod(_utcnow)}

    def _time(self) -> Any:
        return self._time_ns() / _NS

    def _time_ns(self) -> Any:
        return _real["time_ns"]() + self.ahead_ns

    def _clock_gettime(self, clock: int, /) -> Any:
        return self._time() if clock == time.CLOCK_REALTIME else _real["clock_gettime"](clock)

    def _clock_gettime_ns(self, clock: int, /) -> Any:
        if clock == time.CLOCK_REALTIME:
            return self._time_ns()
        return _real["clock_gettime_ns"](clock)

    def _localtime(self, seconds: float | None = None, /) -> Any:
        return _real["localtime"](self._time() if seconds is None else seconds)

    def _gmtime(self, seconds: float | None = None, /) -> Any:
        return _real["gmtime"](self._time() if seconds is None else seconds)

    def _ctime(self, seconds: float | None = None, /) -> Any:
        return _real["ctime"](self._time() if seconds is None else seconds)

    def _asctime(self, *when: Any) -> Any:
        return _real["asctime"](*(when or (self._localtime(),)))

    def _strftime(self, form: str, *when: Any) -> Any:
        return _real["strftime"](form, *(when or (self._localtime(),)))


def _now(cls: type[dt.datetime], tz: dt.tzinfo | None = None) -> dt.datetime:
    return cls.fromtimestamp(time.time(), tz)


def _utcnow(cls: type[dt.datetime]) -> dt.datetime:
    return cls.fromtimestamp(time.time(), dt.UTC).replace(tzinfo=None)


def _replace(functions: Mapping[str, Callable[..., Any]]) -> None:
    """Have *functions* called by their names, in every module that has one by any name."""
    others = _wrong.functions if functions is _real else _real
    new = {id(others[name]): function for name, function in functions.items()}
    for module in list(sys.modules.values()):
        names = cast("dict[str, Any]", getattr(module, "__dict__", None))
        if type(names) is not dict:
            continue  # something else that somebody has put there
        for name, value in list(names.items()):
            if id(value) in new:
                names[name] = new[id(value)]


def _set_datetime(methods: Mapping[str, Any]) -> None:
    """Give `datetime` these *methods*.

    The type is the interpreter's and refuses to be changed by name. A subclass in its place would
    be another type to whoever compares, pickles or has imported the real one.
    """
    (own,) = gc.get_referents(dt.datetime.__dict__)
    own.update(methods)
    ctypes.pythonapi.PyType_Modified(ctypes.py_object(dt.datetime))


_lock = threading.Lock()
_wrong = _WrongClock()
_real_methods: Mapping[str, Any] = {name: dt.datetime.__dict__[name] for name in ("now", "utcnow")}
