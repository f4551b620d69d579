"""A hundred runs of each pipeline, each with another seed; every one gives the right result."""

from __future__ import annotations

import importlib
import random

import pytest
from tests.actors.workers import Echo

from minilm.arguments import Options
from minilm.run import Pipeline, run
from phalanx import Executor

RUNS = 100
PIPELINES = ["embed_data_parallel", "embed_tensor_parallel", "embed_pipeline_parallel"]


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.usefixtures("leak_check")
@pytest.mark.parametrize("name", PIPELINES)
def test_a_hundred_runs_with_kills_all_end_with_the_reference(name: str) -> None:
    pipeline: Pipeline = importlib.import_module(name).PIPELINE
    drawn = random.Random(name)
    kills = hits = 0

    # Holds the shared processes, so that torch is imported once and not a hundred times.
    with Executor(Echo, 1, preload=("torch",)):
        for turn in range(RUNS):
            options = Options(
                ranks=drawn.randint(2, 4),
                kills=drawn.randint(1, 3),
                seed=drawn.randrange(1 << 32),
                passages=160,
                batch=8,
                device="cpu",
                query="how do I open a file",
                json=True,
            )
            outcome = run(pipeline, options)
            assert outcome.ok, f"run {turn}, {options}: {outcome}"
            assert outcome.kills == len(outcome.recoveries) == options.kills, (
                f"{options}: {outcome}"
            )
            kills += outcome.kills
            hits += outcome.hits

    print(f"{name}: {RUNS} runs, {kills} kills, {hits} of them hit a running call")
    assert hits >= 0.8 * kills
