"""A driver with a metrics server: says its address, then waits to be killed or for its stdin."""

from __future__ import annotations

import json
import sys
import time

from tests.support.workers import Echo

from phalanx import Executor, Runtime
from phalanx.integrations.prometheus import MetricsServer


def main(name: str) -> None:
    with (
        MetricsServer(0) as metrics,
        Runtime(console=None, name=name) as runtime,
        Executor(Echo, 1, name="model", launch={"preload": ()}, runtime=runtime) as model,
    ):
        print(json.dumps({"url": metrics.url, "rank": model.ranks[0].pid}), flush=True)
        while True:
            time.sleep(60.0)


if __name__ == "__main__":
    main(*sys.argv[1:])
