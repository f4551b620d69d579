"""Check this machine, or a Ray cluster, for the requirements of phalanx.

Checks kernel, packages, devices, limits and the start of one process, and prints
a remedy for each shortcoming. With --cluster it checks Ray, and the versions,
kernel, limits and network to this machine of each node, by one small task on each.
It changes nothing.

Exit codes:
  0  all required checks passed
  1  a requirement is missing
  2  the command line is invalid

Examples:
  phalanx doctor
  phalanx doctor --json
  phalanx doctor --cluster 10.0.0.1:6379
"""

from __future__ import annotations

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
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from phalanx.runtime import (
    DevicePool,
    LaunchSpec,
    Runtime,
    descriptor_limit,
    find_gpus,
    oom_count,
    safe_text,
    syscalls,
    writable_bytes,
)
from phalanx.supervision import is_installed

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Mapping

_PACKAGES = ("phalanx", "torch", "pykka", "pyzmq", "structlog", "cloudpickle")
_EXTRAS = {
    "rich": "phalanx[cli]",
    "shtab": "phalanx[cli]",
    "pynvml": "phalanx[gpu]",
    "prometheus_client": "phalanx[prometheus]",
    "tokenizers": "phalanx[examples]",
}
_START = 120.0  # seconds; a cold disk takes long to import torch
_KILL = 5.0
LEAST_FILES = 1024  # some 24 descriptors for each rank, and what the program itself opens
_LEAST_PROCESSES = 256
LEAST_SHM_BYTES = 64 << 20  # what container engines give; NCCL and data loaders want more
_ENTRY = f"{__name__}:probe"
_PRELOAD = ("torch",) if is_installed("torch") else ()
_MARKS = {"ok": "ok  ", "missing": "FAIL", "note": "note"}


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check.

    Attributes:
        state: ``missing`` if phalanx cannot work without it; ``note`` if something is less than it
            could be.
        remedy: The remedy; empty if nothing need be done.
    """

    state: Literal["ok", "note", "missing"]
    found: str
    remedy: str = ""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe the command line of this subcommand."""
    help_ = "print findings and versions as one JSON object"
    parser.add_argument("--json", action="store_true", help=help_)
    help_ = "check the Ray at ADDRESS, as phalanx.Ray takes it; without one, that of this machine"
    parser.add_argument("--cluster", nargs="?", const="auto", metavar="ADDRESS", help=help_)


def run(arguments: argparse.Namespace) -> int:
    """Print what was found; return 1 if something essential is missing."""
    if arguments.cluster is None:
        findings = examine()
    else:
        from .doctor_cluster import examine_cluster

        findings = examine_cluster(arguments.cluster)
    missing = sum(finding.state == "missing" for finding in findings.values())
    if arguments.json:
        records = [{"name": name, **asdict(finding)} for name, finding in findings.items()]
        print(json.dumps({"ok": not missing, "versions": versions(), "findings": records}))
        return int(missing > 0)
    width = max(map(len, findings))
    for name, finding in findings.items():
        print(f"{_MARKS[finding.state]} {name:<{width}}  {safe_text(finding.found)}")
        if finding.remedy:
            print(f"     {'':<{width}}  -> {safe_text(finding.remedy)}")
    print(f"{missing} required check(s) failed" if missing else "all required checks passed")
    return int(missing > 0)


def examine() -> dict[str, Finding]:
    """Return the finding of each check, by its name; one that fails does not end the others."""
    findings: dict[str, Finding] = {}
    for name, check in _CHECKS.items():
        try:
            findings[name] = check()
        except Exception as error:  # noqa: BLE001  # is itself what was found
            problem = f"{type(error).__name__}: {error}"
            findings[name] = Finding("missing", problem, "this check itself failed")
    return findings


def versions() -> dict[str, str | None]:
    """Return the version of each package, None if it is missing, and of Python."""
    found: dict[str, str | None] = dict.fromkeys(_PACKAGES)
    for name in _PACKAGES:
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found | {"python": platform.python_version()}


def probe(_payload: bytes, fds: Mapping[str, int]) -> None:
    """Say from inside a started process whether torch came with it."""
    os.write(fds["answer"], b"warm" if "torch" in sys.modules else b"cold")


