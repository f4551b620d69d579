"""A script for torchrun, of which each test runs a part: ``torchrun_script.py PART ...``."""

from __future__ import annotations

import atexit
import json
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path

RANK = int(os.environ["RANK"])
ROUND = int(os.environ["TORCHELASTIC_RESTART_COUNT"])


def say(text: str) -> None:
    """Print a line at once and whole: all ranks write to one pipe."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def note(folder: str, text: str) -> None:
    """Leave *text* in a file of this rank, round and process."""
    with Path(folder, f"{RANK}.{ROUND}.{os.getpid()}").open("a") as file:
        file.write(f"{text}\n")


class Told(str):
    """What a child process says; its class is pickled by name."""

    __slots__ = ()


class Kept:
    """Leaves a note when Python ends."""

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def __del__(self) -> None:
        note(self.folder, "finalized")


def child(queue: multiprocessing.SimpleQueue[str]) -> None:
    queue.put(Told(f"{__name__} {os.environ['RANK']}"))


def everything(folder: str) -> None:
    import torch
    import torch.distributed as dist
    from torch.utils.data import DataLoader

    found: dict[str, object] = {"argv": sys.argv, "main": __name__, "file": __file__}
    found["environ"] = {key: value for key, value in os.environ.items() if "PHALANX" not in key}
    found["orig_argv"] = sys.orig_argv[:-1]
    before = os.environ.get("TMPDIR", "/tmp")
    os.environ["TMPDIR"] = "/var/tmp"
    found["temporary"] = tempfile.gettempdir()
    os.environ["TMPDIR"], tempfile.tempdir = before, None
    found["stdin"] = str(Path("/proc/self/fd/0").readlink())
    found["path"] = sys.path[0]
    found["builtins"] = str(type(__builtins__))
    found["streams"] = [sys.stdout.name, sys.stderr.name]
    found["handlers"] = [str(signal.getsignal(n)) for n in (signal.SIGTERM, signal.SIGINT)]
    dist.init_process_group("gloo")
    total = torch.tensor([float(RANK + 1)])
    dist.all_reduce(total)
    found["sum"] = total.item()
    found["threads"] = torch.get_num_threads()
    loaded: DataLoader[int] = DataLoader(range(6), batch_size=3, num_workers=2)  # type: ignore[arg-type]
    found["loaded"] = [batch.tolist() for batch in loaded]
    for method in ("fork", "spawn"):
        context = multiprocessing.get_context(method)
        queue: multiprocessing.SimpleQueue[str] = context.SimpleQueue()
        process = context.Process(target=child, args=(queue,))  # type: ignore[attr-defined]
        process.start()
        found[method] = queue.get()
        process.join()
    forked = os.fork()
    if forked == 0:
        os._exit(5)
    found["forked"] = os.waitstatus_to_exitcode(os.waitpid(forked, 0)[1])
    dist.barrier()
    note(folder, json.dumps(found))
    globals()["kept"] = Kept(folder)
    atexit.register(note, folder, "atexit")
    threading.Timer(0.2, note, (folder, "thread")).start()
    say(f"rank {RANK} ends")


def killed() -> None:
    """Join, and have rank 1 killed in the first round, while the others wait for it."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    say(f"rank {RANK} round {ROUND} port {os.environ['MASTER_PORT']}")
    dist.barrier()  # all have said it
    if RANK == 1 and ROUND == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.ones(1))


def fails(how: str, folder: str) -> None:
    """Print, and fail on rank 1 when rank 0 has printed too."""
    print(f"out {RANK}\nno end", end="")
    print(f"err {RANK}", file=sys.stderr)
    if RANK != 1:
        note(folder, "printed")
        signal.pause()
    while not [*Path(folder).glob(f"0.{ROUND}.*")]:
        time.sleep(0.01)
    if how == "raise":
        raises()
    if how == "record":
        from torch.distributed.elastic.multiprocessing.errors import record

        record(raises)()
    sys.exit("a text")


def raises() -> None:
    raise ValueError(f"bad {ROUND}")


def unclosed(folder: str) -> None:
    """Fail on rank 1, once rank 0 has succeeded; neither has closed its file.

    The error cannot be recorded.
    """
    file = Path(folder, f"{RANK}.loss").open("w")  # noqa: SIM115
    globals()["kept"] = file
    file.write("0.5")
    if RANK == 1:
        other = Path(folder, "0.loss")
        while not (other.exists() and other.stat().st_size):
            time.sleep(0.01)
        raise Unspeakable


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise TypeError


def leaves(folder: str) -> None:
    """Leave by os._exit(0), rank 1 a good while after rank 0."""
    note(folder, "begins")
    while RANK == 1 and not [*Path(folder).glob("go")]:
        time.sleep(0.01)
    note(folder, "ends")
    os._exit(0)


def waits(folder: str) -> None:
    """Wait for signals, for ever."""

    def on_signal(number: int, _frame: object) -> None:
        note(folder, signal.Signals(number).name)
        sys.exit(0)

    signal.signal(signal.SIGTERM, on_signal)
    say("waits")
    while True:
        signal.pause()


def saves(folder: str) -> None:
    """Fail on rank 1 in the first round; handle the SIGTERM that follows on the other."""

    def on_signal(_number: int, _frame: object) -> None:
        note(folder, "saved")
        sys.exit(0)

    signal.signal(signal.SIGTERM, on_signal)
    if ROUND:
        return
    if RANK == 0:
        note(folder, "waits")
        while True:
            signal.pause()
    while not [*Path(folder).glob("0.0.*")]:
        time.sleep(0.01)
    sys.exit(1)


def hangs() -> None:
    """Hang on rank 1 in the first round; work on the other for as long."""
    if ROUND == 0 and RANK == 1:
        threading.Event().wait()
    while ROUND == 0:
        sum(range(1000))
    say(f"rank {RANK} ends")


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
