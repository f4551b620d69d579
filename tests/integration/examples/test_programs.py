"""Each example, run as its user runs it, with ranks killed while they work."""

from __future__ import annotations

import random
import re
import runpy
import sys
from pathlib import Path

import pytest
from tests.support.programs import run_python

EXAMPLES = Path(__file__).parents[3] / "examples"
PROGRAMS = sorted(EXAMPLES.glob("*.py"))
pytestmark = [pytest.mark.timeout(300), pytest.mark.usefixtures("phalanx_leak_check")]


def run(name: str, *words: str) -> str:
    """Run the example *name*; return what it printed, once it has succeeded."""
    return run_and_log(str(EXAMPLES / f"{name}.py"), *words)[0]


def run_and_log(*words: str) -> tuple[str, str]:
    """Run Python with *words*; return what was printed, and the log."""
    done = run_python(*words, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout, done.stderr


def run_pipeline(name: str, *, ranks: int, kills: int, seed: int, options: tuple[str, ...]) -> None:
    words = ["--ranks", str(ranks), "--kills", str(kills), "--seed", str(seed), *options]
    said, log = run_and_log(str(EXAMPLES / f"{name}.py"), *words, "--passages", "250")
    # Gloo raises no error in a rank that was in the middle of a message to or from the dead one.
    replaced = log.count("it is in the middle of a message of gloo); replace rank")

    assert said.count("killed rank") == kills
    found = re.search(r"^8 calls answered in \S+ s; restarts: (\d+)$", said, re.MULTILINE)
    assert found, said
    # A rank that is killed while nothing is left for it to do may come back after the count.
    assert kills - (name == "batch_inference") <= int(found[1]) <= kills + replaced
    difference = re.search(r"^largest difference from one process: (\S+)$", said, re.MULTILINE)
    assert difference, said
    assert float(difference[1]) < 1e-5
    assert len(re.findall(r"^  \d\.\d\d  ", said, re.MULTILINE)) == 3


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("batch_inference", ()),
        ("pipeline_parallel", ()),
        ("tensor_parallel", ("--survivors", "keep")),
        pytest.param("tensor_parallel", ("--survivors", "restart"), marks=pytest.mark.soak),
    ],
)
def test_ranks_are_killed_at_work_and_the_result_is_that_of_one_process(
    name: str, options: tuple[str, ...]
) -> None:
    run_pipeline(name, ranks=3, kills=2, seed=1, options=options)


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", ["batch_inference", "tensor_parallel", "pipeline_parallel"])
def test_thirty_runs_with_kills_all_end_with_the_result_of_one_process(name: str) -> None:
    chance = random.Random(name)
    for _ in range(30):
        ranks, kills, seed = chance.randint(2, 4), chance.randint(1, 3), chance.randrange(1 << 32)
        run_pipeline(name, ranks=ranks, kills=kills, seed=seed, options=())


def test_the_quickstart_loses_a_worker_and_gives_the_right_number() -> None:
    said = run("quickstart")

    assert "killed rank 1" in said
    assert "17984 primes; restarts: 1" in said


def test_workers_with_state_count_every_word_once_and_go_on_in_the_next_run(tmp_path: Path) -> None:
    first = run("checkpointed_state", str(tmp_path / "states"))
    second = run("checkpointed_state", str(tmp_path / "states"))

    words, _, told = first.partition(" words, ")
    assert told.endswith("right=True\nthis run began at line 0 of 210\n")
    assert second.startswith(f"{words} words, 0 restarts: right=True\nthis run began at line 2")


TRAINING = ("--seed", "3", "--plot")


@pytest.mark.parametrize("name", ["train_ddp", pytest.param("train_fsdp", marks=pytest.mark.soak)])
def test_training_through_a_kill_ends_with_the_undisturbed_weights(
    name: str, tmp_path: Path
) -> None:
    said = run(name, "--steps", "6", "--kills", "1", *TRAINING, str(tmp_path / "loss.png"))

    assert said.endswith("equal: yes\n")
    header, row = said[said.index("steps ") :].splitlines()[:2]
    assert header.startswith("steps  kills  done again  samples lost  doubled")
    assert (row.split()[:2], row.split()[3:5]) == (["6", "1"], ["0", "0"])
    assert (tmp_path / "loss.png").stat().st_size > 1000


@pytest.mark.soak
@pytest.mark.parametrize("name", ["train_ddp", "train_fsdp"])
def test_training_on_four_ranks_through_thirty_kills_does_too(name: str, tmp_path: Path) -> None:
    options = ("--ranks", "4", "--steps", "90", "--kills", "30")
    said = run(name, *options, *TRAINING, str(tmp_path / "loss.png"))

    assert said.endswith("equal: yes\n")


@pytest.mark.soak
def test_a_script_of_torchrun_goes_on_from_its_checkpoint_to_the_same_weights(
    tmp_path: Path,
) -> None:
    said: list[str] = []
    for more in (["--die-at=7"], []):
        command = ["-m", "phalanx", "torchrun", "--nproc-per-node=2", "--max-restarts=1"]
        command += [str(EXAMPLES / "torchrun_script.py"), "--steps=12", "--every=5", "--batch=4"]
        checkpoint = str(tmp_path / f"{len(said)}.pt")
        said.append(run_and_log(*command, "--checkpoint", checkpoint, *more)[0])

    assert "round 1: from step 5" in said[0]
    killed, whole = (re.findall(r"^12 steps, weights (\w+)$", each, re.MULTILINE) for each in said)
    assert killed == whole != []