def judged(found: str, remedy: str, *, is_needed: bool = False) -> Finding:
    """Return the finding: if there is a *remedy*, there is something to do."""
    state: Literal["note", "missing"] = "missing" if is_needed else "note"
    return Finding(state if remedy else "ok", found, remedy)


def _kernel() -> Finding:
    system = platform.system()
    remedy = "" if system == "Linux" else "phalanx needs Linux: pidfds, memfds, prctl"
    return judged(f"{system} {platform.release()}", remedy, is_needed=True)


def _packages() -> Finding:
    found = (f"{name} {number}" for name, number in versions().items() if number)
    return Finding("ok", ", ".join(found))


def _torch() -> Finding:
    spec = find_spec("torch") if is_installed("torch") else None
    if spec is None or spec.origin is None:
        remedy = "for tensors and process groups: pip install 'phalanx[torch]'"
        return Finding("note", "not installed", remedy)
    # The file alone: importing torch takes seconds, and the start below does it anyway.
    about = runpy.run_path(str(Path(spec.origin).with_name("version.py")))
    build = next((f"{kind} {about[kind]}" for kind in ("cuda", "hip") if about.get(kind)), "CPU")
    return Finding("ok", f"{about['__version__']}, built for {build}")


def _devices() -> Finding:
    mask = os.environ.get("CUDA_VISIBLE_DEVICES")
    seen = "" if mask is None else f" (CUDA_VISIBLE_DEVICES={mask})"
    has_nvml = find_spec("pynvml") is not None
    inventory = find_gpus()
    try:
        every = inventory.gpus()
        found = [f"{len(every)} GPU(s){seen}"]
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
            found.append(f"{gpu.index}: {gpu.name or 'GPU'} {gpu.uuid}, {memory}, {state}")
    finally:
        inventory.close()
    if ill:
        remedy = "ranks get the other devices; reset it (nvidia-smi --gpu-reset), or see its log"
        return Finding("note", "; ".join(found), remedy)
    if not every:
        remedy = "" if has_nvml else "if there is one: pip install 'phalanx[gpu]'"
        return Finding("note", "no NVIDIA GPU; ranks run on the CPU", remedy)
    remedy = "" if has_nvml else "pip install 'phalanx[gpu]': release and health are not seen"
    return judged("; ".join(found), remedy)


def _start() -> Finding:
    started = time.monotonic()
    limit = started + _START
    reader, writer = os.pipe()
    with (
        os.fdopen(reader, "rb") as answer,
        Runtime(console="text", level="warning", stream=False) as runtime,
    ):
        try:
            _ = runtime.collector  # writes the events to stderr
            [process] = runtime.launcher.launch(
                LaunchSpec(entry=_ENTRY, fds={"answer": writer}, label="doctor", preload=_PRELOAD),
                on_exit=lambda _process: None,  # the check itself waits for the exit
                deadline=limit,
            )
        finally:
            os.close(writer)
        took = time.monotonic() - started
        select.select([answer], [], [], max(0.0, limit - time.monotonic()))
        os.set_blocking(reader, False)
        came = answer.read()  # None: nothing came, and it still holds the other end; else it ended
        if not process.wait(limit):
            process.kill_tree(time.monotonic() + _KILL)
        process.close()
    if not came:
        remedy = "see the log above; is the machine very busy, or are new processes stopped?"
        how = "ended without an answer" if came == b"" else f"did not answer within {_START:g} s"
        return Finding("missing", f"a started process {how}", remedy)
    if _PRELOAD and came != b"warm":
        remedy = "each worker imports torch by itself, which takes seconds; see the log above"
        return Finding("note", "a process starts, but not from a zygote with torch", remedy)
    warm = " with torch" if _PRELOAD else ""
    return Finding("ok", f"zygote{warm}, first process after {took:.1f} s")


def _works(call: Callable[[], object], found: str, needs: str) -> Finding:
    """Return *found* if *call* raises no OSError; otherwise it *needs* something."""
    try:
        call()
    except OSError as error:
        return Finding("missing", str(error), needs)
    return Finding("ok", found)


def _connect() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        socket.create_connection(server.getsockname(), 5.0).close()


