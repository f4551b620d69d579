"""Observers attach from outside, see everything, and can do no harm."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from phalanx.runtime.events import GroupUp
from phalanx.runtime.scribe import Scribe
from phalanx.runtime.stream import DriverStream, Observer, find_drivers
from phalanx.supervision import RuntimeFault

from .conftest import LONG, Console, Worker, labels_of, launch

if TYPE_CHECKING:
    from collections.abc import Iterator

    from phalanx.runtime.worker_output import WorkerOutput


@pytest.fixture(autouse=True)
def runtime_dir(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A place of this test's own for streams, so that it finds only its own drivers."""
    # Of a short name: pytest's own folders may be too long for the path of a socket.
    with tempfile.TemporaryDirectory(prefix="pytest-") as name:
        monkeypatch.setenv("XDG_RUNTIME_DIR", name)
        monkeypatch.setattr("tempfile.tempdir", name)
        yield Path(name)


@pytest.fixture
def scribe(runtime_dir: Path, console: Console) -> Iterator[Scribe]:
    with Scribe(launch, console=None, out=console.fd, err=console.fd, name="mine") as scribe:
        yield scribe


def mine() -> DriverStream:
    (driver,) = [driver for driver in find_drivers() if driver.pid == os.getpid()]
    return driver


def attached(scribe: Scribe, observer: Observer) -> None:
    """Return once *observer* hears *scribe*: a subscription takes a moment to arrive."""
    deadline = time.monotonic() + LONG
    while time.monotonic() < deadline:
        scribe.emit(GroupUp(group="knock", epoch=0, world_size=1, took=0.0, at=0.0))
        if observer.next(time.monotonic() + 0.05) is not None:
            return
    raise AssertionError("the observer was never heard")


def until(observer: Observer, **wanted: Any) -> dict[str, Any]:
    """Return the first message that holds all of *wanted*."""
    deadline = time.monotonic() + LONG
    while (record := observer.next(deadline)) is not None:
        if wanted.items() <= record.items():
            return record
    raise AssertionError(f"not seen: {wanted}")


def test_a_driver_is_found_by_its_private_directory(scribe: Scribe, runtime_dir: Path) -> None:
    driver = mine()

    assert (driver.name, driver.directory) == ("mine", scribe.directory)
    assert Path(driver.directory).parent == runtime_dir
    assert Path(driver.directory).stat().st_mode & 0o777 == 0o700


def test_an_observer_sees_lines_records_and_events(scribe: Scribe) -> None:
    output: WorkerOutput = scribe.open_worker(labels_of(1, incarnation=4))
    with Observer(mine()) as observer:
        attached(scribe, observer)

        worker = Worker(output, "print('out')\nworker_logger(log, labels).info('step', n=3)")
        scribe.emit(GroupUp(group="tp", epoch=2, world_size=1, took=0.0, at=0.0))

        line = until(observer, kind="stdout", text="out")
        assert (line["rank"], line["incarnation"], line["group"]) == (1, 4, "tp")
        worker.wait()
    with Observer(mine()) as observer:
        attached(scribe, observer)
        scribe.log.info("later", n=1)
        scribe.emit(GroupUp(group="tp", epoch=3, world_size=1, took=0.0, at=0.0))
        assert until(observer, event="later")["kind"] == "event"
        assert until(observer, epoch=3)["event"] == "phalanx.group_up"
        assert observer.missed == 0


def test_an_observer_is_told_when_the_driver_closes(scribe: Scribe) -> None:
    with Observer(mine()) as observer:
        attached(scribe, observer)
        scribe.close()

        records = list(observer)

    assert records[-1]["event"] == "phalanx.stream_closed"
    assert find_drivers() == []


def test_an_observer_goes_on_after_the_scribe_was_replaced(scribe: Scribe) -> None:
    with Observer(mine()) as observer:
        attached(scribe, observer)
        assert scribe.pid is not None
        os.kill(scribe.pid, signal.SIGKILL)

        attached(scribe, observer)


