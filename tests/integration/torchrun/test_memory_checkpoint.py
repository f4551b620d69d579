"""A script under `phalanx torchrun` goes on from memory, and ends as if no rank had died."""

from __future__ import annotations

import os
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.programs import run_program

from phalanx.integrations.torch import MemoryCheckpoint, State, TrainingError
from phalanx.supervision import SpecError

PHALANX = (sys.executable, "-m", "phalanx", "torchrun")
TORCHRUN = (sys.executable, "-m", "torch.distributed.run")
SCRIPT = """
import hashlib, os, signal, sys
import torch, torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from phalanx.integrations.torch import MemoryCheckpoint, State, fix_buckets, seed_step

kind, *deaths = sys.argv[1:]
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
number = os.environ["TORCHELASTIC_RESTART_COUNT"]

def reach(moment):
    if f"{number}/{rank}/{moment}" in deaths:
        os.kill(os.getpid(), signal.SIGKILL)

seed_step(3, 0, 0)
layers = nn.Linear(8, 4096), nn.BatchNorm1d(4096), nn.Dropout(0.2), nn.Linear(4096, 3)
model = nn.Sequential(*layers)
if kind == "sharded":
    trained = fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
else:
    trained = DistributedDataParallel(model)
    fix_buckets(trained)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.7)
own = torch.Generator().manual_seed(rank)
state = State(model=model, optimizer=optimizer, scheduler=scheduler, own=own)
kept = MemoryCheckpoint(state, sharded=kind == "sharded")
if kind == "twice":
    MemoryCheckpoint(state)
first = kept.load() + 1
sys.stdout.write(f"round {number} from {first}\\n")
for step in range(first, 10):
    reach(f"{step}/before")
    seed_step(3, step, rank)
    optimizer.zero_grad()
    trained(torch.randn(4, 8, generator=own)).square().mean().backward()
    reach(f"{step}/backward")
    optimizer.step()
    scheduler.step()
    if kind == "apart" and step == int(deaths[0]) and rank == 1:
        next(model.parameters()).data += 1
    reach(f"{step}/unsaved")
    kept.save(step)
    reach(f"{step}/saved")
found = hashlib.sha256(repr(scheduler.state_dict()).encode())
moments = (value for each in optimizer.state.values() for value in each.values())
for value in (*model.parameters(), *moments):
    local = value.detach().to_local() if hasattr(value, "to_local") else value.detach()
    found.update(local.contiguous().numpy().tobytes())
sys.stdout.write(f"rank {rank} has {found.hexdigest()}\\n")
"""
pytestmark = [pytest.mark.timeout(400), pytest.mark.usefixtures("phalanx_leak_check")]


@pytest.fixture(name="script")
def _script(tmp_path: Path) -> Path:
    script = tmp_path / "remembers.py"
    script.write_text(SCRIPT)
    return script


def run(*words: object, command: tuple[str, ...] = PHALANX) -> Any:
    with tempfile.TemporaryDirectory(dir="/tmp") as apart:  # torchrun leaves a folder behind
        own = {} if command is PHALANX else {"TMPDIR": apart}
        env = {**os.environ, **own}
        return run_program([*command, *map(str, words)], timeout=150.0, env=env)


@pytest.mark.parametrize(
    ("kind", "ranks", "deaths", "begins", "undisturbed"),
    [
        (
            "replicated",
            3,
            ("0/1/4/unsaved", "1/0/4/before", "2/2/7/backward"),
            (1, 4, 4, 7),
            PHALANX,
        ),
        (
            "replicated",
            2,
            ("0/0/1/before", "1/1/3/backward", "1/0/3/backward"),
            (1, 1, 3),
            TORCHRUN,
        ),
        ("sharded", 2, ("0/1/4/unsaved", "1/0/4/before", "2/1/7/backward"), (1, 4, 4, 7), PHALANX),
    ],
)
def test_a_script_goes_on_from_memory_and_ends_as_without_deaths(
    script: Path,
    kind: str,
    ranks: int,
    deaths: tuple[str, ...],
    begins: tuple[int, ...],
    undisturbed: tuple[str, ...],
) -> None:
    words = ("--standalone", "--nproc-per-node", ranks, "--max-restarts", 3, script, kind)

    calm = run(*words, command=undisturbed)
    done = run(*words, *deaths)

    assert (calm.returncode, done.returncode) == (0, 0), calm.stderr + done.stderr
    rounds = re.findall(r"round (\d) from (\d)", done.stdout)
    assert {*rounds} == {(str(number), str(first)) for number, first in enumerate(begins)}
    ends = re.findall(r"rank \d has \w+", done.stdout)
    assert sorted(ends) == sorted(re.findall(r"rank \d has \w+", calm.stdout))
    assert len(ends) == ranks


def test_what_all_have_saved_is_not_done_again(script: Path) -> None:
    """A rank that dies after its save may be the first that has saved, or the last."""
    words = ("--nproc-per-node", 2, "--max-restarts", 1, script, "replicated", "0/1/5/saved")

    done = run(*words)

    assert done.returncode == 0, done.stderr
    assert sorted(re.findall(r"round 1 from (\d)", done.stdout)) in (["5"] * 2, ["6"] * 2)


@pytest.mark.parametrize("step", [1, 3])
def test_ranks_that_differ_are_found(script: Path, step: int) -> None:
    done = run("--nproc-per-node", 2, script, "apart", step)

    assert done.returncode == 1
    assert "TrainingError: model of rank 1 is not that of rank 0: change it alike" in done.stderr


def test_a_process_has_one_memory_checkpoint(script: Path) -> None:
    done = run("--nproc-per-node", 1, script, "twice")

    assert done.returncode == 1
    assert "TrainingError: this process has a MemoryCheckpoint: give it all in one" in done.stderr


def test_wrong_use_is_refused_where_nothing_is_kept_too() -> None:
    kept = MemoryCheckpoint(State(model=torch.nn.Linear(2, 2)))
    with pytest.raises(TrainingError, match=r"call load\(\) before the first save"):
        kept.save(1)
    assert kept.load() == 0
    with pytest.raises(SpecError, match="step=0: give one above 0, the last"):
        kept.save(0)
    kept.save(2)
    with pytest.raises(SpecError, match="step=2: give one above 2"):
        kept.save(2)
    wrong: Any = torch.nn.Linear(2, 2)
    with pytest.raises(SpecError, match="state="):
        MemoryCheckpoint(wrong)
