"""A driver whose snapshots and reports share one small disk, which it fills and empties again."""

from __future__ import annotations

import json
import sys
import threading
from pathlib import Path
from typing import Any

from tests.support.checkpoint_workers import Counter
from tests.support.rank_faults import kill

from phalanx.actors import CheckpointFailed, CheckpointPolicy, CheckpointTaken, Executor, Launch
from phalanx.runtime import Runtime
from phalanx.runtime.observe.events import ReportNotWritten, ReportWritten
from phalanx.supervision import Intensity

LONG = 60.0


class Heard:
    """The events of an executor, counted by kind."""

    def __init__(self) -> None:
        self._all: list[Any] = []
        self._news = threading.Condition()

    def __call__(self, event: Any) -> None:
        with self._news:
            self._all.append(event)
            self._news.notify_all()

    def wait(self, kind: type, count: int) -> int:
        """Return how many there are, once there are *count*."""
        with self._news:
            self._news.wait_for(lambda: self.count(kind) >= count, LONG)
            return self.count(kind)

    def count(self, kind: type) -> int:
        return sum(isinstance(event, kind) for event in self._all)


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
    heard = Heard()
    told: dict[str, Any] = {}
    with (
        Runtime(console=None, stream=False) as runtime,
        Executor(
            Counter,
            2,
            launch=Launch(preload=()),
            runtime=runtime,
            report_dir=disk / "reports",
            checkpoint=CheckpointPolicy(every_calls=1, where=disk / "states"),
            intensity=Intensity(100, 60.0),
        ) as ex,
    ):
        ex.subscribe(heard)
        ex.collective_rpc("add", LONG)
        heard.wait(CheckpointTaken, 1)
        fill(disk / "filler")
        told["answers"] = [ex.collective_rpc("add", LONG)[0] for _ in range(5)]
        told["snapshots lost"] = heard.wait(CheckpointFailed, 10)
        kill(ex, 0)
        told["after a death"] = ex.collective_rpc("get", LONG, retries=9)
        told["reports lost"] = heard.wait(ReportNotWritten, 1)
        told["reports known"] = len(ex.status().reports)
        told["no half files"] = [at.name for at in (disk / "reports").iterdir()] == []

        (disk / "filler").unlink()
        told["with room"] = ex.collective_rpc("add", LONG)
        heard.wait(CheckpointTaken, 2)
        kill(ex, 1)
        told["after another"] = ex.collective_rpc("get", LONG, retries=9)
        told["reports written"] = heard.wait(ReportWritten, 2)
        told["files"] = len(list((disk / "reports").iterdir()))
        told["still lost"] = heard.count(ReportNotWritten)
    return told


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]))))