def test_an_observer_that_does_not_read_slows_nobody_and_knows_what_it_missed(
    scribe: Scribe,
) -> None:
    output = scribe.open_worker(labels_of(0))
    with Observer(mine()) as observer:
        attached(scribe, observer)

        worker = Worker(output, "for i in range(60000): print(i)\n")
        code = worker.wait()
        drained = output.drain(time.monotonic() + LONG)
        seen = 0
        while observer.next(time.monotonic() + 0.2) is not None:
            seen += 1
        attached(scribe, observer)  # something after the gap, so that it shows

    assert (code, drained) == (0, True)
    assert observer.missed > 0
    assert seen + observer.missed >= 60000


def test_an_observer_of_a_dead_driver_is_refused() -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()

    with pytest.raises(RuntimeFault, match="has ended"):
        Observer(DriverStream(pid=gone.pid, name="", started_at=0.0, directory="/nowhere"))


def test_iteration_ends_when_the_driver_is_killed(runtime_dir: Path) -> None:
    code = f"""
import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})
import conftest
from phalanx.runtime.scribe import Scribe
scribe = Scribe(conftest.launch, console=None)
print(flush=True); input()
"""
    driver = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert driver.stdout is not None
    driver.stdout.readline()
    (found,) = find_drivers()
    with Observer(found) as observer:
        driver.kill()
        driver.communicate()

        records = list(observer)

    assert all(record["event"] == "phalanx.stream_closed" for record in records)


@pytest.mark.parametrize("flaw", ["mode", "card", "dead", "list", "link"])
def test_a_directory_that_is_not_what_it_seems_is_passed_over(
    scribe: Scribe, runtime_dir: Path, flaw: str
) -> None:
    path = runtime_dir / f"phalanx-{os.getuid()}-1-evil"
    card = json.loads(Path(mine().directory, "driver.json").read_text())
    path.mkdir(mode=0o700)
    path.joinpath("driver.json").write_text(
        {"card": "{", "list": "[]", "dead": json.dumps({**card, "start": 1})}.get(
            flaw, json.dumps(card)
        )
    )
    if flaw == "mode":
        path.chmod(0o755)
    if flaw == "link":
        path.rename(runtime_dir / "elsewhere")
        path.symlink_to(runtime_dir / "elsewhere")

    assert [driver.directory for driver in find_drivers()] == [scribe.directory]


def test_without_a_stream_nothing_is_made(runtime_dir: Path, console: Console) -> None:
    with Scribe(launch, console=None, stream=False, out=console.fd, err=console.fd) as scribe:
        assert scribe.directory is None
        assert list(runtime_dir.iterdir()) == []


def test_the_directory_is_registered_before_it_exists(console: Console) -> None:
    told: list[tuple[str, bool]] = []

    with Scribe(
        launch,
        console=None,
        out=console.fd,
        err=console.fd,
        register_tempdir=lambda path: told.append((path, Path(path).exists())),
    ) as scribe:
        assert told == [(scribe.directory, False)]


def test_a_stream_that_cannot_be_opened_is_told_and_all_else_works(
    console: Console, runtime_dir: Path
) -> None:
    def spoil(path: str) -> None:
        Path(path).mkdir()
        Path(path, "stream").mkdir()

    with Scribe(
        launch, console="json", out=console.fd, err=console.fd, register_tempdir=spoil
    ) as scribe:
        record = console.record(lambda r: r["event"] == "phalanx.stream_unavailable")
        scribe.log.info("alive")

        assert "File exists" in record["problem"]
        assert console.record(lambda r: r["event"] == "alive")


def test_the_driver_never_imports_zmq() -> None:
    code = f"""
import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})
import conftest
from phalanx.runtime.scribe import Scribe
with Scribe(conftest.launch, console=None): pass
assert "zmq" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
