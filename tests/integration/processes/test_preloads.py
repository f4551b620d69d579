"""What the zygote has imported before it forks: there in workers, or a clear error."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support.processes import LONG, Starter, soon, start_thread, wait_until

from phalanx.runtime.process.launcher import Launcher
from phalanx.runtime.process.zygote_client import LaunchWait, StartRequest
from phalanx.runtime.threads.event_loop import EventLoop
from phalanx.supervision import RuntimeFault, SpecError

Preload = Callable[..., Starter]


@pytest.fixture
def preload(loop: EventLoop, tmp_path: Path) -> Iterator[Preload]:
    """Starts what a zygote forks that has imported a module of that *code*."""
    with contextlib.ExitStack() as ends:

        def start(code: str, folder: Path = tmp_path, **more: Any) -> Starter:
            (folder / "preloaded.py").write_text(code)
            sys.path.insert(0, str(folder))
            ends.callback(sys.path.remove, str(folder))
            starter = Starter(Launcher(loop, preload=("preloaded",), **more))
            ends.callback(starter.line.close)
            ends.callback(lambda: starter.launcher.close(soon()))
            return starter

        yield start


def test_what_is_preloaded_is_there_in_workers_whatever_its_folder_is_called(
    preload: Preload, tmp_path: Path
) -> None:
    folder = tmp_path / "with:colon"
    folder.mkdir()

    starter = preload("import random, torch; random.seed(1)", folder)
    starter.start("tell")
    starter.start("tell")
    first, second = starter.line.receive(), starter.line.receive()

    assert "preloaded" in first["modules"]
    assert first["random"] != second["random"]
    assert first["torch"] != second["torch"]


def test_what_a_preload_has_left_in_the_buffer_of_a_file_is_written_once(
    preload: Preload, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    starter = preload(f"log = open({str(log)!r}, 'w'); log.write('imported')")

    assert all(starter.start("leave", 0).wait(soon()) for _ in range(2))

    assert log.read_text() == "imported"


def test_a_preload_that_does_not_import_is_the_callers_error_with_its_traceback(
    preload: Preload,
) -> None:
    starter = preload("def f(): raise KeyError('deep down')\nf()\n")
    with pytest.raises(SpecError, match="deep down") as caught:
        starter.start("stay")

    assert caught.value.field == "preload"
    assert "preloaded.py" in "".join(caught.value.__notes__)


def test_an_import_error_of_any_length_and_script_is_told(preload: Preload) -> None:
    starter = preload("raise KeyError('\N{OLD PERSIAN SIGN A}' * 50_000)")

    with pytest.raises(SpecError, match="it does not import in the zygote"):
        starter.start("stay")


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("import os; os._exit(3)", "exit code 3"),
        ("import os; os.kill(os.getpid(), 11)", "SIGSEGV"),
    ],
)
def test_a_preload_that_ends_the_zygote_is_reported(
    preload: Preload, code: str, message: str
) -> None:
    starter = preload(code)
    with pytest.raises(RuntimeFault, match=message):
        starter.start("stay")


HANGS = "import threading; threading.Event().wait()"


@pytest.mark.parametrize(
    ("start_timeout", "wait", "says"),
    [(0.5, LONG, "start_timeout=0.5 s"), (LONG, 0.5, "had not imported .* raise start_timeout")],
    ids=["of the preload", "of the launch"],
)
def test_a_preload_that_hangs_is_waited_for_until_a_limit_that_is_named(
    preload: Preload, start_timeout: float, wait: float, says: str
) -> None:
    starter = preload(HANGS, start_timeout=start_timeout)

    with pytest.raises(RuntimeFault, match=says):
        starter.start("stay", deadline=time.monotonic() + wait)


@pytest.mark.parametrize(
    "code",
    [
        "import threading; threading.Thread(target=threading.Event().wait, daemon=True).start()",
        # What the check looks for in torch, without torch.
        (
            "import sys, types; cuda = types.ModuleType('torch.cuda');"
            "cuda.is_initialized = lambda: True; sys.modules['torch.cuda'] = cuda"
        ),
    ],
    ids=["thread", "cuda"],
)
def test_a_preload_that_makes_forking_unsafe_falls_back_to_new_interpreters(
    preload: Preload, code: str, events: list[Any]
) -> None:
    starter = preload(code, emit=events.append)
    for _ in range(2):
        starter.start("tell")
        assert "preloaded" not in starter.line.receive()["modules"]

    assert [event.event for event in events].count("phalanx.fork_unsafe") == 1


def test_closing_during_a_start_ends_the_wait(preload: Preload) -> None:
    starter = preload(HANGS)
    errors: list[BaseException] = []

    def start() -> None:
        try:
            starter.start("stay")
        except RuntimeFault as error:
            errors.append(error)

    thread = start_thread(start)
    wait_until(lambda: starter.launcher.zygote()._boot)
    starter.launcher.close(soon())
    thread.join(LONG)

    assert [str(error) for error in errors] == ["the launcher was closed"]


@pytest.mark.parametrize("importing", [False, True])
def test_a_stopped_zygote_is_replaced_once_it_is_needed(
    preload: Preload, tmp_path: Path, events: list[Any], *, importing: bool
) -> None:
    gate = tmp_path / "open"
    code = f"import os, time\nwhile not os.path.exists({str(gate)!r}): time.sleep(0.002)"
    starter = preload(code, emit=events.append)
    if not importing:
        gate.touch()
    starter.launcher.warm()
    boot = starter.launcher.zygote()._boot
    assert boot is not None
    if not importing:
        wait_until(lambda: boot.is_ready)
    pid = starter.launcher.zygote()._helper.pid or 0
    os.kill(pid, signal.SIGSTOP)
    gate.touch()

    process = starter.start("leave", 4)

    assert process.wait(soon())
    assert process.status is not None
    assert process.status.code == 4
    wait_until(lambda: [event.replaced for event in events] == [pid])
    assert "it was stopped" in events[0].reason


def test_a_launch_sends_nothing_to_the_zygote_that_has_just_replaced_its_own(
    preload: Preload, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the end of the one is not taken for that of the other, however late it is reported."""
    gate = tmp_path / "open"
    gate.touch()
    starter = preload(
        f"import os, time\nwhile not os.path.exists({str(gate)!r}): time.sleep(0.002)"
    )
    starter.launcher.warm()
    zygote = starter.launcher.zygote()
    boot, pid = zygote._boot, zygote._helper.pid or 0
    assert boot is not None
    wait_until(lambda: boot.is_ready)
    gate.unlink()
    exited = zygote._helper._on_exit

    def report_late(*exit_of: Any) -> bool:
        zygote.warm()
        return exited(*exit_of)

    monkeypatch.setattr(zygote._helper, "_on_exit", report_late)
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: zygote._helper.pid not in (None, pid))
    successor = zygote._helper.pid

    request = StartRequest.of(1, starter.spec("leave"), zygote._tag.of(1, "leave"))
    assert not zygote._ask(boot, [request], LaunchWait("leave", soon()))
    request.close()

    gate.touch()
    assert starter.start("leave", 4).wait(soon())
    assert zygote.pid == successor
