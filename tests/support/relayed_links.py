"""What tests do to the links of a group: find the processes at their ends, cut them, mend them."""

from __future__ import annotations

import contextlib
import itertools
import os
import secrets
import shutil
import socket
import subprocess
import sys
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
from tests.support.processes import wait_until

from phalanx import Executor
from phalanx.runtime import Zmq
from phalanx.runtime.linux import procfs

QUICK = Zmq(heartbeat=0.2, lost_after=2.0)
NEVER = "/nonexistent/gate"
_USES = itertools.count()


def processes_of(ex: Executor[Any], what: str) -> list[int]:
    """The processes at the ends of a group's links, by what they show of themselves."""
    return processes_named(ex.name, what)


def processes_named(group: str, what: str) -> list[int]:
    """The processes of our group of that name, by what they show of themselves.

    Tests run beside us have groups of the same names.
    """
    found: list[int] = []
    tasks = procfs.read_all()
    for pid, task in tasks.items():
        with contextlib.suppress(OSError):
            title = Path(f"/proc/{pid}/cmdline").read_bytes().rstrip(b"\0").decode()
            named = title.startswith(f"phalanx: {group}") and title.strip().endswith(what)
            if named and task.state != "Z" and _is_ours(task, tasks):
                found.append(pid)
    return sorted(found)


def _is_ours(task: procfs.Task, tasks: dict[int, procfs.Task]) -> bool:
    while task.parent in tasks and task.pid != os.getpid():
        task = tasks[task.parent]
    return task.pid == os.getpid()


def wait_running(ex: Executor[Any], *ranks: int) -> None:
    """Wait until *ranks* have been handed a call."""
    slots = ex._group.plane._table.by_rank
    wait_until(lambda: all((s := slots[rank]) and s.channel.page.begun for rank in ranks))


def free_port(host: str = "127.0.0.1") -> int:
    """Return a port that stays free until somebody asks for it by number.

    The kernel gives one of its own range to whoever does not care, between two tests or two lines.
    """
    least = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    while True:
        # Not of `random`: a suite that runs beside ours may have the same seed.
        port = 1024 + secrets.randbelow(least - 1024)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with socket.socket(family) as sock, contextlib.suppress(OSError):
            sock.bind((host, port))
            return port


class Relay:
    """A `tcp_relay.py`, in the network namespace *within* if there is one."""

    def __init__(self, *ends: object, within: str = "") -> None:
        prefix = ["ip", "netns", "exec", within] if within else []
        program = [sys.executable, str(Path(__file__).with_name("tcp_relay.py"))]
        self.process = subprocess.Popen(
            [*prefix, *program, *map(str, ends)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            self._expect("ready")
        except BaseException:
            self.close()
            raise

    def mute(self, way: str = "both", after: int = 0) -> None:
        """Pass nothing more that *way*, once *after* more bytes have passed."""
        self._order("mute", way, after)

    def cut(self, way: str = "both") -> None:
        """Pass nothing more that *way*, of later connections neither."""
        self._order("cut", way)

    def heal(self) -> None:
        self._order("heal")

    def delay(self, seconds: float) -> None:
        self._order("delay", seconds)

    def replay(self, way: str) -> None:
        """Pass what passed last that *way* on once more."""
        self._order("replay", way)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            assert stream is not None
            stream.close()

    def _order(self, *words: object) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(" ".join(map(str, words)) + "\n")
        self.process.stdin.flush()
        self._expect("done")

    def _expect(self, word: str) -> None:
        assert self.process.stdout is not None
        assert self.process.stdout.readline().strip() == word


@contextlib.contextmanager
def bare_namespace() -> Generator[tuple[str, str]]:
    """A network namespace: its name, and the first three numbers of a network for it."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("making a network namespace needs root and ip")
    use = next(_USES)  # the devices of one before may still be on their way out
    name = f"ph{os.getpid() % 100000}n{use}"
    net = f"10.{200 + os.getpid() % 50}.{(os.getpid() // 50 + use) % 250}"
    try:
        ip("netns", "add", name)
    except subprocess.CalledProcessError as error:
        pytest.skip(f"no network namespace here: {error.stderr}")
    try:
        yield name, net
    finally:
        ip("netns", "del", name)


@contextlib.contextmanager
def namespace() -> Generator[tuple[str, str, str, str]]:
    """A network namespace at the end of a cable: its name, the cable, both addresses."""
    with bare_namespace() as (name, net):
        ip("link", "add", f"{name}a", "type", "veth", "peer", "name", f"{name}b")
        ip("link", "set", f"{name}b", "netns", name)
        ip("addr", "add", f"{net}.1/30", "dev", f"{name}a")
        ip("link", "set", f"{name}a", "up")
        ip("netns", "exec", name, "ip", "addr", "add", f"{net}.2/30", "dev", f"{name}b")
        ip("netns", "exec", name, "ip", "link", "set", f"{name}b", "up")
        yield name, f"{name}a", f"{net}.1", f"{net}.2"


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)
