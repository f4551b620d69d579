"""A driver whose snapshots and reports share one small disk, which it fills and empties again."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from tests.support.checkpoint_workers import Counter
from tests.support.event_recorder import EventRecorder
from tests.support.rank_faults import kill

from phalanx.actors import (
    CheckpointFailed,
    CheckpointPolicy,
    CheckpointTaken,
    Executor,
    Launch,
    RestartPolicy,
)
from phalanx.runtime import Runtime
from phalanx.runtime.observe.events import ReportNotWritten, ReportWritten
from phalanx.supervision import Intensity

LONG = 60.0


def fill(path: Path) -> None:
    """Write until not one byte more can be written."""
    with path.open("wb", buffering=0) as file:
        for size in (4096, 1):
            try:
                while True:
                    file.write(bytes(size))
            except OSError:
                continue


def main(disk: Path) -> dict[str, Any]:
    told: dict[str, Any] = {}
    with (
        Runtime(console=None, stream=False) as runtime,
        Executor(
            Counter,
            2,
            launch=Launch(preload=()),
            runtime=runtime,
            checkpoint=CheckpointPolicy(every_calls=1, where=disk / "states"),
            policy=RestartPolicy(intensity=Intensity(100, 60.0), report_dir=disk / "reports"),
        ) as ex,
    ):
        recorded = EventRecorder(ex)
        ex.collective_rpc("add", LONG)
        recorded.wait(1, CheckpointTaken)
        fill(disk / "filler")
        told["answers"] = [ex.collective_rpc("add", LONG)[0] for _ in range(5)]
        told["snapshots lost"] = len(recorded.wait(10, CheckpointFailed))
        kill(ex, 0)
        told["after a death"] = ex.collective_rpc("get", LONG, retries=9)
        told["reports lost"] = len(recorded.wait(1, ReportNotWritten))
        told["reports known"] = len(ex.status().reports)
        told["no half files"] = [at.name for at in (disk / "reports").iterdir()] == []

        (disk / "filler").unlink()
        told["with room"] = ex.collective_rpc("add", LONG)
        recorded.wait(2, CheckpointTaken)
        kill(ex, 1)
        told["after another"] = ex.collective_rpc("get", LONG, retries=9)
        told["reports written"] = len(recorded.wait(2, ReportWritten))
        told["files"] = len(list((disk / "reports").iterdir()))
        told["still lost"] = len(recorded.every(ReportNotWritten))
    return told


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]))))
