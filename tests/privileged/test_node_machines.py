"""A node in a namespace: a machine that is gone at once."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path

from tests.support.disturbed_nodes import INIT
from tests.support.node_groups import Cluster, kill, seconds_until
from tests.support.processes import wait_until
from tests.support.relayed_links import free_port, namespace

from phalanx.runtime import EventLoop, Zmq, procfs
from phalanx.runtime.process.launcher import Launcher

SLACK = 3.0  # seconds that a loaded machine may take for what is due


def test_a_machine_that_is_gone_at_once_is_lost_at_once_and_leaves_nothing(
    loop: EventLoop,
    launcher: Launcher,
    tmp_path: Path,
    record_property: Callable[[str, object], None],
) -> None:
    with contextlib.ExitStack() as ends:
        name, _, here, _ = ends.enter_context(namespace())
        prefix = ("ip", "netns", "exec", name, *INIT)
        options = Zmq(bind=f"tcp://{here}:{free_port()}")
        cluster = ends.enter_context(
            contextlib.closing(Cluster(loop, launcher, options=options, prefix=lambda _: prefix))
        )
        cluster.open(1)
        cluster.start(0, "scatter", str(tmp_path / "there"))
        wait_until((tmp_path / "there").exists)
        node = cluster.engine.pid_of(0)
        (init,) = [task.pid for task in procfs.read_all().values() if task.parent == node]

        at = kill(init)

        nothing_left = seconds_until(lambda: not cluster.processes(0), at)
        _, lost_at = cluster.told.wait("lost", 0)
        cluster.told.wait("fenced", 0)
        assert lost_at - at < 2 * SLACK
        assert nothing_left < 2 * SLACK
        record_property("lost, nothing left", [f"{lost_at - at:.3f}", f"{nothing_left:.3f}"])
