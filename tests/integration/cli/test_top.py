"""`phalanx top` shows a driver from outside: its groups, its trees, its deaths."""

from __future__ import annotations

import io
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
from tests.support.processes import wait_until

from phalanx.cli import main
from phalanx.cli.top_view import draw, follow
from phalanx.runtime import DriverStream, Observer, Picture, Sketch, first_picture
from phalanx.supervision import RuntimeFault

ROOT = Path(__file__).parents[3]
LONG = 60.0
# Carries out each line that it reads, and says "done".
DRIVER = """
import sys
from phalanx import Executor, Supervisor, SupervisorSpec, executor_child
from phalanx.errors import WorkerDied
from phalanx.runtime import Runtime
from tests.support.workers import Echo
with Runtime(console=None, name=sys.argv[1]) as runtime:
    more = {"launch": {"preload": ()}, "runtime": runtime}
    nested = SupervisorSpec(id="inner", children=[executor_child("solo", Echo, 1, **more)])
    spec = SupervisorSpec(id="root", children=[executor_child("tp", Echo, 2, **more), nested])
    with Supervisor(spec) as tree, Executor(Echo, 1, name="free", **more) as free:
        tp = tree.child("tp")
        print("up", flush=True)
        for line in sys.stdin:
            try:
                exec(line)
            except WorkerDied:
                pass
            print("done", flush=True)
"""


