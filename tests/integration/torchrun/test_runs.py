"""`phalanx torchrun` runs scripts as torchrun does, and restarts them: real processes, gloo."""

from __future__ import annotations

import json
import os
import py_compile
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.support.processes import wait_until
from tests.support.programs import run_program

SCRIPT = Path(__file__).parents[2] / "support" / "torchrun_script.py"
LONG = 150.0
PHALANX = (sys.executable, "-m", "phalanx", "torchrun")
TOP = (sys.executable, "-m", "phalanx", "top")
TORCHRUN = (sys.executable, "-m", "torch.distributed.run")
pytestmark = [pytest.mark.timeout(400), pytest.mark.usefixtures("phalanx_leak_check")]


@pytest.fixture(autouse=True)
def _as_in_a_new_shell(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OMP_NUM_THREADS", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)


def run(*words: object, command: tuple[str, ...] = PHALANX, **more: Any) -> Any:
    # torchrun leaves a folder behind; that of ours is looked for. Sockets need a short path.
    with tempfile.TemporaryDirectory(dir="/tmp") as apart:
        left = {} if command is PHALANX else {"TMPDIR": apart}
        return run_program(
            [*command, *map(str, words)], timeout=LONG, env={**os.environ, **left}, **more
        )


@contextmanager
def running(*words: object) -> Generator[subprocess.Popen[str]]:
    with subprocess.Popen(
        [*PHALANX, *map(str, words)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as launcher:
        try:
            yield launcher
        finally:
            launcher.kill()


def wait_for(launcher: subprocess.Popen[str], text: str, count: int) -> None:
    assert launcher.stdout is not None
    for line in launcher.stdout:
        count -= text in line
        if not count:
            return
    raise AssertionError(launcher.communicate()[1])


def notes(folder: Path) -> dict[str, list[str]]:
    files = (path for path in sorted(folder.iterdir()) if path.is_file())
    return {path.name: path.read_text().splitlines() for path in files}


def summary_of(text: str) -> str:
    """The summary in *text*, without times, names of machines and numbers of processes."""
    found = text[text.rindex("=\n", 0, text.index(" FAILED")) :]
    found = re.sub(r"(time|host|error_file) *: .*", r"\1", found)
    return re.sub(r"(pid: |PID )\d+", r"\1", found)


def test_a_script_finds_what_it_finds_under_torchrun(tmp_path: Path) -> None:
    found: list[dict[str, Any]] = []
    for command in (PHALANX, TORCHRUN):
        folder = tmp_path / command[-1]
        folder.mkdir()
        words = ("--standalone", "--nproc_per_node=2", "--max-restarts=3", f"./{SCRIPT.name}")
        with SCRIPT.open() as stdin:
            more: dict[str, Any] = {"command": command, "cwd": SCRIPT.parent, "stdin": stdin}
            done = run(*words, "everything", folder, **more)

        assert (done.returncode, sorted(done.stdout.splitlines())) == (
            *(0, ["rank 0 ends", "rank 1 ends"]),
        ), done.stderr
        ranks = {name[0]: lines for name, lines in notes(folder).items()}
        assert {rank: lines[1:] for rank, lines in ranks.items()} == {
            "0": ["thread", "atexit", "finalized"],
            "1": ["thread", "atexit", "finalized"],
        }
        found.append({rank: json.loads(lines[0]) for rank, lines in ranks.items()})

    ours, theirs = found
    for rank in ours:
        environs = ours[rank].pop("environ"), theirs[rank].pop("environ")
        assert ours[rank].pop("argv")[:-1] == theirs[rank].pop("argv")[:-1]
        assert ours[rank] == theirs[rank]
        varies = {
            "TMPDIR",
            "MASTER_ADDR",
            "MASTER_PORT",
            "TORCHELASTIC_RUN_ID",
            "TORCHELASTIC_ERROR_FILE",
        }
        mine, other = ({**each, **dict.fromkeys(varies)} for each in environs)
        added = {"GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"}
        assert {name: mine.get(name) for name in mine.keys() - added} == other


def test_what_a_script_has_written_is_in_its_files_also_if_a_rank_fails(tmp_path: Path) -> None:
    done = run("--nproc-per-node", 2, SCRIPT, "unclosed", tmp_path)

    assert done.returncode == 1
    assert notes(tmp_path) == {"0.loss": ["0.5"], "1.loss": ["0.5"]}


def test_after_a_death_all_ranks_run_again_at_another_port() -> None:
    words = ("--nproc-per-node", 2, "--max-restarts", 1, SCRIPT, "killed")

    done = run(*words)

    assert done.returncode == 0, done.stderr
    lines = re.findall(r"rank (\d) round (\d) port (\d+)", done.stdout)
    assert {(rank, round_) for rank, round_, _ in lines} == {
        *(("0", "0"), ("1", "0"), ("0", "1"), ("1", "1")),
    }
    assert len({port for _, _, port in lines}) == 2
    assert "restart 1 of 1: all ranks run again" in done.stderr


DIES_IN_ITS_START = """
import os, pathlib, signal

forks = 0

def once():
    global forks
    forks += 1
    if forks < 2:
        return  # the zygote's child, whose child is the rank
    try:
        pathlib.Path(os.environ["MARK"]).touch(exist_ok=False)
    except FileExistsError:
        return
    os.kill(os.getpid(), signal.SIGKILL)

os.register_at_fork(after_in_child=once)
"""
COUNTS = """
import os, sys
print(os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"], "mortal" in sys.modules)
sys.exit(os.environ["TORCHELASTIC_RESTART_COUNT"] == "1")
"""


@pytest.mark.parametrize(("most", "code"), [(2, 0), (0, 1)])
def test_a_death_in_the_very_first_start_costs_a_restart(
    tmp_path: Path, most: int, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mortal.py").write_text(DIES_IN_ITS_START)
    (tmp_path / "counts.py").write_text(COUNTS)
    monkeypatch.setenv("MARK", str(tmp_path / "mark"))
    words = ("--nproc-per-node", 2, "--max-restarts", most, "--preload", "mortal", "-t", 3)

    done = run(*words, "--log-dir", tmp_path / "logs", tmp_path / "counts.py")

    assert done.returncode == code, done.stderr
    rounds = [f"[default{rank}]:{rank} {number} True" for number in "12" for rank in "01"]
    assert sorted(done.stdout.splitlines()) == sorted(rounds if most else [])
    if most:
        assert re.findall(r"restart (\d of \d)", done.stderr) == ["1 of 2", "2 of 2"]
    else:
        assert "could not be started: rank" in done.stderr


@pytest.mark.parametrize("safe_path", ["", "1"])
def test_a_zip_and_a_folder_are_found_from_any_folder(
    tmp_path: Path, safe_path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONSAFEPATH", safe_path)
    folder = tmp_path / "app"
    folder.mkdir()
    (folder / "later.py").write_text("VALUE = 4")
    text = "import os, sys; os.chdir('/'); import later; print(later.VALUE, __file__, sys.path[0])"
    (folder / "__main__.py").write_text(text)
    archive = shutil.make_archive(str(folder), "zip", folder)

    for target in ("app", "./app", Path(archive).name):
        fresh = run_program([sys.executable, target], timeout=LONG, cwd=tmp_path)
        done = run(target, cwd=tmp_path)

        assert (done.returncode, done.stdout) == (0, fresh.stdout), done.stderr
        assert fresh.stdout.startswith("4 ")


@pytest.mark.parametrize("how", ["raise", pytest.param("text", marks=pytest.mark.soak)])
def test_a_failure_ends_in_1_and_its_summary_as_under_torchrun(tmp_path: Path, how: str) -> None:
    words = ("--nproc-per-node", 2, "-r", "1:1", "-t", "0:3,1:2", "--rdzv-id", "job")
    where = ("--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", "--log-dir")

    folder = tmp_path / "phalanx"
    done = run(*words, *where, folder, SCRIPT, "fails", how, tmp_path)

    assert done.returncode == 1
    (run_folder,) = folder.iterdir()
    assert run_folder.name.startswith("job_")
    files = {str(path.relative_to(run_folder)) for path in run_folder.rglob("*") if path.is_file()}
    raised = {"attempt_0/1/error.json"} if how == "raise" else set[str]()
    assert files == raised | {
        f"attempt_0/{rank}/std{x}.log" for rank in "01" for x in ("out", "err")
    }
    assert (run_folder / "attempt_0/1/stdout.log").read_text() == "out 1\nno end"
    assert "out 1" not in done.stdout
    assert done.stdout.splitlines() == ["[default0]:out 0", "[default0]:no end"]
    assert "[default1]:err 1\n" in done.stderr
    title, _, rest = summary_of(done.stderr).partition(" FAILED\n")
    assert title.endswith(str(SCRIPT))
    others, _, first = rest.partition("Root Cause (first observed failure):\n")
    assert "rank      : 0 (local_rank: 0)\n  exitcode  : -15 (pid: )  (SIGTERM)" in others
    assert "rank      : 1 (local_rank: 1)\n  exitcode  : 1 (pid: )" in first
    if raised:
        record = json.loads((run_folder / "attempt_0/1/error.json").read_text())["message"]
        assert record["message"] == "ValueError: bad 0"
        assert "ValueError: bad 0" in first
        assert "interpreter.py" not in record["extraInfo"]["py_callstack"]
    if how == "text":
        assert "[default1]:a text\n" in done.stderr


def test_a_run_folder_and_a_summary_are_torchruns(tmp_path: Path) -> None:
    found: list[object] = []
    for command in (PHALANX, TORCHRUN):
        folder = tmp_path / command[-1]
        words = ("--nproc-per-node", 2, "--max-restarts", 1, "-r", 3, "--log-dir", folder / "logs")
        folder.mkdir()
        done = run(*words, SCRIPT, "fails", "record", folder, command=command)
        logs = [path for path in folder.rglob("logs/**/*") if path.is_file()]
        files = sorted("/".join(path.relative_to(folder).parts[2:]) for path in logs)
        found.append((done.returncode, files, summary_of(done.stderr)))

    ours, theirs = found
    assert ours == theirs


def test_a_script_runs_without_a_stdout(tmp_path: Path) -> None:
    (tmp_path / "prints.py").write_text("import sys; print(1); sys.exit(sys.stdout is not None)")
    closed = ("bash", "-c", 'exec "$0" "$@" >&-')

    done = run(tmp_path / "prints.py", command=(*closed, *PHALANX))

    assert done.returncode == 0, done.stderr


def test_a_module_and_a_program_are_run(tmp_path: Path) -> None:
    package = tmp_path / "pack"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "value.py").write_text("VALUE = 4")
    (package / "main.py").write_text(
        "import sys\nfrom .value import VALUE\nprint(VALUE, __name__, __package__, sys.argv[1:])"
    )
    program = tmp_path / "program"
    program.write_text('#!/bin/sh\necho "$RANK $1$TORCHELASTIC_ERROR_FILE"\nexit $2\n')
    program.chmod(0o755)
    broken = tmp_path / "broken"
    broken.write_text("no program")
    broken.chmod(0o755)

    compiled = tmp_path / "compiled.pyc"
    (tmp_path / "source.py").write_text("print(__name__, __file__)")
    py_compile.compile(str(tmp_path / "source.py"), cfile=str(compiled))

    module = run("-m", "pack.main", "a", cwd=tmp_path)
    script = run(compiled)
    no_files = ("--log-dir", os.devnull, "-r", 3)
    fails = run(*no_files, "--no-python", "./program", "c", 7, cwd=tmp_path)
    no_start = run("--no-python", "./broken", cwd=tmp_path)

    assert (module.returncode, module.stdout) == (0, "4 __main__ pack ['a']\n"), module.stderr
    assert (script.returncode, script.stdout) == (0, f"__main__ {compiled}\n"), script.stderr
    assert (fails.returncode, fails.stdout) == (1, "0 c\n")
    assert "./program FAILED" in fails.stderr
    assert "exitcode  : 7 " in fails.stderr
    assert "<NO_OTHER_FAILURES>" in fails.stderr
    assert (no_start.returncode, "Exec format error" in no_start.stderr) == (1, True)


NAMES = """
import sys, torch, torch._dynamo
files = {name for name, each in sys.modules.items() if getattr(each, "__file__", None)}
print(*{name.partition(".")[0] for name in files})
"""
IMPORTS = """
import importlib, sys
print(*{importlib.import_module(name).OWN for name in sys.argv[1:]})
"""


def test_a_script_has_its_own_modules_though_others_of_their_names_are_imported(
    tmp_path: Path,
) -> None:
    (tmp_path / "names.py").write_text(NAMES)
    own = tmp_path / "own"
    own.mkdir()
    (own / "imports.py").write_text(IMPORTS)
    fresh = run_program([sys.executable, "names.py"], timeout=LONG, cwd=tmp_path)
    warm = run("names.py", cwd=tmp_path)
    names = {*warm.stdout.split()} - {*fresh.stdout.split(), "phalanx"}
    assert "sched" in names, warm.stderr
    for name in names:
        (own / f"{name}.py").write_text("OWN = True")

    done = run(own / "imports.py", *names)

    assert (done.returncode, done.stdout) == (0, "True\n"), done.stderr


REPLACED = """
import os, sys
try:
    os.execv("/no/program", ["program"])
except FileNotFoundError:
    os.environ["FOUND"] = "none"
if not os.fork():
    os.execlp("sh", "sh", "-c", "exit 5")
child = os.waitstatus_to_exitcode(os.wait()[1])
code = sys.argv[1] if os.environ["RANK"] == "1" else "0"
os.execvpe("sh", [f"{child}", "-c", "echo $0 $RANK $FOUND; exit " + code], os.environ)
"""


@pytest.mark.parametrize("code", [0, 7])
def test_a_script_may_put_another_program_in_its_place(tmp_path: Path, code: int) -> None:
    (tmp_path / "replaced.py").write_text(REPLACED)

    done = run("--nproc-per-node", 2, "replaced.py", code, cwd=tmp_path)

    assert done.returncode == (1 if code else 0), done.stderr
    assert "5 1 none" in done.stdout.splitlines()
    assert ("exitcode  : 7 " in done.stderr) == (code == 7)


ENDS = """
import os, pathlib, sys, time
note = pathlib.Path(sys.argv[1])
if os.environ["RANK"] == "0":
    note.with_suffix(".new").write_text(str(os.getpid()))
    note.with_suffix(".new").rename(note)
    sys.exit()
while not note.exists():
    time.sleep(0.01)
while True:  # until it would succeed at SIGTERM, which has its default effect in a script
    lines = pathlib.Path(f"/proc/{note.read_text()}/status").read_text().splitlines()
    if int(next(line for line in lines if line.startswith("SigCgt")).split()[1], 16) >> 14 & 1:
        sys.exit(1)
    time.sleep(0.01)
"""
ENDS_IN_BASH = """
if [ $RANK = 0 ]; then echo $$ > $0.new; mv $0.new $0; exit; fi
while [ ! -e $0 ]; do sleep 0.01; done
while kill -0 $(cat $0) 2> /dev/null; do sleep 0.01; done
exit 1
"""


@pytest.mark.parametrize("words", [("ends.py",), ("--no-python", "bash", "-c", ENDS_IN_BASH)])
def test_a_rank_that_has_succeeded_holds_up_no_failure_and_is_none(
    tmp_path: Path, words: tuple[str, ...]
) -> None:
    (tmp_path / "ends.py").write_text(ENDS)

    options = ("--nproc-per-node", 2, "--shutdown-timeout", 1000)
    done = run(*options, *words, tmp_path / "note", cwd=tmp_path)

    assert done.returncode == 1
    assert "exitcode  : 1 " in done.stderr
    assert "<NO_OTHER_FAILURES>" in done.stderr, done.stderr


def test_ranks_that_leave_by_os_exit_have_succeeded(tmp_path: Path) -> None:
    with running("--nproc-per-node", 2, SCRIPT, "leaves", tmp_path) as launcher:
        wait_until(lambda: any("ends" in lines for lines in notes(tmp_path).values()))
        (tmp_path / "go").touch()

        assert launcher.wait(LONG) == 0, launcher.communicate()
    assert [lines for name, lines in notes(tmp_path).items() if name != "go"] == [
        ["begins", "ends"]
    ] * 2


KEEPS_ITS_GROUP = """
import sys
sys.path.insert(0, sys.argv[1])
import torch.distributed as dist
from tests.support.fake_nccl import NAME, register
register()
dist.init_process_group(NAME)
"""


def test_a_rank_that_cannot_abort_its_groups_has_succeeded_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_NCCL_ABORT", "raise")
    monkeypatch.setenv("FAKE_NCCL_LOG", str(tmp_path / "aborts"))
    (tmp_path / "keeps.py").write_text(KEEPS_ITS_GROUP)

    done = run("--nproc-per-node", 2, tmp_path / "keeps.py", Path(__file__).parents[3])

    assert done.returncode == 0, done.stderr
    assert sorted((tmp_path / "aborts").read_text().split()[::3]) == ["0", "1"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_is_passed_on_and_ends_the_run(tmp_path: Path, number: signal.Signals) -> None:
    with running("--nproc-per-node", 2, SCRIPT, "waits", tmp_path) as launcher:
        wait_for(launcher, "waits", 2)
        launcher.send_signal(number)

        _, stderr = launcher.communicate(timeout=LONG)

    assert launcher.returncode == 1
    assert f"ended by {number.name}" in stderr
    if number == signal.SIGTERM:
        assert list(notes(tmp_path).values()) == [["SIGTERM"]] * 2
    else:
        assert stderr.count("KeyboardInterrupt") == 2


NOTES = "trap 'echo told > $0; exit' USR1; echo waits; while :; do sleep 0.1; done"


def test_a_program_gets_each_signal_that_is_to_be_passed_on(tmp_path: Path) -> None:
    words = ("--signals-to-handle", "SIGUSR1", "--no-python", "bash", "-c", NOTES)
    with running(*words, tmp_path / "note") as launcher:
        wait_for(launcher, "waits", 1)
        launcher.send_signal(signal.SIGUSR1)

        _, stderr = launcher.communicate(timeout=LONG)

    assert launcher.returncode == 1
    assert "ended by SIGUSR1" in stderr
    assert (tmp_path / "note").read_text() == "told\n"


def test_a_rank_that_does_nothing_is_ended_and_all_run_again() -> None:
    words = ("--nproc-per-node", 2, "--max-restarts", 1, "--hang-after", 2, SCRIPT, "hangs")

    done = run(*words)

    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["rank 0 ends", "rank 1 ends"]
    assert re.search(r"rank 1 \(pid \d+\) died: unresponsive", done.stderr)
    assert "in hangs" in done.stderr


def test_a_rank_that_handles_sigterm_ends_in_its_time_and_holds_up_no_restart(
    tmp_path: Path,
) -> None:
    words = ("--nproc-per-node", 2, "--max-restarts", 1, "--shutdown-timeout", 1000)

    done = run(*words, SCRIPT, "saves", tmp_path)

    assert done.returncode == 0, done.stderr
    assert list(notes(tmp_path).values()) == [["waits", "saved"]]


def test_a_run_is_shown_by_phalanx_top_and_leaves_nothing_where_its_launcher_is_killed(
    tmp_path: Path,
) -> None:
    with running("--nproc-per-node", 2, SCRIPT, "waits", tmp_path) as launcher:
        wait_for(launcher, "waits", 2)
        shown = run("--json", launcher.pid, command=TOP)
        launcher.kill()

        assert launcher.wait(LONG) == -signal.SIGKILL
    assert shown.returncode == 0, shown.stderr
    (group,) = json.loads(shown.stdout)["groups"]
    assert group["group"] == "torchrun_script"
    assert [rank["rank"] for rank in group["ranks"]] == [0, 1]
