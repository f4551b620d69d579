"""``phalanx doctor``: what this machine has, what is missing, and what to do about it.

Guarantees: it looks and tries, and changes nothing; the exit code is 1 if, and only if, something
is missing that phalanx cannot do without. One check that fails does not end the others.
"""

from __future__ import annotations

import ctypes
import json
import os
import platform
import resource
import runpy
import select
import shutil
import socket
import sys
import time
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from phalanx.runtime import (
    DevicePool,
    LaunchSpec,
    Runtime,
    descriptor_limit,
    find_gpus,
    oom_sources,
    writable_bytes,
)

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Mapping

    from phalanx.runtime import Process

_START = 120.0  # seconds; a cold disk takes long to import torch
_KILL = 5.0
_LEAST_FILES = 1024  # some 24 descriptors for each rank, and what the program itself opens
_LEAST_PROCESSES = 256
_LEAST_SHM_BYTES = 64 << 20  # what container engines give; NCCL and data loaders want more
_ENTRY = f"{__name__}:probe"
_GET_SUBREAPER = 37
_MARKS = {"ok": "ok  ", "missing": "FAIL", "note": "note"}


@dataclass(frozen=True, slots=True)
class Finding:
    """What one check found.

    Attributes:
        state: ``missing`` where phalanx cannot work without it; ``note`` where something is less
            than it could be.
        remedy: What to do about it; empty where nothing need be done.
    """

    name: str
    state: Literal["ok", "note", "missing"]
    found: str
    remedy: str = ""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe the command line of this subcommand."""
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(arguments: argparse.Namespace) -> int:
    """Print what was found; return 1 if something essential is missing."""
    findings = examine()
    missing = [finding for finding in findings if finding.state == "missing"]
    if arguments.json:
        print(json.dumps({"ok": not missing, "findings": [asdict(one) for one in findings]}))
        return int(bool(missing))
    width = max(len(finding.name) for finding in findings)
    for finding in findings:
        print(f"{_MARKS[finding.state]} {finding.name:<{width}}  {finding.found}")
        if finding.remedy:
            print(f"     {'':<{width}}  -> {finding.remedy}")
    print(
        f"{len(missing)} essential thing(s) missing" if missing else "all that is needed is there"
    )
    return int(bool(missing))


def examine() -> list[Finding]:
    """Return a finding for each check."""
    checks: dict[str, Callable[[str], Finding]] = {
        "kernel": _kernel,
        "torch": _torch,
        "devices": _devices,
        "start": _start,
        "pidfd": _pidfd,
        "memfd": _memfd,
        "subreaper": _subreaper,
        "loopback": _loopback,
        "memory": _memory,
        "shared memory": _shared_memory,
        "open files": _open_files,
        "processes": _processes,
        "ptrace": _ptrace,
        "out-of-memory evidence": _oom,
        "zmq": _zmq,
        "extras": _extras,
    }
    findings: list[Finding] = []
    for name, check in checks.items():
        try:
            findings.append(check(name))
        except Exception as error:  # noqa: BLE001  # is itself what was found
            problem = f"{type(error).__name__}: {error}"
            findings.append(Finding(name, "missing", problem, "this check itself failed"))
    return findings


def probe(_payload: bytes, fds: Mapping[str, int]) -> None:
    """Say from inside a started process whether torch came with it."""
    os.write(fds["answer"], b"warm" if "torch" in sys.modules else b"cold")


def _kernel(name: str) -> Finding:
    found = f"{platform.system()} {platform.release()}, Python {platform.python_version()}"
    if platform.system() != "Linux":
        return Finding(name, "missing", found, "phalanx needs Linux: pidfds, memfds, prctl")
    return Finding(name, "ok", found)


def _torch(name: str) -> Finding:
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        return Finding(name, "missing", "not installed", "pip install torch==2.13.0")
    # The file alone: importing torch takes seconds, and the start below does it anyway.
    about = runpy.run_path(str(Path(spec.origin).with_name("version.py")))
    build = next((f"{kind} {about[kind]}" for kind in ("cuda", "hip") if about.get(kind)), "CPU")
    return Finding(name, "ok", f"{about['__version__']}, built for {build}")


def _devices(name: str) -> Finding:
    mask = os.environ.get("CUDA_VISIBLE_DEVICES")
    seen = "" if mask is None else f" (CUDA_VISIBLE_DEVICES={mask})"
    inventory = find_gpus()
    try:
        every = inventory.gpus()
        told = [f"{len(every)} GPU(s){seen}"]
        ill = False
        with DevicePool.of(None, 1, inventory) as pool:
            pool.look()
            leased = {one.device: one for one in pool.status() if one.index is not None}
        for gpu in every:
            used = inventory.used_bytes(gpu.uuid)
            memory = "memory not measured" if used is None else f"{used / 2**30:.1f} GiB in use"
            state = "not visible" if gpu.uuid not in leased else "can be leased"
            if gpu.uuid in leased and leased[gpu.uuid].reason:
                ill, state = True, f"in quarantine: {leased[gpu.uuid].reason}"
            told.append(f"{gpu.index}: {gpu.name or 'GPU'} {gpu.uuid}, {memory}, {state}")
    finally:
        inventory.close()
    if ill:
        remedy = "ranks get the other devices; reset it (nvidia-smi --gpu-reset), or see its log"
        return Finding(name, "note", "; ".join(told), remedy)
    if every:
        measured = find_spec("pynvml") is not None
        remedy = "" if measured else "pip install 'phalanx[gpu]': release and health are not seen"
        return Finding(name, "ok" if measured else "note", "; ".join(told), remedy)
    remedy = "" if find_spec("pynvml") else "where there is one: pip install 'phalanx[gpu]'"
    return Finding(name, "note", "no NVIDIA GPU; ranks run on the CPU", remedy)


def _start(name: str) -> Finding:
    started = time.monotonic()
    reader, writer = os.pipe()
    with os.fdopen(reader, "rb") as answer, Runtime(console=None, stream=False) as runtime:
        try:
            process = runtime.launcher(("torch",)).launch(
                LaunchSpec(entry=_ENTRY, fds={"answer": writer}, label="doctor"),
                on_exit=_ignore,
                deadline=started + _START,
            )
        finally:
            os.close(writer)
        took = time.monotonic() - started
        limit = started + _START
        select.select([answer], [], [], max(0.0, limit - time.monotonic()))
        os.set_blocking(reader, False)
        came = answer.read()  # None: nothing came, and it still holds the other end
        if not process.wait(limit):
            process.kill_tree(time.monotonic() + _KILL)
        process.close()
    if not came:
        remedy = "see the log above; is the machine very busy, or are new processes stopped?"
        found = f"a process that was started did not answer within {_START:g} s"
        return Finding(name, "missing", found, remedy)
    if came != b"warm":
        remedy = "each worker imports torch by itself, which takes seconds; see the log above"
        return Finding(name, "note", "a process starts, but not from a warm zygote", remedy)
    return Finding(name, "ok", f"zygote with torch, first process after {took:.1f} s")


def _ignore(_process: Process) -> None:
    """Do nothing about an exit that is waited for elsewhere."""


def _pidfd(name: str) -> Finding:
    try:
        os.close(os.pidfd_open(os.getpid()))
    except OSError as error:
        return Finding(name, "missing", str(error), "Linux 5.3, and a sandbox that lets it pass")
    return Finding(name, "ok", "pidfd_open works")


def _memfd(name: str) -> Finding:
    try:
        os.close(os.memfd_create("phalanx-doctor", os.MFD_CLOEXEC))
    except OSError as error:
        return Finding(name, "missing", str(error), "Linux 3.17, and a sandbox that lets it pass")
    return Finding(name, "ok", "memfd_create works")


def _subreaper(name: str) -> Finding:
    libc = ctypes.CDLL(None, use_errno=True)
    is_one = ctypes.c_int(0)
    if libc.prctl(_GET_SUBREAPER, ctypes.byref(is_one), 0, 0, 0) != 0:
        problem = os.strerror(ctypes.get_errno())
        return Finding(name, "missing", problem, "a sandbox that lets prctl pass")
    return Finding(name, "ok", "prctl works")


def _loopback(name: str) -> Finding:
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            socket.create_connection(server.getsockname(), 5.0).close()
    except OSError as error:
        remedy = "ip link set lo up: ranks of a process group meet on it"
        return Finding(name, "missing", str(error), remedy)
    return Finding(name, "ok", "127.0.0.1 can be listened on")


def _memory(name: str) -> Finding:
    free = writable_bytes(sys.maxsize) >> 20
    size, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    if size != resource.RLIM_INFINITY:
        remedy = "ulimit -f unlimited: it holds for shared memory as well"
        return Finding(name, "note", f"{free} MiB free, files of {size} bytes at most", remedy)
    found = f"{free} MiB free, control groups counted; the kernel takes workers before the driver"
    return Finding(name, "ok", found)


def _shared_memory(name: str) -> Finding:
    free = shutil.disk_usage("/dev/shm").free  # noqa: S108  # looked at, not written to
    found = f"{free >> 20} MiB free in /dev/shm"
    if free < _LEAST_SHM_BYTES:
        remedy = "docker run --shm-size=1g; phalanx does without, NCCL and data loaders do not"
        return Finding(name, "note", found, remedy)
    return Finding(name, "ok", found)


def _open_files(name: str) -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    ranks = descriptor_limit.ranks_that_fit(descriptor_limit.hard_limit())
    found = f"at most {_limit(soft)}, raised up to {_limit(hard)} as needed: some {ranks} ranks"
    if hard != resource.RLIM_INFINITY and hard < _LEAST_FILES:
        remedy = f"ulimit -n {_LEAST_FILES}, by root or in the service"
        return Finding(name, "note" if ranks else "missing", found, remedy)
    return Finding(name, "ok", found)


def _processes(name: str) -> Finding:
    soft, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    found = f"at most {_limit(soft)}"
    if soft != resource.RLIM_INFINITY and soft < _LEAST_PROCESSES:
        return Finding(name, "note", found, f"ulimit -u {_LEAST_PROCESSES}; threads count too")
    return Finding(name, "ok", found)


def _limit(value: int) -> str:
    return "any number" if value == resource.RLIM_INFINITY else str(value)


def _ptrace(name: str) -> Finding:
    try:
        scope = int(Path("/proc/sys/kernel/yama/ptrace_scope").read_text())
    except FileNotFoundError:
        return Finding(name, "ok", "not restricted")
    if scope == 0:
        return Finding(name, "ok", "not restricted")
    remedy = "sysctl kernel.yama.ptrace_scope=0 lets py-spy show native stacks of hung workers"
    return Finding(name, "note", f"restricted (scope {scope})", remedy)


def _oom(name: str) -> Finding:
    told = oom_sources()
    if told:
        return Finding(name, "ok", " and ".join(told))
    remedy = "run in a memory control group, or with the right to read /dev/kmsg (CAP_SYSLOG)"
    found = "none: a kill for want of memory looks like any other SIGKILL"
    return Finding(name, "note", found, remedy)


def _zmq(name: str) -> Finding:
    if find_spec("zmq") is None:
        return Finding(name, "missing", "not installed", "pip install pyzmq")
    import zmq

    found = f"pyzmq {zmq.pyzmq_version()}, libzmq {zmq.zmq_version()}"
    if not zmq.has("curve"):
        remedy = "pip's wheels of pyzmq have it; without, nothing can leave this machine"
        return Finding(name, "note", f"{found}, without CURVE", remedy)
    return Finding(name, "ok", f"{found}, with CURVE")


def _extras(name: str) -> Finding:
    modules = {"rich": "phalanx[cli]", "pynvml": "phalanx[gpu]", "tokenizers": "phalanx[examples]"}
    absent = {module: extra for module, extra in modules.items() if find_spec(module) is None}
    if absent:
        wanted = " ".join(f"'{extra}'" for extra in absent.values())
        return Finding(name, "note", f"without {', '.join(absent)}", f"pip install {wanted}")
    return Finding(name, "ok", ", ".join(modules))