class Driver:
    def __init__(self) -> None:
        self.environment = {**os.environ, "PYTHONWARNINGS": "ignore"}
        self.name = f"top-{uuid.uuid4().hex[:8]}"  # other tests have drivers on this machine, too
        self.popen = subprocess.Popen(
            [sys.executable, "-c", DRIVER, self.name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=self.environment,
            cwd=ROOT,
            text=True,
        )
        self.pid = self.popen.pid
        assert self.popen.stdout is not None
        assert self.popen.stdout.readline() == "up\n"

    def do(self, line: str) -> None:
        assert self.popen.stdin is not None
        assert self.popen.stdout is not None
        self.popen.stdin.write(line + "\n")
        self.popen.stdin.flush()
        assert self.popen.stdout.readline() == "done\n"


class Terminal:
    """A terminal with `phalanx top` in it."""

    def __init__(self, driver: Driver) -> None:
        self.fd, end = pty.openpty()
        environment = {**driver.environment, "COLUMNS": "140", "LINES": "40", "TERM": "xterm"}
        self.popen = subprocess.Popen(
            [sys.executable, "-m", "phalanx.cli", "top", driver.name],
            stdin=end,
            stdout=end,
            stderr=end,
            env=environment,
            cwd=ROOT,
            start_new_session=True,
        )
        os.close(end)
        self.shown = ""

    def until(self, *words: str) -> None:
        """Return once all *words* have been shown since the last time."""
        deadline = time.monotonic() + LONG
        since = len(self.shown)
        while not all(word in self.shown[since:] for word in words):
            left = deadline - time.monotonic()
            ready, _, _ = select.select([self.fd], [], [], max(0.0, left))
            assert ready, f"not seen: {words} in {self.shown[-2000:]}"
            try:
                self.shown += os.read(self.fd, 1 << 16).decode("utf-8", "replace")
            except OSError:  # everybody has closed the other end
                return

    def ended(self) -> int:
        self.until("nothing shows this")
        return self.popen.wait(LONG)


@pytest.fixture(scope="module")
def driver() -> Iterator[Driver]:
    driver = Driver()
    yield driver
    os.kill(driver.pid, signal.SIGCONT)
    driver.popen.communicate(timeout=LONG)


def test_groups_trees_and_ranks_are_told_to_programs_and_shown_as_a_tree(
    driver: Driver, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    gate, begun = tmp_path / "gate", tmp_path / "begun"
    driver.do("tp.collective_rpc('echo', args=(1,)); tp.collective_rpc('echo', args=(2,))")
    driver.do("free.collective_rpc('kill_self', args=(0,))")
    driver.do(f"free.tell('gated_note', args=({str(gate)!r}, {str(begun)!r}, 'x'))")
    wait_until(begun.exists)

    assert main(["top", driver.name, "--json"]) == 0
    seen = json.loads(capsys.readouterr().out)
    assert main(["top", driver.name, "--once"]) == 0
    shown = capsys.readouterr().out
    assert main(["top", driver.name]) == 0  # into a pipe
    piped = capsys.readouterr().out
    gate.touch()

    assert seen["driver"]["pid"] == driver.pid
    groups = {group["group"]: group for group in seen["groups"]}
    assert set(groups) == {"free", "root/tp", "root/inner/solo"}
    tp, free = groups["root/tp"], groups["free"]
    assert (tp["phase"], tp["epoch"], tp["world_size"], tp["restarts"]) == ("serving", 1, 2, 0)
    assert [rank["served"] for rank in tp["ranks"]] == [2, 2]
    assert all(rank["rss_bytes"] > 1 << 20 for rank in tp["ranks"])
    assert (free["restarts"], free["restarts_in_window"], free["epoch"]) == (1, 1, 2)
    (rank,) = free["ranks"]
    assert (rank["incarnation"], rank["state"], rank["method"]) == (2, "up", "gated_note")
    assert (rank["owed"], free["in_flight"]) == (1, 1)
    (tree,) = seen["trees"]
    assert tree["root"]["path"] == "root"
    assert [child["path"] for child in tree["children"]] == [
        *("root/tp", "root/inner", "root/inner/solo")
    ]
    first = [line.split()[0] for line in shown.splitlines() if line.strip()]
    assert first[0] == "driver"
    assert first == [line.split()[0] for line in piped.splitlines() if line.strip()]
    assert first[3:] == ["root", "tp", "rank", "rank", "inner", "solo", "rank", "free", "rank"]
    assert "Echo x 2, one_for_all" in shown


def test_the_live_view_follows_deaths_and_ends_at_ctrl_c(driver: Driver) -> None:
    terminal = Terminal(driver)
    terminal.until("root", "tp", "free", "serving")
    driver.do("tree.child('inner/solo').collective_rpc('kill_self', args=(0,))")
    terminal.until("phalanx.worker_crashed", "killed (SIGKILL)", "phalanx.group_up")

    os.kill(terminal.popen.pid, signal.SIGINT)
    code = terminal.ended()

    assert code == 130
    assert "Traceback" not in terminal.shown
    assert terminal.shown.rindex("\x1b[?1049l") > terminal.shown.rindex("\x1b[?1049h")
    assert terminal.shown.endswith(("\x1b[?25h", "\x1b[?1049l", "\r\n"))
    os.close(terminal.fd)


def test_the_live_view_ends_with_the_driver() -> None:
    driver = Driver()
    terminal = Terminal(driver)
    terminal.until("root", "serving")

    driver.popen.kill()
    driver.popen.communicate(timeout=LONG)
    code = terminal.ended()

    assert code == 0
    assert f"driver {driver.pid} has ended" in terminal.shown
    os.close(terminal.fd)


def test_a_wrong_name_and_a_driver_that_is_stopped_are_one_line(
    driver: Driver, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("phalanx.runtime.observe.status._PICTURE_TIMEOUT", 0.5)

    wrong: tuple[Any, ...] = main(["top", "yours", "--once"]), *capsys.readouterr()
    listed: tuple[Any, ...] = main(["top", "--list"]), *capsys.readouterr()
    os.kill(driver.pid, signal.SIGSTOP)
    silent = main(["top", driver.name, "--json"]), *capsys.readouterr()
    os.kill(driver.pid, signal.SIGCONT)

    assert wrong[:2] == (2, "")
    assert wrong[2].startswith("phalanx top: driver='yours': running: ")
    assert f"{driver.pid} ({driver.name})" in wrong[2]
    assert listed[0] == 0
    line = rf"^{driver.pid}\t{driver.name}\tup 0:\d\d:\d\d\t\S+ -c "
    assert re.search(line, listed[1], re.MULTILINE)
    said = "it is stopped, or very busy"
    problem = f"phalanx top: driver {driver.pid} did not answer within 0.5 s: {said}\n"
    assert silent == (1, "", problem)


class Closed:
    """Observes a driver that closes its stream and lives on."""

    has_ended = False
    is_last = staticmethod(Observer.is_last)

    def next(self, _deadline: float) -> dict[str, Any]:
        return {"kind": "event", "event": "phalanx.stream_closed"}


def test_a_driver_that_has_closed_its_stream_is_not_said_to_have_ended(
    capsys: pytest.CaptureFixture[str],
) -> None:
    driver, observer = DriverStream(pid=1, name="", started_at=0.0, address=""), Closed()

    with pytest.raises(RuntimeFault, match="driver 1 has closed its stream"):
        first_picture(cast("Observer", observer), driver)
    follow(driver, cast("Observer", observer))

    assert capsys.readouterr().out.endswith("driver 1 has closed its stream\n")


def drawn(picture: Picture, width: int = 100, *, name: str = "", records: Any = ()) -> str:
    from rich.console import Console

    console = Console(width=width, record=True, file=io.StringIO())
    driver = DriverStream(pid=1, name=name, started_at=time.time(), address="")
    console.print(draw(driver, picture, records, width))
    return console.export_text()


def test_a_driver_that_falls_silent_is_said_to_be() -> None:
    picture = Picture(groups=[], trees=[], ended={}, at=time.monotonic() - 42)

    assert "silent for 42 s" in drawn(picture)


def group_part(first: int, size: int, ranks: int) -> dict[str, Any]:
    known = {"pid": None, "incarnation": 1, "state": "up", "device": "cpu", "owed": 0}
    told = [
        {**known, "rank": first + n, "served": 5, "method": "", "running_for": 0.0}
        for n in range(ranks)
    ]
    about = {"group": "g\x1b[2J", "world_size": size, "ranks": told, "first": first, "at": 1.0}
    about["nodes"] = []
    return {"kind": "state", "event": "phalanx.group_state", **about}


def ended(groups: int) -> dict[str, Any]:
    about: dict[str, Any] = {"groups": groups, "ended": {}, "at": 1.0}
    return {"kind": "state", "event": "phalanx.status_ended", **about}


def test_a_group_that_was_told_in_parts_is_put_together() -> None:
    sketch = Sketch()
    for part in (group_part(0, 300, 200), group_part(200, 300, 100)):
        assert sketch.take(part) is None

    picture = sketch.take(ended(1))

    assert picture is not None
    assert [rank["rank"] for rank in picture.groups[0]["ranks"]] == list(range(300))


@pytest.mark.parametrize(
    "told", [[ended(1)], [group_part(0, 300, 200), ended(1)], [group_part(200, 300, 100), ended(1)]]
)
def test_what_was_told_in_part_only_is_no_picture(told: list[dict[str, Any]]) -> None:
    sketch = Sketch()

    assert [sketch.take(record) for record in told] == [None] * len(told)


def test_calls_per_second_are_those_since_the_last_picture() -> None:
    sketch = Sketch()
    sketch.take(group_part(0, 1, 1))
    sketch.take(ended(1))
    later = group_part(0, 1, 1)
    later["at"], later["ranks"][0]["served"] = 3.0, 25
    sketch.take(later)

    picture = sketch.take(ended(1))

    assert picture is not None
    assert picture.groups[0]["ranks"][0]["calls_per_s"] == 10.0


@pytest.mark.parametrize("width", [80, 120])
def test_columns_are_shown_whole_or_left_out_and_names_do_not_command_the_terminal(
    width: int,
) -> None:
    sketch = Sketch()
    part = group_part(0, 1, 1)
    part["ranks"][0] |= {"pid": os.getpid(), "served": 123_456}
    more = {"worker": "Trainer", "strategy": "one_for_all", "phase": "serving", "epoch": 1}
    counts = {"restarts": 7, "restarts_in_window": 3, "max_restarts": 50, "period": 60.0}
    sketch.take({**part, **more, **counts, "in_flight": 1, "waiting": 0, "standby": 0})
    picture = sketch.take(ended(1))
    assert picture is not None
    records = [{"event": "e\x07", "level": "info"}]

    shown = drawn(picture, width, name="d\x1b[31;1H", records=records)

    assert "\x1b" not in shown
    assert "g\\x1b[2J" in shown
    assert "e\\x07" in shown
    assert "…" not in shown
    assert all(word in shown for word in ("serving", "3/50", str(os.getpid()), "1 in flight"))
    assert "1 group, 1 rank, 7 restarts" in shown
    assert ("CALLS/S" in shown) == (width == 120)


def test_a_node_is_shown_with_its_last_beat_and_its_devices() -> None:
    up = {"node": 0, "host": "alpha", "state": "up", "ranks": [0, 1]}
    nodes: list[dict[str, Any]] = [
        {**up, "beat_age": 0.25, "devices": ["GPU-aaaa", "GPU-bbbb"]},
        {"node": 1, "host": "", "state": "asked", "ranks": [], "beat_age": None, "devices": []},
        {**up, "node": 2, "ranks": [], "beat_age": 0.0, "devices": []},
    ]
    group: dict[str, Any] = {"group": "tp", "worker": "W", "strategy": "one_for_one"}
    counts = ("restarts", "restarts_in_window", "max_restarts", "epoch", "world_size")
    group |= dict.fromkeys(counts, 1)
    group |= dict.fromkeys(("in_flight", "waiting", "standby"), 0)
    group |= {"phase": "serving", "ranks": [], "nodes": nodes}

    text = drawn(Picture(groups=[group], trees=[], ended={}, at=time.monotonic()), 200)

    shown = [" ".join(line.split()) for line in text.splitlines()]
    assert "node 0 alpha up ranks 0, 1, beat 0.2 s ago GPU-aaaa GPU-bbbb" in shown
    assert "node 1 asked" in shown
    assert "node 2 alpha up spare, beat 0.0 s ago" in shown
