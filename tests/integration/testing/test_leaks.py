"""What the leak detector takes for left behind, and what for another program's."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
import uuid
from pathlib import Path

import pytest

from phalanx.runtime import process_tree
from phalanx.testing import Leak, LeakDetector

OURS = 4819  # a process of the run


@pytest.fixture
def shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for temporary files that other programs use too."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def names(detector: LeakDetector) -> list[str]:
    return [Path(leak.name).name for leak in detector.leaks()]


def start(tree: str, code: str, *words: str) -> tuple[subprocess.Popen[str], str]:
    """Start a process that bears the mark of *tree*; return it, and the line that it prints."""
    process = subprocess.Popen(
        [sys.executable, "-c", code, *words],
        env={process_tree.VARIABLE: f"{tree}/1.it;"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    return process, process.stdout.readline()


@pytest.mark.parametrize(
    ("name", "is_leak"),
    [
        *((name, True) for name in (f"phalanx-0-{OURS}-61723848", f"torch_{OURS}_17")),
        *((name, True) for name in (f"sem.{OURS}", "phalanx")),
        *((name, False) for name in ("1b6c145a-c36c-4819-b744-4991ce1c90b8", "tmp4819ab")),
        *((name, False) for name in ("x4819", "48190", "phalanx-0-7777-4819", "report.txt")),
    ],
)
def test_a_new_file_is_a_leak_if_it_is_named_for_a_process_of_the_trees(
    shared: Path, name: str, is_leak: bool
) -> None:
    detector = LeakDetector(own=False)
    detector.pids = {OURS}

    (shared / name).touch()

    assert names(detector) == ([name] if is_leak else [])


def test_of_unknown_trees_a_file_of_a_process_that_is_gone_is_a_leak(shared: Path) -> None:
    detector = LeakDetector(own=False)

    (shared / f"phalanx-0-{1 << 22}").touch()  # above the largest pid there can be
    (shared / f"phalanx-0-{os.getppid()}").touch()

    assert names(detector) == [f"phalanx-0-{1 << 22}"]


def test_a_new_file_that_a_process_of_the_tree_held_is_a_leak_whatever_its_name() -> None:
    tree = uuid.uuid4().hex
    detector = LeakDetector(tree, own=False)
    path = Path("/dev/shm") / f"any{uuid.uuid4().hex}"
    code = "import sys; f = open(sys.argv[1], 'w'); print(flush=True); sys.stdin.read()"
    holder, _ = start(tree, code, str(path))
    try:
        detector.look()
        holder.communicate(timeout=30)

        assert detector.leaks() == [Leak("shared memory", str(path))]
    finally:
        path.unlink(missing_ok=True)


def test_a_process_that_was_seen_in_the_tree_is_known_when_it_has_hidden() -> None:
    tree = uuid.uuid4().hex
    detector = LeakDetector(tree, own=False, patience=0.1)
    # A process with no mark, that first has a parent with one, and then none at all.
    code = (
        "import subprocess, sys; p = subprocess.Popen(['sleep', '1000'], env={}, "
        "start_new_session=True, stdout=subprocess.DEVNULL); print(p.pid, flush=True); "
        "sys.stdin.read()"
    )
    parent, pid = start(tree, code)

    detector.look()
    parent.communicate(timeout=30)
    left = detector.wait_gone()
    detector.kill()

    assert left == [Leak("process", f"{int(pid)} (S) sleep 1000")]
    assert detector.wait_gone() == []


def test_threads_descriptors_and_zombies_of_this_process_are_leaks() -> None:
    detector = LeakDetector(children=False)
    done = threading.Event()
    thread = threading.Thread(target=done.wait, name="kept")
    thread.start()
    fd = os.open("/dev/zero", os.O_RDONLY)
    child = subprocess.Popen(["true"])
    try:
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)

        assert set(detector.leaks()) == {
            Leak("thread", "kept"),
            Leak("descriptor", "/dev/zero (1)"),
            Leak("process", f"{child.pid} (Z)"),
        }
    finally:
        child.wait()
        os.close(fd)
        done.set()
        thread.join()
    assert detector.wait_gone() == []
