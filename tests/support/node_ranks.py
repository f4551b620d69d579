"""What ranks on nodes run in tests."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path


def stay(payload: bytes, fds: Mapping[str, int]) -> None:
    """Live until killed."""
    while True:
        signal.pause()


def leave(payload: bytes, fds: Mapping[str, int]) -> int:
    """Exit with the code in *payload*."""
    return int(payload)


def files(payload: bytes, fds: Mapping[str, int]) -> int:
    """Exit with the number of descriptors that it may have."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def tell(payload: bytes, fds: Mapping[str, int]) -> None:
    """Write the environment's word into the file that *payload* names, whole; then stay."""
    file = Path(payload.decode())
    new = file.with_suffix(".new")
    new.write_text(os.environ.get("WORD", "none"))
    new.rename(file)
    stay(payload, fds)


def pulse(payload: bytes, fds: Mapping[str, int]) -> None:
    """Write the time into the file that *payload* names, again and again."""
    with open(payload.decode(), "wb", buffering=0) as file:
        while True:
            os.pwrite(file.fileno(), f"{time.monotonic():020.6f}".encode(), 0)
            time.sleep(0.002)


def scatter(payload: bytes, fds: Mapping[str, int]) -> None:
    """Start children that leave the session; then write the file, and stay."""
    for _ in range(2):
        command = [sys.executable, "-S", "-c", "import time; time.sleep(1000)"]
        subprocess.Popen(command, start_new_session=True)
    subprocess.run(["sh", "-c", "setsid sleep 1000 >/dev/null 2>&1 &"], check=True)
    Path(payload.decode()).write_text("there")
    stay(payload, fds)