def _memory() -> Finding:
    free = f"{writable_bytes(sys.maxsize) >> 20} MiB free"
    size, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    if size != resource.RLIM_INFINITY:
        remedy = "ulimit -f unlimited: it holds for shared memory as well"
        return Finding("note", f"{free}, files of {size} bytes at most", remedy)
    return Finding("ok", f"{free}, control groups counted; the kernel kills workers first")


def _shared_memory() -> Finding:
    free = shutil.disk_usage("/dev/shm").free  # noqa: S108  # looked at, not written to
    remedy = "docker run --shm-size=1g; phalanx does without, NCCL and data loaders do not"
    return judged(f"{free >> 20} MiB free in /dev/shm", remedy * (free < LEAST_SHM_BYTES))


def _open_files() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    ranks = descriptor_limit.ranks_that_fit(descriptor_limit.hard_limit())
    found = f"at most {_limit(soft)}, raised up to {_limit(hard)} as needed: some {ranks} ranks"
    is_low = hard != resource.RLIM_INFINITY and hard < LEAST_FILES
    remedy = f"ulimit -n {LEAST_FILES}, by root or in the service" if is_low else ""
    return judged(found, remedy, is_needed=not ranks)


def _processes() -> Finding:
    soft, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    is_low = soft != resource.RLIM_INFINITY and soft < _LEAST_PROCESSES
    remedy = f"ulimit -u {_LEAST_PROCESSES}; threads count too" if is_low else ""
    return judged(f"at most {_limit(soft)}", remedy)


def _limit(value: int) -> str:
    return "any number" if value == resource.RLIM_INFINITY else str(value)


def _ptrace() -> Finding:
    file = Path("/proc/sys/kernel/yama/ptrace_scope")
    scope = file.read_text().strip() if file.exists() else "0"
    if scope == "0":
        return Finding("ok", "not restricted")
    remedy = "sysctl kernel.yama.ptrace_scope=0 lets py-spy show native stacks of hung workers"
    return Finding("note", f"restricted (scope {scope})", remedy)


def _oom() -> Finding:
    counter, _ = oom_count() or (None, 0)
    if counter is not None:
        return Finding("ok", f"the count of this control group, {counter}")
    found = "none: a kill for lack of memory looks like any other SIGKILL"
    return Finding("note", found, "run in a memory control group")


def _zmq() -> Finding:
    if not is_installed("zmq"):
        return Finding("missing", "not installed", "pip install pyzmq")
    import zmq

    found = f"pyzmq {zmq.pyzmq_version()}, libzmq {zmq.zmq_version()}, with"
    if zmq.has("curve"):
        return Finding("ok", f"{found} CURVE")
    remedy = "pip's wheels of pyzmq have it; without, nothing can leave this machine"
    return Finding("note", f"{found}out CURVE", remedy)


def _extras() -> Finding:
    absent = {module: extra for module, extra in _EXTRAS.items() if find_spec(module) is None}
    wanted = " ".join(f"'{extra}'" for extra in dict.fromkeys(absent.values()))
    found = f"without {', '.join(absent)}" if absent else ", ".join(_EXTRAS)
    return judged(found, f"pip install {wanted}" if absent else "")


def _system_call(name: str, call: Callable[[], object], needs: str) -> Callable[[], Finding]:
    return partial(_works, call, f"{name} works", f"{needs}, and a sandbox that allows {name}")


def _named(*checks: Callable[[], Finding]) -> dict[str, Callable[[], Finding]]:
    return {check.__name__.strip("_").replace("_", " "): check for check in checks}


_CHECKS: Mapping[str, Callable[[], Finding]] = {
    **_named(_kernel, _packages, _torch, _devices, _start),
    "pidfd": _system_call("pidfd_open", lambda: os.close(os.pidfd_open(os.getpid())), "Linux 5.3"),
    "memfd": _system_call(
        "memfd_create", lambda: os.close(os.memfd_create("phalanx-doctor")), "Linux 3.17"
    ),
    "subreaper": _system_call("prctl", syscalls.is_subreaper, "Linux 3.4"),
    "loopback": partial(
        _works,
        _connect,
        "a server on 127.0.0.1 can be reached",
        "ip link set lo up: the rendezvous of a process group is on it",
    ),
    **_named(_memory, _shared_memory, _open_files, _processes, _ptrace),
    "out-of-memory evidence": _oom,
    **_named(_zmq, _extras),
}