@pytest.mark.parametrize("options", [(), ("--toml",)], ids=["python", "toml"])
def test_failures_in_a_tree_are_healed_by_each_level_in_its_turn(options: tuple[str, ...]) -> None:
    said = run("supervision_tree", *options)

    assert re.findall(r"healed by (\w+)", said) == ["draft", "models", "draft", "app"]
    assert "holders=('app/models/target/0', 'app/models/draft/0', 'app/models/draft/1')" in said
    assert said.count("journal  permanent, running\n") == 2  # in its first incarnation


def test_a_dataset_has_one_output_for_each_input_when_driver_and_ranks_are_killed(
    tmp_path: Path,
) -> None:
    options = ("--limit", "40", "--kills", "2", "--kill-driver")
    said = run("process_dataset", str(tmp_path), *options)

    assert "killed the driver" in said
    there = re.search(r"^40 inputs, (\d+) outputs are there$", said, re.MULTILINE)
    assert there, said
    assert 20 <= int(there[1]) < 40
    assert said.count("killed a rank") == 2
    assert "40 inputs, 40 outputs, one for each: True\n" in said
    assert len(list(tmp_path.iterdir())) == 40
    again = run("process_dataset", str(tmp_path), "--limit", "40")
    assert again.startswith("40 inputs, 40 outputs are there\n")
    (tmp_path / "of_another_program.json").write_text("{}")
    part = run("process_dataset", str(tmp_path), "--limit", "20")
    assert "20 inputs, 20 outputs, one for each: True\n" in part


def test_rollouts_through_kills_end_with_the_weights_of_the_undisturbed_run() -> None:
    calm = run("rl_rollouts", "--versions", "10", "--kills", "0")
    # The only rank is killed with calls in flight, so its successor is asked before it has weights.
    said = run("rl_rollouts", "--versions", "10", "--kills", "2", "--ranks", "1")

    assert "trajectories 80 lost 0 doubled 0 stale 0\n" in said
    assert re.search(r"restarted 2 calls without weights [1-9]", said)
    right = re.findall(r"^version \d+: (\d+)%", said, re.MULTILINE)
    assert int(right[-1]) >= 4 * int(right[0]) > 0  # it learns
    assert calm.splitlines()[-1] == said.splitlines()[-1] != ""


def test_the_tests_of_a_worker_pass_and_find_a_worker_that_forgets(tmp_path: Path) -> None:
    source = (EXAMPLES / "test_my_worker.py").read_text()
    options = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "phalanx.testing"]
    options += ["-p", "no:timeout"]  # phalanx needs no other plug-in
    (tmp_path / "test_forgets.py").write_text(source.replace("self.balances = state", "del state"))

    right = run_python(*options, str(EXAMPLES / "test_my_worker.py"), timeout=240)
    wrong = run_python(*options, "-k", "death", str(tmp_path / "test_forgets.py"), timeout=240)

    assert "5 passed" in right.stdout, right.stdout
    assert "assert 3 == 5" in wrong.stdout, wrong.stdout
    assert "1 failed, 1 passed" in wrong.stdout


@pytest.mark.parametrize(
    ("name", "words", "told"),
    [
        ("pipeline_parallel", "--ranks 7", "--ranks 7: give 1 to 6"),
        ("tensor_parallel", "--ranks 13", "--ranks 13: give 1 to 12"),
        ("batch_inference", "--passages 0", "--passages 0: give 1 to"),
        ("tensor_parallel", "--kills -1", "--kills -1: give 0 to 62"),
        ("pipeline_parallel", "--passages 31 --kills 1", "--kills 1: give 0 to 0"),
        ("batch_inference", "--device cuda --ranks 64", "--device cuda: 64 ranks need"),
        ("cluster_ray", "--kills -1", "--kills -1: give 0 to"),
        ("cluster_ray", "--passages 31 --kills 1", "--kills 1: give 0 to 0"),
        ("rl_rollouts", "--kills -1", "--kills -1: give 0 to 100"),
        ("serve_fastapi", "--port 99999", "--port 99999: give 0 to 65535"),
        ("process_dataset", "OUT --limit -1", "--limit -1: give 1 to"),
        ("process_dataset", "/proc/none", "out: [Errno 2] No such file or directory: '/proc/none'"),
        ("train_ddp", "--plot none/x.png", "--plot none/x.png: name a .png in a folder"),
        ("train_fsdp", "--ranks -1", "--ranks -1: give 1 to"),
        ("torchrun_script", "--every 0", "--every 0: give at least 1"),
        ("checkpointed_state", "/proc/none", "checkpoint.where='/proc/none': cannot be used"),
        ("vllm_quickstart", "MODEL 0", "argument ranks: invalid choice: 0"),
    ],
)
def test_what_an_example_cannot_do_it_says_before_it_starts(
    name: str,
    words: str,
    told: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = str(EXAMPLES / f"{name}.py")
    monkeypatch.setattr(sys, "argv", [path, *words.split()])
    monkeypatch.chdir(tmp_path)

    with pytest.raises(SystemExit) as end:  # in this process: most import torch, and do no more
        runpy.run_path(path, run_name="__main__")

    assert end.value.code == 2
    assert f"{name}.py: error: {told}" in capsys.readouterr().err.splitlines()[-1]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.stem)
def test_an_example_is_one_file_that_can_be_read_at_once(program: Path) -> None:
    limit = 40 if program.stem == "quickstart" else 150

    assert len(program.read_text().splitlines()) <= limit
