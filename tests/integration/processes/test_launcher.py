from __future__ import annotations

import contextlib
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Literal

import pytest
from tests.support.processes import (
    LONG,
    Starter,
    is_alive,
    run_threads,
    soon,
    start_thread,
    wait_until,
)

from phalanx.runtime.linux import process_tree, procfs
from phalanx.runtime.process.child_process import Process
from phalanx.runtime.process.launcher import Launcher
from phalanx.supervision import RuntimeFault, SpecError

Method = Literal["zygote", "exec"]


@pytest.fixture(params=["zygote", "exec"])
def method(request: pytest.FixtureRequest) -> Any:
    return request.param


def zygote_pid(launcher: Launcher) -> int:
    return launcher.zygote().pid or 0


def children() -> set[int]:
    return {task.pid for task in procfs.read_all().values() if task.parent == os.getpid()}


def test_a_process_leads_a_session_with_the_environment_and_folder_of_the_moment_of_its_start(
    starter: Starter, method: Method, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """And with signals as in a fresh Python."""
    monkeypatch.setenv("BEFORE", "1")
    starter.start("stay", method=method)  # the zygote is up from here on
    starter.line.receive()
    monkeypatch.delenv("BEFORE")
    monkeypatch.setenv("AFTER", "2")
    monkeypatch.chdir(tmp_path)
    was = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])

    try:
        process = starter.start("tell", method=method)
        said = starter.line.receive()
    finally:
        signal.signal(signal.SIGHUP, was)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGUSR1])

    assert (said["ignored"], said["blocked"]) == ([], [])
    assert (said["pid"], said["ppid"], said["session"]) == (process.pid, os.getpid(), process.pid)
    assert process.status is None
    assert said["env"].pop("PHALANX_TREE").startswith(os.environ["PHALANX_TREE"])
    expected = {name: value for name, value in os.environ.items() if name != "PHALANX_TREE"}
    assert said["env"] == expected
    assert said["cwd"] == str(tmp_path)


def test_environment_folder_path_and_output_are_those_of_the_spec(
    starter: Starter, method: Method, tmp_path: Path
) -> None:
    temporary, file = tmp_path / "temporary", tmp_path / "file"
    temporary.mkdir()
    before = temporary.stat().st_mtime_ns
    file.touch(0o777)
    env = {"ONLY": "this", "PATH": "/bin", "TMPDIR": str(file), "TMP": str(temporary)}
    path = [*sys.path, "/nowhere"]
    with (tmp_path / "out").open("w") as out, (tmp_path / "err").open("w") as err:
        process = starter.start(
            "tell",
            "payload",
            method=method,
            env=env,
            cwd=str(tmp_path),
            sys_path=path,
            stdout=out.fileno(),
            stderr=err.fileno(),
        )
        said = starter.line.receive()
        wait_until((tmp_path / "err").read_text)
        process.kill_tree(soon())

    del said["env"]["PHALANX_TREE"]
    assert said["env"] == env
    assert said["cwd"] == str(tmp_path)
    assert said["sys_path"] == path
    assert said["payload"] == "payload"
    assert "to stdout" in (tmp_path / "out").read_text()
    assert "to stderr" in (tmp_path / "err").read_text()
    # The first that is a folder; Python's try of it is a file, which a kill would leave there.
    assert said["temporary"] == str(temporary)
    assert temporary.stat().st_mtime_ns == before


def test_a_process_holds_its_own_descriptors_and_none_of_its_siblings(
    starter: Starter, method: Method
) -> None:
    pipes = [os.pipe() for _ in range(4)]
    specs = [
        starter.spec("tell", method=method, fds={"out": starter.line.write, "mine": write})
        for _, write in pipes
    ]

    processes = starter.launcher.launch(*specs, on_exit=starter.on_exit, deadline=soon())

    for _ in processes:
        said = starter.line.receive()
        # 0, 1, 2, its two, and the listing's own.
        assert len(said["descriptors"]) == 6
        assert {str(fd) for fd in said["names"].values()} < set(said["descriptors"])
    for (read, write), process in zip(pipes, processes, strict=True):
        os.close(write)
        # End of file at once when its one holder dies: nobody else has it.
        process.kill_tree(soon())
        assert os.read(read, 1) == b""
        os.close(read)


def test_a_process_is_listed_under_its_title_and_carries_its_mark(
    starter: Starter, method: Method
) -> None:
    process = starter.start("beget", "fork child", method=method, title="phalanx: tp/0")
    pids = [process.pid, *starter.line.receive()["pids"].values()]

    assert Path(f"/proc/{process.pid}/cmdline").read_bytes().rstrip(b"\0") == b"phalanx: tp/0"
    assert Path(f"/proc/{process.pid}/comm").read_text() == "phalanx: tp/0\n"
    for pid in pids:  # a child that is between two programs has no environment for a moment
        environ = Path(f"/proc/{pid}/environ")
        wait_until(environ.read_bytes)
        assert process.tree is not None
        assert process.tree.tag in environ.read_bytes()


