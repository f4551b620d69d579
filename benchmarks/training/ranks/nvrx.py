"""``-m benchmarks.training.ranks.nvrx FOLDER``: the script, restarted in process by NVRx.

NVRx starts no process: ranks that died are replaced by reserves, which wait from the beginning.
Once there are too few of them all processes are started again, as a launcher around it would. The
store is held here, outside of the ranks: by default it dies with rank 0. All else is its default.
"""

from __future__ import annotations

import os
import subprocess
import sys
from importlib import import_module
from typing import Any

from .notes import Asked

_TOO_FEW = 3  # the exit code of ranks that are too few


def launch(folder: str) -> int:
    """Start ranks and reserves, all again when too few are left; return the exit code."""
    distributed: Any = import_module("torch.distributed")
    asked = Asked.read(folder)
    count = asked.ranks + asked.reserves
    while True:
        store = distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        fixed = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": store.port, "WORLD_SIZE": count}
        ranks = [
            subprocess.Popen(
                [sys.executable, "-m", __spec__.name, folder],
                env={**os.environ, **{key: str(value) for key, value in fixed.items()}}
                | {"RANK": str(rank)},
            )
            for rank in range(count)
        ]
        codes = [each.wait() for each in ranks]
        if _TOO_FEW not in codes:
            return next((code for code in codes if code > 0), 0)


def run_rank(folder: str) -> None:
    """Run one rank, or one reserve."""
    torch: Any = import_module("torch")
    distributed: Any = import_module("torch.distributed")
    inprocess: Any = import_module("nvidia_resiliency_ext.inprocess")
    script = import_module("benchmarks.training.ranks.script")
    torch.set_num_threads(1)
    asked = Asked.read(folder)
    assignment = inprocess.rank_assignment

    # A store that no rank holds.
    outside = type("Outside", (inprocess.store.TCPStore,), {"TCP_STORE_HOST_RANK": -1})

    def train(call: Any = None) -> None:
        rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        if ranks < asked.ranks:
            os._exit(_TOO_FEW)
        script.join(f"iteration {call.iteration}", rank, ranks)
        script.train(asked, rank)
        distributed.destroy_process_group()

    train.__annotations__["call"] = inprocess.CallWrapper  # NVRx looks for it, and gives it
    inprocess.Wrapper(
        store_factory=outside,
        store_kwargs={"wait_for_workers": False},
        rank_assignment=inprocess.Compose(
            assignment.MaxActiveWorldSize(asked.ranks), assignment.ShiftRanks()
        ),
    )(train)()


if __name__ == "__main__":
    if "RANK" in os.environ:
        run_rank(sys.argv[1])
    else:
        sys.exit(launch(sys.argv[1]))
