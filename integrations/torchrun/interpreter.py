"""Running a program in this process as a fresh Python would, up to its exit status.

- The program is ``__main__`` on the main thread, with the signals, ``sys.argv``, ``sys.path`` and
  unbuffered streams that ``python -u`` gives it.
- The exit steps of Python are done here: threads are joined, ``atexit`` functions run, files
  are flushed. Only a program that succeeds returns; any other end is the end of the process.
- A process that the program has forked, and that leaves the program, ends here too.
- A program that it puts in the place of this process runs as a child: the driver is connected here.
"""

from __future__ import annotations

import builtins
import gc
import io
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
import types
import zipfile
from contextlib import suppress
from importlib.machinery import PathFinder, SourceFileLoader, SourcelessFileLoader
from importlib.util import MAGIC_NUMBER
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from phalanx.runtime import interpreter_exit

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from .program import Program

_HERE = __file__
_IMPORTED = (  # top-level modules that this process has, and one that has imported torch has not
    *("attr", "cloudpickle", "graphlib", "html", "pygments", "pykka", "resource", "rich"),
    *("sched", "structlog", "tomllib"),
)
_FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)


def run_python(
    program: Program, argv: Sequence[str], on_error: Callable[[BaseException], object]
) -> None:
    """Run a script or module; return if it succeeds, else end this process as Python would.

    *on_error* is called with the exception that ends the program, unless that is `SystemExit`.
    """
    pid = os.getpid()
    _become_fresh()
    _keep_this_process()
    is_module = program.kind == "module"
    sys.argv[:] = ["-m" if is_module else program.target, *argv]
    sys.orig_argv[:] = [sys.executable, "-u", *["-m"] * is_module, program.target, *argv]
    if program.folder is not None:
        sys.path.insert(0, program.folder)
        for name in _IMPORTED:
            if PathFinder.find_spec(name, [program.folder]) is not None:  # the program's own
                for each in [each for each in sys.modules if f"{each}.".startswith(f"{name}.")]:
                    del sys.modules[each]
    main = types.ModuleType("__main__")
    scope = vars(main)
    scope["__annotations__"] = {}
    # Also by the name that processes started by `multiprocessing` have for it.
    sys.modules["__main__"] = sys.modules["__mp_main__"] = main
    code: int | None = 0
    try:
        _execute(program, scope)
    except SystemExit as end:
        code = _exit_code(end)
    except BaseException as error:  # noqa: BLE001  # whatever it is, it ends the program
        code = 1
        error.__traceback__ = _own_frames_cut(error)
        if isinstance(error, KeyboardInterrupt):
            code = None  # Python ends by the signal
        elif os.getpid() == pid:
            with suppress(Exception):  # its text cannot be made, or there is no room for it
                on_error(error)
        _show(error)
    interpreter_exit.finish()
    del main, scope
    _finalize_globals()
    if code is None:
        end_by(signal.SIGINT)
    if code or os.getpid() != pid:
        os._exit(code)
    _succeed_at_signals()


def run_command(
    file: str | bytes | os.PathLike[Any], argv: Sequence[Any], env: Mapping[Any, Any] | None = None
) -> None:
    """Execute a program and wait; return if it succeeds, else end this process as it ended.

    Signals that end processes are passed on to it and to what it has started. The arguments are
    those of `os.execve`; an *env* of None is that of this process.

    Raises:
        OSError: as `os.execve`.
    """
    child: subprocess.Popen[bytes] | None = None
    early: list[int] = []  # signals that come before the program
    is_asked = False

    def forward(number: int, _frame: types.FrameType | None) -> None:
        nonlocal is_asked
        is_asked = True
        if child is None:
            early.append(number)
            return
        with suppress(ProcessLookupError):
            os.killpg(child.pid, number)

    named = os.environ.get("TORCHELASTIC_SIGNALS_TO_HANDLE", "").split(",")
    numbers = {*_FORWARDED, *(getattr(signal, each, signal.SIGTERM) for each in named)}
    before = {number: signal.signal(number, forward) for number in numbers}
    try:
        child = subprocess.Popen(
            argv, executable=file, env=env, close_fds=False, start_new_session=True
        )
    except BaseException:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        raise
    for number in early:
        forward(number, None)
    status = child.wait()
    if status < 0:
        end_by(-status)
    if status:
        os._exit(status)
    _succeed_at_signals()
    if is_asked:  # maybe when the program had ended
        os._exit(0)