def test_exit_codes_and_signals_are_told(starter: Starter, method: Method) -> None:
    left = starter.start("leave", 7, method=method)
    fell = starter.start("fall", int(signal.SIGTERM), method=method)

    assert left.wait(soon())
    assert fell.wait(soon())
    assert left.status is not None
    assert fell.status is not None
    assert (left.status.code, left.status.signal) == (7, None)
    assert (fell.status.code, fell.status.signal) == (None, signal.SIGTERM)
    assert not left.send_signal(signal.SIGTERM)
    assert {process.pid for process in starter.await_exits(2)} == {left.pid, fell.pid}


def test_a_process_outlives_the_thread_that_started_it(starter: Starter, method: Method) -> None:
    started: list[Process] = []
    thread = start_thread(lambda: started.append(starter.start("stay", method=method)))
    thread.join(LONG)
    starter.line.receive()

    assert not started[0].wait(time.monotonic() + 0.2)
    assert started[0].status is None


def test_launches_from_many_threads_at_once_all_succeed(starter: Starter) -> None:
    failures: list[BaseException] = []

    def work(number: int) -> None:
        try:
            for _ in range(4):
                process = starter.start("leave", number)
                assert process.wait(soon())
                assert process.status is not None
                assert process.status.code == number
                process.close()
        except BaseException as error:
            failures.append(error)

    run_threads(8, work)

    assert failures == []
    assert len(starter.await_exits(32)) == 32


def test_a_batch_with_one_that_cannot_start_starts_none(starter: Starter) -> None:
    good = [starter.spec("stay") for _ in range(3)]
    bad = starter.spec("stay", fds={"out": starter.line.write, "gone": 1000})

    with pytest.raises(SpecError, match=r"fds\['gone'\]=1000: pass an open descriptor"):
        starter.launcher.launch(*good, bad, on_exit=starter.on_exit, deadline=soon())

    def nothing_runs() -> bool:
        found, _ = process_tree.find(process_tree.TreeTarget(starter.launcher._tag.pattern))
        return set(found) <= {zygote_pid(starter.launcher)}

    wait_until(nothing_runs)
    assert starter.exits == []
    with pytest.raises(SpecError, match="cwd"):
        starter.start("stay", cwd="/nowhere/at/all")
    assert starter.start("leave", 0).wait(soon())


def test_a_launcher_has_one_guardian_and_a_zygote_for_each_preload(starter: Starter) -> None:
    launcher = starter.launcher
    module = "tests.support.preloaded_module"  # imported by nothing else
    specs = [starter.spec("tell", preload=preload) for preload in (None, (module,))]

    launcher.launch(*specs, on_exit=starter.on_exit, deadline=soon())
    loaded = [starter.line.receive()["modules"] for _ in specs]

    assert sorted(module in modules for modules in loaded) == [False, True]
    zygotes = {launcher.zygote().pid, launcher.zygote((module,)).pid}
    helpers = {*zygotes, launcher._guardian.pid}
    assert len(helpers) == 3
    assert helpers <= children()


def test_what_a_program_reads_only_as_it_starts_reaches_forked_processes(starter: Starter) -> None:
    launcher = starter.launcher
    asked = [{"PYTHONHASHSEED": seed, "OTHER": str(n)} for n, seed in enumerate("122")]
    envs = [{**os.environ, **each} for each in asked]

    launcher.launch(
        *(starter.spec("tell", env=e, asked_env=a) for e, a in zip(envs, asked, strict=True)),
        on_exit=starter.on_exit,
        deadline=soon(),
    )
    said = sorted((starter.line.receive() for _ in envs), key=lambda one: one["env"]["OTHER"])

    words = [sys.executable, "-c", "print(hash('phalanx'))"]
    fresh = [int(subprocess.check_output(words, env=env)) for env in envs]
    assert [one["hash"] for one in said] == fresh
    assert len({launcher.zygote(None, each).pid for each in asked}) == 2
    assert launcher.zygote().pid is None  # that of the driver's own was not needed


def test_an_import_path_that_is_asked_for_comes_first_for_the_preload_too(
    starter: Starter, method: Method, tmp_path: Path
) -> None:
    (tmp_path / "only_there.py").touch()
    asked = {"PYTHONPATH": f"{tmp_path}{os.pathsep}{sys.path[-1]}"}

    starter.start("tell", method=method, preload=("only_there",), asked_env=asked)

    said = starter.line.receive()
    assert said["sys_path"] == [str(tmp_path), *sys.path]
    assert ("only_there" in said["modules"]) == (method == "zygote")


def test_what_a_preload_has_started_ends_with_the_launcher_though_a_process_still_runs(
    starter: Starter, tmp_path: Path
) -> None:
    said = tmp_path / "pid"
    tmp_path.joinpath("starts_one.py").write_text(
        "import subprocess, time\n"
        "one = subprocess.Popen(['sleep', '600'], start_new_session=True)\n"
        f"open({str(said)!r}, 'w').write(str(one.pid))\n"
        "time.sleep(0.05)  # it is older, by the kernel's clock ticks, than what is forked\n"
    )
    asked = {"PYTHONPATH": f"{tmp_path}{os.pathsep}{sys.path[-1]}"}
    starter.start("stay", preload=("starts_one",), asked_env=asked)
    starter.line.receive()

    starter.launcher.close(soon())

    assert not is_alive(int(said.read_text()))


