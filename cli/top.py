"""``phalanx top``: a running driver's groups and trees, live, from a process of its own.

Guarantees: the driver is asked once a second while a viewer is attached, and not otherwise. It ends
with the driver, and at Ctrl-C, with the terminal as it was. A picture is whole: all of it answers
one request. What the driver cannot know is added here: the memory of each process, calls per
second.
"""

from __future__ import annotations

import json
import sys
import time
from collections import deque
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from phalanx.runtime import Observer
from phalanx.supervision import RuntimeFault

from .select_driver import add_driver_arguments, select_driver
from .terminal import reader_may_leave

if TYPE_CHECKING:
    import argparse

    from phalanx.runtime import DriverStream

_PATIENCE = 10.0  # seconds for the first picture; a driver that answers takes milliseconds
_REFRESH = 1.0
_EVENTS = 8
_QUIET = ("phalanx.worker_started", "phalanx.worker_ready", "phalanx.report_written")
_ENVELOPE = ("kind", "event", "level", "timestamp", "seq")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe the command line of this subcommand."""
    add_driver_arguments(parser)
    parser.add_argument("--once", action="store_true", help="show one picture, and end")
    parser.add_argument("--json", action="store_true", help="print one picture as JSON, and end")


def run(arguments: argparse.Namespace) -> int:
    """Show a driver until it ends, or the user has enough."""
    driver = select_driver(arguments)
    if driver is None:
        return 0
    if not arguments.json and find_spec("rich") is None:
        raise RuntimeFault("rich is not installed: pip install 'phalanx[cli]'")
    with reader_may_leave(), Observer(driver, watch=True) as observer:
        if arguments.json:
            first = _first(observer, driver)
            shown = {"driver": asdict(driver), "groups": first.groups, "trees": first.trees}
            print(json.dumps(shown, indent=2))
        elif arguments.once:
            _print(driver, _first(observer, driver))
        else:
            _follow(driver, observer)
    return 0


def _first(observer: Observer, driver: DriverStream) -> Picture:
    """Return the first whole picture; raise RuntimeFault if there is none in time."""
    sketch = Sketch()
    deadline = time.monotonic() + _PATIENCE
    while (record := observer.next(deadline)) is not None:
        picture = sketch.take(record)
        if picture is not None:
            return picture
        if observer.is_last(record):
            break
    if observer.has_ended:
        raise RuntimeFault(f"driver {driver.pid} has ended")
    raise RuntimeFault(
        f"driver {driver.pid} did not answer within {_PATIENCE:g} s: it is stopped, or very busy"
    )


def _print(driver: DriverStream, picture: Picture) -> None:
    from rich.console import Console

    from .top_view import draw

    # Into a pipe or a file as wide as it needs to be: scripts read it.
    console = Console() if sys.stdout.isatty() else Console(width=200)
    console.print(draw(driver, picture, (), console.width))


def _follow(driver: DriverStream, observer: Observer) -> None:
    from rich.console import Console
    from rich.live import Live

    from .top_view import draw

    sketch = Sketch()
    picture: Picture | None = None
    console = Console()
    view = draw(driver, None, (), console.width)
    with Live(view, console=console, screen=console.is_terminal, auto_refresh=False) as live:
        drawn_at = 0.0
        while not observer.has_ended:
            record = observer.next(time.monotonic() + _REFRESH)
            if record is not None and observer.is_last(record):
                break
            whole = None if record is None else sketch.take(record)
            picture = whole or picture
            # Also without news: then it says for how long there has been none.
            if whole is not None or time.monotonic() - drawn_at > _REFRESH:
                live.update(draw(driver, picture, list(sketch.events), console.width), refresh=True)
                drawn_at = time.monotonic()
    console.print(f"driver {driver.pid} has ended", highlight=False)


# --- the pictures of a driver --------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """A driver at one moment.

    Attributes:
        groups: As in `GroupStatus`, whole; each rank also has ``rss_bytes`` (None if it has no
            process) and ``calls_per_s`` (None in the first picture).
        trees: As in `TreeStatus`.
        at: When it was whole, in seconds on the monotonic clock.
    """

    groups: list[dict[str, Any]]
    trees: list[dict[str, Any]]
    at: float


@dataclass(slots=True)
class Sketch:
    """The messages of a picture that is not whole yet.

    Attributes:
        events: The latest events that are worth showing, oldest first.
    """

    events: deque[dict[str, Any]] = field(default_factory=lambda: deque(maxlen=_EVENTS))
    _groups: dict[str, dict[str, Any]] = field(default_factory=dict[str, dict[str, Any]])
    _trees: dict[str, dict[str, Any]] = field(default_factory=dict[str, dict[str, Any]])
    _served: dict[tuple[str, int, int], tuple[float, int]] = field(
        default_factory=dict[tuple[str, int, int], tuple[float, int]]
    )

    def take(self, record: dict[str, Any]) -> Picture | None:
        """Return the picture that *record* completes, or None."""
        content = {key: value for key, value in record.items() if key not in _ENVELOPE}
        match record.get("event"):
            case "phalanx.group_state":
                first = content.pop("first")
                known = self._groups.get(content["group"])
                if first and known is not None:
                    known["ranks"] += content["ranks"]
                else:
                    self._groups[content["group"]] = content
            case "phalanx.tree_state":
                self._trees[record["root"]["path"]] = content
            case "phalanx.status_ended":
                return self._finish(int(record["groups"]))
            case event if record.get("kind") == "event" and event not in _QUIET:
                if record.get("level") != "debug":
                    self.events.append(record)
            case _:
                pass
        return None

    def _finish(self, groups: int) -> Picture | None:
        """Return the picture of the messages since the last one, unless some were missed."""
        told, self._groups = self._groups, {}
        trees, self._trees = self._trees, {}
        is_whole = len(told) == groups and all(
            len(group["ranks"]) == group["world_size"] for group in told.values()
        )
        if not is_whole:  # it began before we listened, or something was dropped
            return None
        served: dict[tuple[str, int, int], tuple[float, int]] = {}
        for name, group in told.items():
            for rank in group["ranks"]:
                key = (name, rank["rank"], rank["incarnation"])
                served[key] = (group["at"], rank["served"])
                rank["calls_per_s"] = _rate(self._served.get(key), served[key])
                rank["rss_bytes"] = resident_bytes(rank["pid"])
        self._served = served
        return Picture(
            groups=[told[name] for name in sorted(told)],
            trees=[trees[name] for name in sorted(trees)],
            at=time.monotonic(),
        )


def resident_bytes(pid: int | None) -> int | None:
    """Return how much memory of process *pid*, shared pages included, is in RAM; None without."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS:"))
    except (OSError, ValueError, StopIteration):
        return None


def _rate(before: tuple[float, int] | None, now: tuple[float, int]) -> float | None:
    if before is None or now[0] <= before[0]:
        return None
    return (now[1] - before[1]) / (now[0] - before[0])
