"""`Machines`: network namespaces at a bridge, or, if those cannot be had, processes side by side.

- This process enters a network and a mount namespace that are private to the run, so the kernel
  removes the bridge, the cables and the namespaces with the last process of the run.
- A cut disables a port of the bridge: frames are dropped both ways, and the carrier stays up.
- Process ids, clocks and file systems are those of this machine.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from pathlib import Path

_NET, _MOUNT = 0x40000000, 0x00020000  # CLONE_NEWNET, CLONE_NEWNS
_NAMES = Path("/run/netns")  # where ``ip netns`` keeps them
_CUT, _WHOLE = "0", "3"  # states of a port: disabled, forwarding


class Machines:
    """So many machines beside that of the driver, which is the namespace of this process.

    Attributes:
        why_not: Why there are no namespaces; empty if there are.
        about: What they are, for the reader of a table.
        here: The address of the driver's machine, as the others reach it.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self._cut: set[int] = set()
        self.why_not = _enter()
        if self.why_not:
            self.here = "127.0.0.1"
            self.about = (
                f"Machines are processes side by side on loopback ({self.why_not}): a silent one "
                "is stopped by SIGSTOP, and none can be cut off."
            )
            return
        self.here = "10.99.0.1"
        self.about = "Machines are network namespaces at a bridge; a cut drops all frames."
        _run("ip link set lo up")
        _run("ip link add bridge type bridge")
        _run(f"ip addr add {self.here}/24 dev bridge")
        _run("ip link set bridge up")
        for number in range(count):
            _run(f"ip netns add m{number}")
            _run(f"ip link add port{number} type veth peer name eth0 netns m{number}")
            _run(f"ip link set port{number} master bridge up")
            _run(f"ip -n m{number} addr add {self.address(number)}/24 dev eth0")
            _run(f"ip -n m{number} link set eth0 up")
            _run(f"ip -n m{number} link set lo up")

    def address(self, number: int) -> str:
        """Return the address of a machine."""
        return f"127.0.0.{2 + number}" if self.why_not else f"10.99.0.{10 + number}"

    def prefix(self, number: int) -> tuple[str, ...]:
        """Return what a command line begins with that is to run on that machine."""
        return () if self.why_not else ("ip", "netns", "exec", f"m{number}")

    def cut(self, *numbers: int) -> None:
        """Cut these machines off."""
        for number in numbers:
            self._cut.add(number)
            _run(f"bridge link set dev port{number} state {_CUT}")

    def heal(self) -> None:
        """Connect those machines again."""
        while self._cut:
            _run(f"bridge link set dev port{self._cut.pop()} state {_WHOLE}")


def _enter() -> str:
    """Enter namespaces of this run's own; return why that cannot be done, or ""."""
    if os.geteuid() != 0 or shutil.which("bridge") is None:
        return "namespaces need root and the commands ip and bridge"
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_NET | _MOUNT) != 0:
        return f"no namespaces here: {os.strerror(ctypes.get_errno())}"
    _NAMES.mkdir(exist_ok=True)
    _run("mount --make-rprivate /")
    _run(f"mount -t tmpfs none {_NAMES}")
    return ""


def _run(command: str) -> None:
    subprocess.run(command.split(), check=True, stdout=subprocess.DEVNULL)
