"""The command line of `phalanx torchrun`: spellings, what is refused, what is ignored."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from phalanx.cli import main
from phalanx.errors import SpecError
from phalanx.integrations.torchrun import Options, add_arguments, options_of


@pytest.fixture(autouse=True)
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")
    package = tmp_path / "pack" / "inner"
    package.mkdir(parents=True)
    for folder in (package.parent, package):
        (folder / "__init__.py").write_text("raise RuntimeError('imported')")
    (package / "main.py").write_text("")
    (package / "__main__.py").write_text("")
    return tmp_path / "train.py"


def options(*words: str, **environ: str) -> Options:
    parser = argparse.ArgumentParser()
    add_arguments(parser, environ)
    return options_of(parser.parse_args(words), environ)


@pytest.mark.parametrize(
    "words",
    [
        ["--nproc-per-node", "3", "--max-restarts", "2", "--role", "r"],
        ["--nproc_per_node=3", "--max_restarts=2", "--role=r"],
        ["--nproc_per=3", "--max-r", "2", "--rol", "r"],
    ],
)
def test_options_are_spelt_as_torchrun_takes_them(words: list[str]) -> None:
    found = options(*words, "train.py", "--nproc-per-node", "9", "-m")

    assert found.world_size == 3
    assert (found.environment.max_restarts, found.environment.role) == (2, "r")
    assert found.program.args == ("--nproc-per-node", "9", "-m")


def test_variables_stand_for_options_and_the_command_line_goes_before() -> None:
    environ = {"PET_NPROC_PER_NODE": "3", "PET_MAX_RESTARTS": "4", "PET_MODULE": "1"}

    found = options("--max-restarts", "1", "pack.inner.main", **environ)

    assert (found.world_size, found.environment.max_restarts) == (3, 1)
    assert found.program.kind == "module"


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["nothing.py"], "training_script='nothing.py'"),
        (["pack"], "training_script='pack'"),
        (["-m", "pack.nothing"], "pack.nothing"),
        (["-m", "nothing_at_all"], "--module='nothing_at_all'"),
        (["--no-python", "no-such-program"], "training_script='no-such-program'"),
        (["--no-python", "./train.py"], "not executable"),
        (["-m", "--no-python", "train"], "--no-python"),
        (["-m", "--run-path", "train"], "--run-path"),
        (["--nnodes", "2", "train.py"], "--nnodes='2'"),
        (["--nnodes", "1:2", "train.py"], "--nnodes='1:2'"),
        (["--nnodes", "x", "train.py"], "--nnodes='x'"),
        (["--node-rank", "1", "train.py"], "--node-rank=1"),
        (["--nproc-per-node", "0", "train.py"], "--nproc-per-node='0'"),
        (["--nproc-per-node", "many", "train.py"], "--nproc-per-node='many'"),
        (["--nproc-per-node", "gpu", "train.py"], "--nproc-per-node='gpu'"),
        (["--max-restarts", "-1", "train.py"], "--max-restarts=-1"),
        (["--hang-after", "0", "train.py"], "--hang-after=0.0"),
        (["--longest-delay", "nan", "train.py"], "--longest-delay=nan"),
        (["--shutdown-timeout", "inf", "train.py"], "--shutdown-timeout=inf"),
        (["--redirects", "4", "train.py"], "--redirects='4'"),
        (["--tee", "1:4", "train.py"], "--tee='1:4'"),
        (["--local-ranks-filter", "a", "train.py"], "--local-ranks-filter='a'"),
        (["--log-dir", "train.py", "train.py"], "--log-dir='train.py'"),
        (["--report-dir", "train.py", "train.py"], "--report-dir='"),
        (["--master-addr", "192.0.2.7", "train.py"], "--master-addr='192.0.2.7'"),
        (["--rdzv-endpoint", "192.0.2.7:29400", "train.py"], "--rdzv-endpoint='192.0.2.7'"),
        (["--master-port", "70000", "train.py"], "--master-port=70000"),
        (["--master-port", "0", "--rdzv-id", "a/b", "train.py"], "--rdzv-id='a/b'"),
        (["--signals-to-handle", "SIGNONE", "train.py"], "--signals-to-handle='SIGNONE'"),
        (["--signals-to-handle", "SIGKILL", "train.py"], "--signals-to-handle='SIGKILL'"),
        (["--numa-binding", "node", "train.py"], "--numa-binding='node'"),
        (["--logs-specs", "mine", "train.py"], "--logs-specs='mine'"),
    ],
)
def test_what_makes_no_sense_is_refused_by_option_and_value(words: list[str], named: str) -> None:
    with pytest.raises(SpecError) as refused:
        options(*words)

    assert named in str(refused.value)


def test_the_command_ends_with_2_where_there_is_no_script(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["torchrun", "nothing.py"]) == 2
    assert capsys.readouterr().err == (
        "phalanx torchrun: training_script='nothing.py': no such file\n"
    )


def test_a_switch_that_is_not_needed_is_accepted_and_said_to_be_ignored() -> None:
    words = ["--monitor-interval", "5", "--master-port", "29501", "--start-method", "fork"]

    found = options(*words, "--rdzv-backend", "c10d", "--master-addr", "localhost", "train.py")

    said = [line.partition(" is ignored: ")[0] for line in found.ignored]
    assert said == [
        "--rdzv-backend c10d",
        "--monitor-interval 5.0",
        "--start-method fork",
        "--master-addr localhost",
        "--master-port 29501",
    ]
    assert options("--standalone", "--nnodes", "1:1", "train.py").ignored == ()


def test_ranks_that_there_are_not_and_more_machines_than_there_are_may_be_named() -> None:
    words = ["--nproc-per-node", "2", "--standalone", "--nnodes", "1:2", "-r", "0:3,7:3"]

    logs = options(*words, "--local-ranks-filter", "1, 7", "train.py").logs

    assert (logs.redirects, logs.shown) == ((3, 0), frozenset({1, 7}))


def test_without_a_log_folder_all_output_is_shown() -> None:
    words = ["--log-dir", "/dev/null", "-r", "3", "-t", "1", "--local-ranks-filter", "4"]

    logs = options(*words, "train.py").logs

    assert not logs.has_files
    assert (logs.redirects, logs.tee, logs.shown) == ((0,), (0,), frozenset())


@pytest.mark.parametrize(
    ("words", "run_id"),
    [
        (["--rdzv-backend", "c10d", "--rdzv-id", "job"], "job"),
        (["--master-port", "29501", "--rdzv-id", "job"], "job"),
        (["--rdzv-backend", "c10d"], "none"),
    ],
)
def test_the_id_of_the_run_is_the_one_given(words: list[str], run_id: str) -> None:
    assert options(*words, "train.py").environment.run_id == run_id


@pytest.mark.parametrize("words", [[], ["--standalone", "--rdzv-backend", "c10d"]])
def test_a_standalone_run_has_an_id_of_its_own(words: list[str]) -> None:
    found = [options(*words, "--rdzv-id", "a", "train.py") for _ in "ab"]

    assert len({"a", *(each.environment.run_id for each in found)}) == 3
    assert found[0].ignored[-1].startswith("--rdzv-id a is ignored: ")


def test_cpu_means_a_rank_for_each_processor_that_may_be_used() -> None:
    assert options("--nproc-per-node", "cpu", "train.py").world_size == len(os.sched_getaffinity(0))


def test_a_module_is_found_without_importing_its_package() -> None:
    assert options("-m", "pack.inner.main").program.kind == "module"
    assert options("-m", "pack.inner").program.kind == "module"


def test_another_interpreter_runs_as_a_command(script: Path) -> None:
    other = script.with_name("python")
    other.symlink_to(sys.executable)

    found = options("-m", "pack.inner", "a", PYTHON_EXEC=str(other)).program

    assert (found.kind, found.target) == ("command", str(other))
    assert found.args == ("-u", "-m", "pack.inner", "a")
    assert options("train.py", PYTHON_EXEC=sys.executable).program.kind == "script"


def test_the_local_rank_is_put_into_arguments() -> None:
    program = options("train.py", "--out=${local_rank}.txt", "$HOME").program

    assert program.args_of(1) == ["--out=1.txt", "$HOME"]


def test_signals_and_their_time_are_those_given() -> None:
    found = options(
        *("--signals-to-handle", "SIGTERM,SIGUSR1", "train.py"), TORCH_ELASTIC_SHUTDOWN_TIMEOUT="4"
    )

    assert found.signals == (signal.SIGTERM, signal.SIGUSR1)
    assert found.shutdown_timeout == 4.0
    assert options("--shutdown-timeout", "7", "train.py").shutdown_timeout == 7.0


TWO: dict[str, str | None] = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": None}


@pytest.mark.parametrize(
    ("ranks", "environ", "expected"),
    [
        ("2", {}, TWO),
        ("1", {}, TWO | {"OMP_NUM_THREADS": None}),
        ("2", {"OMP_NUM_THREADS": "3"}, TWO | {"OMP_NUM_THREADS": "3"}),
        ("2", {"CUDA_VISIBLE_DEVICES": "4,5"}, TWO | {"CUDA_VISIBLE_DEVICES": "4,5"}),
    ],
)
def test_a_rank_has_the_variables_that_torchrun_sets(
    ranks: str, environ: Mapping[str, str], expected: Mapping[str, str | None]
) -> None:
    words = ["--nproc-per-node", ranks, "--max-restarts", "5", "--rdzv-id", "job", "train.py"]
    rank = int(ranks) - 1

    found = options("--rdzv-backend=c10d", *words, **environ).environment.of_rank(
        rank, 3, "/e.json", "127.0.0.1", 4711
    )

    assert found == {
        **expected,
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "GROUP_RANK": "0",
        "ROLE_RANK": str(rank),
        "ROLE_NAME": "default",
        "WORLD_SIZE": ranks,
        "LOCAL_WORLD_SIZE": ranks,
        "GROUP_WORLD_SIZE": "1",
        "ROLE_WORLD_SIZE": ranks,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "4711",
        "TORCHELASTIC_RESTART_COUNT": "3",
        "TORCHELASTIC_MAX_RESTARTS": "5",
        "TORCHELASTIC_RUN_ID": "job",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_ERROR_FILE": "/e.json",
    }


def test_a_virtual_local_rank_is_0_and_sees_its_own_gpu() -> None:
    words = ["--virtual-local-rank", "--nproc-per-node", "2", "train.py"]

    plain = options(*words).environment.of_rank(1, 0, "", "", 0)
    chosen = options(*words, CUDA_VISIBLE_DEVICES="4, 5").environment.of_rank(1, 0, "", "", 0)

    assert (plain["LOCAL_RANK"], plain["CUDA_VISIBLE_DEVICES"]) == ("0", "1")
    assert chosen["CUDA_VISIBLE_DEVICES"] == "5"
    with pytest.raises(SpecError, match="--virtual-local-rank='4'"):
        options(*words, CUDA_VISIBLE_DEVICES="4")
