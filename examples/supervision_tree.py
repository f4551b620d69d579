"""A tree: two groups that share the devices, an actor beside them, and failures that escalate.

    app  [one_for_one]
    ├─ journal              an actor: records events
    └─ models  [one_for_one, 1 restart a minute]
       ├─ target            a group of one rank, on half a GPU
       └─ draft             a group of two ranks, on a quarter each; 1 restart a minute

A rank of `draft` is killed four times. Each level handles one failure, and the next one escalates
to the level above: the group, then `models`, then `app`. Callers wait and keep their handles.
The same tree is given below in Python and in TOML; without a GPU a fake one fills the lease table.

    python examples/supervision_tree.py [--toml]
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from contextlib import suppress

import pykka

from phalanx import (
    ChildSpec,
    DevicePool,
    Devices,
    Intensity,
    Launch,
    Supervisor,
    SupervisorSpec,
    WorkerActor,
    executor_child,
    method,
    tree_from_toml,
)
from phalanx.errors import ExecutorClosed, WorkerDied
from phalanx.supervision import pykka_child
from phalanx.testing import FakeGpus

ONCE = Intensity(max_restarts=1, period=60.0)


class Model(WorkerActor):
    """Stands for one that computes."""

    @method(idempotent=True)
    def pid(self) -> int:
        """Return the process that answers."""
        return os.getpid()


class Journal(pykka.ThreadingActor):
    """Remembers what happened, for as long as it lives."""

    def __init__(self) -> None:
        super().__init__()
        self.lines = list[str]()

    def add(self, line: str) -> int:
        """Keep *line*; return how many there are."""
        self.lines.append(line)
        return len(self.lines)


def in_python(gpus: DevicePool) -> SupervisorSpec:
    """Return the tree."""
    half, quarter = (Devices(names=gpus, per_rank=share) for share in (0.5, 0.25))
    plain = Launch(preload=())
    target = executor_child("target", Model, 1, devices=half, launch=plain)
    draft = executor_child("draft", Model, 2, devices=quarter, launch=plain, intensity=ONCE)
    models = SupervisorSpec("models", intensity=ONCE, children=[target, draft])
    return SupervisorSpec("app", children=[ChildSpec("journal", pykka_child(Journal)), models])


TOML = """
root = "app"

[supervisor.app]
children = ["journal", "models"]

[supervisor.models]
intensity = { max_restarts = 1, period = 60.0 }
children = ["target", "draft"]

[worker.journal]
start = "journal"

[executor.target]
worker = "model"
devices = { names = "gpus", per_rank = 0.5 }
launch = { preload = [] }

[executor.draft]
worker = "model"
world_size = 2
devices = { names = "gpus", per_rank = 0.25 }
launch = { preload = [] }
intensity = [1, 60.0]
"""


def in_toml(gpus: DevicePool) -> SupervisorSpec:
    """Return the same tree; names that are not given are imported: "my.package:Model"."""
    return tree_from_toml(TOML, {"journal": pykka_child(Journal), "model": Model, "gpus": gpus})


def find_gpus() -> DevicePool:
    """Return the GPUs of this machine, or one that does not exist."""
    with DevicePool.of("auto", 1) as real:
        has_gpus = real.has_gpus
    return DevicePool.of("auto", 1) if has_gpus else DevicePool.of("auto", 1, FakeGpus(1), {})


def kill_a_rank(tree: Supervisor) -> None:
    """Kill rank 0 of draft; return once it answers again."""
    draft = tree.executor("models/draft")
    answered = pid = draft.call("pid", 30.0, rank=0)
    os.kill(pid, signal.SIGKILL)
    while answered == pid:
        # A call that was sent when its group ended is not made again by itself: it may have run.
        with suppress(WorkerDied, ExecutorClosed):
            answered = draft.call("pid", 60.0, rank=0)


def main() -> int:
    """Kill a rank four times; return 0 if each failure was healed where it should be."""
    parser = argparse.ArgumentParser(description="See failures healed, each level in its turn.")
    parser.add_argument("--toml", action="store_true", help="take the tree that is written in TOML")
    options = parser.parse_args()
    healed = list[str]()
    with find_gpus() as gpus, Supervisor((in_toml if options.toml else in_python)(gpus)) as tree:
        journal = tree.child("journal").proxy()
        target, draft = tree.executor("models/target"), tree.executor("models/draft")
        print(tree.render(), *gpus.status(), sep="\n")
        for _ in range(4):
            group, other = draft.current(), target.call("pid", 30.0, rank=0)
            kill_a_rank(tree)
            by = "app" if target.call("pid", 30.0, rank=0) != other else "models"
            healed.append("draft" if draft.current() is group else by)
            lines = journal.add(f"healed by {healed[-1]}").get(timeout=30)
            print(f"rank 0 of draft was killed: healed by {healed[-1]}; journal: {lines} lines")
        print(tree.render())
    return 0 if healed == ["draft", "models", "draft", "app"] else 1


if __name__ == "__main__":
    sys.exit(main())