def _succeed_at_signals() -> None:
    """Have a signal end this process, whose program has succeeded, with exit code 0.

    It is sent one if another rank fails. No handler of the program runs from here on.
    """

    def succeed(_number: int, _frame: types.FrameType | None) -> None:
        os._exit(0)

    for number in _FORWARDED:
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, succeed)


def end_by(number: int) -> NoReturn:
    """End this process by signal *number*, without a core of its own or stacks."""
    import faulthandler  # noqa: PLC0415  # on the way out

    faulthandler.disable()
    if number not in {signal.SIGKILL, signal.SIGSTOP}:
        signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
    os._exit(128 + number)  # a signal that ends nothing by default


def _become_fresh() -> None:
    """Undo what a worker has changed that a program may see."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    tempfile.tempdir = None  # it may set TMPDIR
    for name, fd in (("stdout", 1), ("stderr", 2)):
        old: Any = getattr(sys, name)
        if old is None:  # the launcher has none
            continue
        old.flush()
        raw: Any = io.FileIO(fd, "w", closefd=False)
        raw.name = f"<{name}>"
        new: Any = io.TextIOWrapper(raw, old.encoding, old.errors, "\n", write_through=True)
        new.mode = "w"
        setattr(sys, name, new)
        setattr(sys, f"__{name}__", new)


def _keep_this_process() -> None:
    """Have `os.execv` and its like run the program as a child, and end this process as it ends."""
    module: Any = os
    pid, replace = os.getpid(), module.execve

    def run(file: Any, argv: Sequence[Any], env: Mapping[Any, Any] | None = None) -> Any:
        if (
            os.getpid() != pid  # a process that the program has forked
            or isinstance(file, int)
            or threading.current_thread() is not threading.main_thread()
        ):
            return replace(file, argv, os.environ if env is None else env)
        run_command(file, argv, env)
        os._exit(0)

    module.execv = module.execve = run


def _execute(program: Program, scope: dict[str, Any]) -> None:
    path = program.target
    if program.kind == "module":
        runpy._run_module_as_main(path)  # type: ignore[attr-defined]  # noqa: SLF001  # what -m calls
    elif Path(path).is_dir() or zipfile.is_zipfile(path):
        runpy._run_module_as_main("__main__", alter_argv=False)  # type: ignore[attr-defined]  # noqa: SLF001
    else:
        if not Path(path).is_absolute():  # as Python does; sys.argv[0] stays
            path = f"{Path.cwd()}/{path}"
        text = Path(path).read_bytes()
        compiled = text.startswith(MAGIC_NUMBER)
        loader: Any = (SourcelessFileLoader if compiled else SourceFileLoader)("__main__", path)
        scope.update(__file__=path, __cached__=None, __builtins__=builtins, __loader__=loader)
        code = (
            loader.get_code("__main__")
            if compiled
            else compile(text, path, "exec", dont_inherit=True)
        )
        exec(code, scope)  # noqa: S102  # that is the command


def _exit_code(end: SystemExit) -> int:
    """Return the exit code that Python makes of *end*; what is no number it prints."""
    if end.code is None:
        return 0
    if isinstance(end.code, int):
        return end.code & 0xFF
    with suppress(Exception):
        sys.stderr.write(f"{end.code}\n")
    return 1


def _finalize_globals() -> None:
    """Finalize what only the program's globals refer to: a library may write its files then."""
    sys.last_type = sys.last_value = sys.last_traceback = None
    for name in ("__main__", "__mp_main__"):
        sys.modules.pop(name, None)
    gc.collect()


def _own_frames_cut(error: BaseException) -> types.TracebackType | None:
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename == _HERE:
        trace = trace.tb_next
    return trace


def _show(error: BaseException) -> None:
    """Show *error* as Python does at its end."""
    sys.last_type, sys.last_value, sys.last_traceback = type(error), error, error.__traceback__
    try:
        sys.excepthook(type(error), error, error.__traceback__)
    except BaseException:  # noqa: BLE001  # as Python: both are shown
        sys.stderr.write("Error in sys.excepthook:\n")
        traceback.print_exc()
        sys.stderr.write("\nOriginal exception was:\n")
        traceback.print_exception(error)