def test_a_library_that_changes_such_a_variable_of_the_driver_costs_no_zygote(
    starter: Starter, monkeypatch: pytest.MonkeyPatch
) -> None:
    starter.start("leave", 0).wait(soon())
    helpers = children()
    monkeypatch.setenv("LD_LIBRARY_PATH", "/nowhere")

    process = starter.start("tell")

    assert starter.line.receive()["env"]["LD_LIBRARY_PATH"] == "/nowhere"
    assert children() == {*helpers, process.pid}


def test_a_value_with_which_no_zygote_starts_is_named(starter: Starter) -> None:
    with pytest.raises(RuntimeFault, match="with PYTHONHASHSEED='none': exit code 1"):
        starter.start("leave", 0, asked_env={"PYTHONHASHSEED": "none"})


def test_a_launch_under_which_the_zygote_dies_is_begun_anew_and_runs_once(starter: Starter) -> None:
    starter.start("leave", 0).wait(soon())
    old = zygote_pid(starter.launcher)
    os.kill(old, signal.SIGSTOP)
    specs = [starter.spec("stay") for _ in range(3)]
    result: list[Any] = []
    thread = start_thread(
        lambda: result.extend(
            starter.launcher.launch(*specs, on_exit=starter.on_exit, deadline=soon())
        )
    )
    boot = starter.launcher.zygote()._boot
    assert boot is not None
    wait_until(lambda: len(boot.waiting) == 3)

    os.kill(old, signal.SIGKILL)
    thread.join(LONG)

    said = {starter.line.receive()["pid"] for _ in specs}
    assert said == {process.pid for process in result}


def test_a_launch_that_nobody_wants_any_more_is_given_up(
    starter: Starter, events: list[Any]
) -> None:
    starter.start("leave", 0).wait(soon())
    zygote = zygote_pid(starter.launcher)
    os.kill(zygote, signal.SIGSTOP)
    try:
        with pytest.raises(RuntimeFault, match="'stay' was withdrawn before it had been started"):
            starter.launcher.launch(
                starter.spec("stay"),
                on_exit=starter.on_exit,
                deadline=soon(),
                is_wanted=lambda: False,
            )
    finally:
        os.kill(zygote, signal.SIGCONT)

    assert starter.start("leave", 4).wait(soon())
    assert not events
    assert zygote_pid(starter.launcher) == zygote


def test_a_guardian_that_is_replaced_knows_of_any_number_of_processes(
    starter: Starter, events: list[Any]
) -> None:
    starter.start("leave", 0).wait(soon())
    guardian = starter.launcher._guardian
    old = guardian.pid or 0
    for number in range(2000):  # more than a socket holds messages
        guardian.add_session((1 << 30, number))

    os.kill(old, signal.SIGKILL)
    wait_until(lambda: [event.replaced for event in events] == [old])
    stay = starter.start("stay")
    title = Path(f"/proc/{guardian.pid}/comm")
    wait_until(lambda: title.read_text() == "phalanx: guardi\n", "a guardian that has started")

    assert is_alive(guardian.pid or 0)
    stay.kill_tree(soon())


def test_a_guardian_that_cannot_be_started_is_tried_again(
    starter: Starter, events: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    starter.start("leave", 0).wait(soon())
    old = starter.launcher._guardian.pid
    assert old is not None
    with monkeypatch.context() as patch:
        patch.setattr(sys, "executable", "/nowhere/python")
        os.kill(old, signal.SIGKILL)
        wait_until(lambda: events)

    wait_until(lambda: starter.launcher._guardian.pid not in (None, old), "another guardian")
    assert is_alive(starter.launcher._guardian.pid or 0)
    assert "the guardian could not be started" in events[0].problem


def test_a_launch_that_is_short_of_descriptors_fails_and_leaves_nothing(starter: Starter) -> None:
    assert starter.start("leave", 0).wait(soon())
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    before = children()
    started: list[Process] = []
    for method in ("zygote", "exec"):
        for free in range(10):  # six are enough at present
            taken: list[int] = []
            resource.setrlimit(
                resource.RLIMIT_NOFILE, (len(procfs.numbers_in("/proc/self/fd")) + 40, hard)
            )
            try:
                with contextlib.suppress(OSError):
                    while True:
                        taken.append(os.dup(starter.line.write))
                for fd in taken[:free]:
                    os.close(fd)
                del taken[:free]
                with contextlib.suppress(RuntimeFault):
                    started.append(starter.start("leave", 0, method=method))
            finally:
                for fd in taken:
                    os.close(fd)
                resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))

    exits = starter.await_exits(1 + len(started))
    assert set(exits[1:]) == set(started)
    for process in exits:
        process.close()

    wait_until(lambda: children() == before, "the end of what failed")
    assert starter.start("leave", 0).wait(soon())
