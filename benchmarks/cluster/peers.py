"""Peers on two machines: Ray actors on two Ray nodes, Monarch on two hosts, torchrun's two agents.

Each is a contestant in a separate process on the driver's machine, in a separate environment; what
it starts on the other machines it starts by prefixes in its arguments.
"""

from __future__ import annotations

import json
import time
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

from benchmarks.harness.subprocess_driver import ContestantBroke, Driven
from benchmarks.harness.venvs import absent_without
from phalanx.runtime import procfs

from .site import LONG, kill, tree

if TYPE_CHECKING:
    from collections.abc import Generator

    from .parts import Lab

_OPEN = 240.0  # seconds
_RANKS = 4
_NODES = 3  # rounds, at most, in which a node is killed
_MODULES = {  # by the keys of rows: the contestant, and the environment that it needs
    "ray-actors": ("ray-nodes", "ray"),
    "monarch": ("monarch-hosts", "monarch"),
    "torchrun": ("torchrun-nodes", None),
}


@contextmanager
def called(lab: Lab) -> Generator[dict[str, Driven]]:
    """Open those that can be called, by the keys of their rows."""
    with ExitStack() as made:
        opened: dict[str, Driven] = {}
        for name in ("ray-actors", "monarch"):
            if (driven := _open(lab, made, name)) is not None:
                opened[name] = driven
                driven.pause()
        yield opened


def peer_turn(peer: Driven, size: int, seconds: float, *, alone: bool) -> list[float]:
    """Return the seconds of each call of a turn; *alone*: to the first rank only."""
    order = {"method": "first.nothing" if alone else "nothing", "size": size, "times": 1_000_000}
    peer.resume()
    peer.ask("call", LONG, seconds=seconds / 5, least=1, **order)
    spent = peer.ask("call", LONG, seconds=seconds, **order)["ns"]
    peer.pause()
    return [each / 1e9 for each in spent]


def ray_actors(lab: Lab) -> None:
    """Kill actors of a node, and then all of the node."""
    with ExitStack() as made:
        driven = _open(lab, made, "ray-actors")
        if driven is None:
            return
        for _ in lab.count("Ray actor killed"):
            _kill_rank(lab, driven, "ray-actors", 0)
        for number in lab.count("Ray node killed", _NODES):
            notes, deadline = lab.folder / f"ray-{number}", time.monotonic() + LONG
            driven.tell("slow", seconds=LONG, notes=str(notes))
            while not notes.exists() or len(lines := notes.read_text().splitlines()) < _RANKS:
                if time.monotonic() > deadline:
                    raise ContestantBroke(driven.name, "its actors do not begin a call")
                time.sleep(0.01)
            actor = procfs.read(int(lines[0].split()[1]))
            assert actor is not None
            pids, began = [task.pid for task in tree(actor.parent)], time.monotonic()
            kill(*pids)
            lab.found.note("ray-actors", {"known": driven.answer(LONG)["at"] - began})


def torchrun(lab: Lab) -> None:
    """Kill a rank of the second of two agents."""
    with ExitStack() as made:
        driven = _open(lab, made, "torchrun")
        if driven is not None:
            for _ in lab.count("torchrun's rank killed"):
                _kill_rank(lab, driven, "torchrun", _RANKS - 1)


def _kill_rank(lab: Lab, driven: Driven, key: str, rank: int) -> None:
    """Kill *rank*, and note how long it is until all ranks work again."""
    pid, began = driven.ask("pids", LONG)["pids"][rank], time.monotonic()
    kill(pid)
    said = driven.ask("works", 2 * LONG, timeout=LONG)
    if "at" not in said:
        raise ContestantBroke(driven.name, f"not back in {LONG:g} s: {said['failures'][-1]}")
    lab.found.note(key, {"next": said["at"] - began})


def _open(lab: Lab, made: ExitStack, key: str) -> Driven | None:
    """Open a peer for as long as *made*; None, with the reason noted, if it cannot be had."""
    module, peer = _MODULES[key]
    if lab.environments is None:
        return None
    python = lab.environments.python(peer)
    if python is None:
        lab.found.why[key] = absent_without(peer)
        return None
    machines = lab.machines
    where = {
        "here": machines.here,
        "addresses": [machines.address(number) for number in range(2)],
        "prefixes": [machines.prefix(number) for number in range(2)],
    }
    try:
        # Monarch takes a stop for a death.
        driven = Driven(module, python, lab.folder, key, may_be_stopped=key != "monarch")
        made.callback(driven.end)
        driven.ask("open", _OPEN, ranks=_RANKS, variant=json.dumps(where))
    except ContestantBroke as error:
        lab.found.why[key] = f"broke: {error.what}"
        return None
    return driven
